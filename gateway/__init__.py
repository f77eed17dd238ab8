"""The gateway: clients' gRPC calls in, text out; between them token ids to and from the memory manager.

`validate`, `text` and `streams` are pure; `model` reads a folder once; `engine` is the link to the memory manager; `inference`
is what each call does, `guard` how each ends; `service` starts and drains the process. Knows nothing of blocks and tensors, and
imports no torch.
"""
