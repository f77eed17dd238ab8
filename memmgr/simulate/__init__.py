"""Traces through the memory core and the scheduler, with no model: how full the memory is, what is found again, who is preempted.

traces       published traces, as they are in their files, to requests
synthetic    lengths that are made up
buddy        a buddy allocator: contiguous runs of slots, each a power of two
policies     what a policy takes for a request: blocks as it grows, or one run of slots ahead
beams        a recorded beam search as an executor's answers
saturated    a queue that never runs dry, through the scheduler, step by step; what becomes of every slot
prefixes     prompts one by one through the prefix index: what a cache of some size finds again
eviction     other orders of eviction than the core's, and a bound on all of them

Stands on `core` and `schedule` and nothing else of ours; knows no terminal.
"""
