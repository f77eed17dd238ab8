"""The command line: commands, the launcher of the three processes, views for people.

Stands on everything and is imported by nothing. The services are imported inside the commands that run them, so that
`kilburn --help` is quick and `kilburn memmgr` loads no torch.
"""
