"""The executor: holds the physical pool and the weights, runs step plans strictly in order, samples.

Decides nothing about memory; imports neither memmgr nor the gateway.
"""
