"""How fast it is, and against what.

Each module is a command, `python -m benchmarks.NAME`, that prints a table or, with --json, one object. They start what they
measure and end it. Figures of one run are compared with one another, never with those of another day.
"""
