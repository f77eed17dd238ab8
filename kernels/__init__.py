"""Attention over a paged KV cache: one interface, several backends.

Knows frames, block tables and rows; not sequences, models or processes. Importing this package imports nothing else.

The name. Hugging Face's package `kernels` has the same one, and transformers asks for the *version of whatever distribution
owns the import name `kernels`*: between 0.18.2 and 0.19 (in 5.24) it imports its kernel loader from here, which fails. Two
things keep that from happening, both tested in tests/kernels/test_kernels_name.py:

- our distribution (`kilburn`) keeps its version out of that window;
- where Hugging Face's distribution is installed too, the executor refuses to start (executor/clash.py).
"""
