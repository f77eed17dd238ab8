"""The errors that end a start, and those that a peer can cause.

KilburnError
├── StartError        the process can't start: one line, exit status 2
└── WireError         a frame from a socket that can't be accepted; it is dropped and counted
"""


class KilburnError(Exception):
    """Whatever Kilburn raises on purpose. The text is one line, for people, and says what to do."""


class StartError(KilburnError):
    """The configuration, the model or the machine does not allow a start: one line, exit status 2."""


class WireError(KilburnError):
    """A frame that is no envelope of ours."""
