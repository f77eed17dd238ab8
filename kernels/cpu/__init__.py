"""The CPU's backend: C++ for x86-64, in one library that is compiled when the package is installed.

`build.py` compiles it, `library.py` loads it. Importing this package imports nothing else.
"""
