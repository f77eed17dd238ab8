"""The scheduler: requests, their states, and the batch of each step. Pure: time is an argument, messages are the service's.

scheduler  what the rest of the memory manager sees of it: joins the parts
plans      the frozen values that go in and come out
requests   one request's life, as a table of states
registry   who lives; deadlines
queues     where each request is: in a queue, or running with slots and tables
           forming, tenants, slots: the places that have rules of their own
planning   the batch of a step and its plan
           drafts: budget, growth, preemption; admitting: who begins; admission, sizes: whether there is room
results    plans in flight, and what becomes of their results
outputs    tokens, ends, events
lanes      beam search over sequences; beams: by itself
counters   what is counted
probe      what would become of a request
"""
