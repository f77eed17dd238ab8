"""The journal: the memory core's operations, recorded as they come, and run again later.

The core is a state machine: the same operations give the same state. `recording` turns operations into entries of journal.proto,
`files` keeps them in a file that tells when it was cut off or damaged, `replaying` runs them again and checks every invariant.
"""
