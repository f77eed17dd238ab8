"""The backend for NVIDIA GPUs, in Triton. Importing this package imports nothing; `backend` imports the real Triton.

    common      what the kernels share: products, a tile's look at the cache, one step of the online softmax
    decoding    one query row for each sequence: contexts split over programs, and what joins the parts
    prefilling  chunks of rows: tiles over the query rows of one KV head's whole group
    storing     writing K and V; copying frames
    tiles       which sizes of tiles, warps and stages each kernel is run with
    launches    from tensors to a kernel with its grid and arguments; pure
    backend     the protocol

docs/kernels-triton.md has the design.
"""
