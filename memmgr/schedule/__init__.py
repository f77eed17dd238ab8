"""The scheduler: requests, their states, and the batch of each step. Pure: time is an argument, messages are the service's.

requests   one request's life, as a table of states
plans      the frozen values that go in and come out
scheduler  continuous batching over the memory core
"""
