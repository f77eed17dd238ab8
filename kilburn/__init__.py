"""The ground that the three services share: protocol, wire, configuration, logging, the Python client.

Knows nothing of blocks, tensors or text; imports none of the services.
"""

__version__ = "0.1.0"
