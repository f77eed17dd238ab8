"""The memory core: pure and deterministic, no I/O, no clock, no randomness. The same operations give the same state.

blocks   which block is free, live or cached; references, generations, the order of eviction (made of `runs`)
lineage  how content is named
prefix   which cached content a block holds, as a tree of hashed prefixes (`forest`: to look at)
evicted  which content was evicted lately
events   what happened to blocks, as records for whoever wants to know
pins     prefixes that are kept from eviction
quotas   how many live blocks each tenant has, may have, and is guaranteed
memory   the tables of the sequences (`table`); joins these: match, plan, apply, acknowledge, release
swap     a memory with blocks on the host, too
"""
