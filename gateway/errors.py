"""Why a call is refused or ends early: every reason a client can meet, with its gRPC status, in one table.

The status says what kind of fault it is, the code which one: it travels in the trailing metadata as `kilburn-error`, beside
`kilburn-field` where one field of the request is at fault. Codes are stable, messages are for people.
"""

import enum
from typing import Final

from grpc import StatusCode

from kilburn.errors import KilburnError

#: Trailing metadata of every refused call.
ERROR_KEY: Final = "kilburn-error"
FIELD_KEY: Final = "kilburn-field"

#: Of a message, in characters: gRPC carries it in a header, and clients limit headers to 8 KiB.
_MAX_MESSAGE: Final = 500

#: Of a value that a message quotes.
_MAX_QUOTED: Final = 60


class Code(enum.Enum):
    """A reason: its stable name and its gRPC status."""

    # The request itself: sending it again won't help.
    INVALID_VALUE = "invalid-value", StatusCode.INVALID_ARGUMENT
    EMPTY_PROMPT = "empty-prompt", StatusCode.INVALID_ARGUMENT
    PROMPT_TOO_LONG = "prompt-too-long", StatusCode.INVALID_ARGUMENT
    UNKNOWN_TOKEN = "unknown-token", StatusCode.INVALID_ARGUMENT
    BAD_CHAT = "bad-chat", StatusCode.INVALID_ARGUMENT
    MALFORMED_MESSAGE = "malformed-message", StatusCode.INVALID_ARGUMENT
    NEVER_FITS = "never-fits", StatusCode.INVALID_ARGUMENT
    ANSWER_TOO_LONG = "answer-too-long", StatusCode.INVALID_ARGUMENT
    NOT_BUILT = "not-built", StatusCode.UNIMPLEMENTED
    DUPLICATE_REQUEST = "duplicate-request", StatusCode.ALREADY_EXISTS

    # The request's own end.
    CANCELLED = "cancelled", StatusCode.CANCELLED
    DEADLINE = "deadline", StatusCode.DEADLINE_EXCEEDED

    # The system: the same request may succeed later.
    QUEUE_FULL = "queue-full", StatusCode.RESOURCE_EXHAUSTED
    NOT_SERVING = "not-serving", StatusCode.UNAVAILABLE
    MEMMGR_LOST = "memmgr-lost", StatusCode.UNAVAILABLE
    EXECUTOR_LOST = "executor-lost", StatusCode.UNAVAILABLE
    STOPPING = "stopping", StatusCode.UNAVAILABLE

    # Our fault.
    INTERNAL = "internal", StatusCode.INTERNAL

    def __init__(self, slug: str, status: StatusCode) -> None:
        self.slug = slug
        self.status = status


class CallError(KilburnError):
    """A call ends without an answer, or before its end."""

    def __init__(self, code: Code, message: str, field: str = "") -> None:
        super().__init__(_one_line(message))
        self.code = code
        self.field = field

    @property
    def message(self) -> str:
        """One line for people."""
        return str(self.args[0])

    @property
    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        """What programs read."""
        pairs = ((ERROR_KEY, self.code.slug),)
        return (*pairs, (FIELD_KEY, self.field)) if self.field else pairs


def quoted(value: str) -> str:
    """Return a client's text as a message may show it: printable, and not too long."""
    short = value if len(value) <= _MAX_QUOTED else f"{value[:_MAX_QUOTED]}..."
    return ascii(short)


def _one_line(message: str) -> str:
    line = " ".join(message.split())
    return line if len(line) <= _MAX_MESSAGE else f"{line[: _MAX_MESSAGE - 3]}..."
