"""Why a call is refused or ends early, as every service of ours says it: a gRPC status, a stable code, one line for people.

The status says what kind of fault it is, the code which one: it travels in the trailing metadata as `kilburn-error`, beside
`kilburn-field` where one field of the request is at fault. Codes are stable, messages are for people. Each service has its
reasons in one table of its own, a subclass of `Reason`; a code that two of them have means the same in both.
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


class Reason(enum.Enum):
    """A reason: its stable name and its gRPC status."""

    def __init__(self, slug: str, status: StatusCode) -> None:
        self.slug = slug
        self.status = status


class CallError(KilburnError):
    """A call ends without an answer, or before its end."""

    def __init__(self, code: Reason, message: str, field: str = "") -> None:
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
