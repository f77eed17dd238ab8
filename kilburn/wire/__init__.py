"""What the three processes say to one another, and how: envelopes, fencing, sockets, their paths.

`envelope` is pure; `sockets` owns ZeroMQ; `endpoints` owns the paths. None of them knows what a message means.
"""
