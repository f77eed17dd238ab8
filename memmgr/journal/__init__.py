"""The journal: the memory core's operations, recorded as they come, and run again later.

The core is a state machine: the same operations give the same state. `journaled` has the memory that tells of its operations,
`recording` turns them into entries of journal.proto, `files` keeps these in a file that tells when it was cut off or damaged;
`reading` takes them out again, `operations` does each again, and `replaying` runs them all and checks every invariant.
"""
