"""The memory core: pure and deterministic, no I/O, no clock, no randomness. The same operations give the same state.

blocks   which block is free, live or cached; references, generations, the order of eviction
prefix   which cached content a block holds, as a tree of hashed prefixes
events   what happened to blocks, as records for whoever wants to know
pins     prefixes that are kept from eviction
quotas   how many live blocks each tenant has, may have, and is guaranteed
memory   the tables of the sequences; joins the two: match, plan, apply, acknowledge, release
"""
