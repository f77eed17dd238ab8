"""Every reason for which an admin call is refused or ends, with its gRPC status, in one table. See kilburn/reasons.py."""

from grpc import StatusCode

from kilburn.reasons import Reason


class Code(Reason):
    """A reason: its stable name and its gRPC status."""

    # The request itself: sending it again won't help.
    INVALID_VALUE = "invalid-value", StatusCode.INVALID_ARGUMENT
    EMPTY_PROMPT = "empty-prompt", StatusCode.INVALID_ARGUMENT
    UNKNOWN_TOKEN = "unknown-token", StatusCode.INVALID_ARGUMENT
    MALFORMED_MESSAGE = "malformed-message", StatusCode.INVALID_ARGUMENT
    UNKNOWN_CURSOR = "unknown-cursor", StatusCode.OUT_OF_RANGE

    # What it is about is not there.
    NO_SEQUENCE = "no-such-sequence", StatusCode.NOT_FOUND
    NO_BLOCK = "no-such-block", StatusCode.NOT_FOUND
    NO_PIN = "no-such-pin", StatusCode.NOT_FOUND
    NOT_CACHED = "not-cached", StatusCode.NOT_FOUND

    # Something else has to go first.
    TOO_MUCH_PINNED = "too-much-pinned", StatusCode.RESOURCE_EXHAUSTED
    TOO_MUCH_GUARANTEED = "too-much-guaranteed", StatusCode.FAILED_PRECONDITION
    TOO_MANY_QUOTAS = "too-many-quotas", StatusCode.RESOURCE_EXHAUSTED
    TOO_MANY_WATCHERS = "too-many-watchers", StatusCode.RESOURCE_EXHAUSTED

    # The system: the same request may succeed later.
    BUSY = "busy", StatusCode.RESOURCE_EXHAUSTED
    NOT_SERVING = "not-serving", StatusCode.UNAVAILABLE
    NO_ANSWER = "no-answer", StatusCode.UNAVAILABLE
    STOPPING = "stopping", StatusCode.UNAVAILABLE

    # Our fault.
    INTERNAL = "internal", StatusCode.INTERNAL
