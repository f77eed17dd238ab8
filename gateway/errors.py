"""Every reason for which a call of the gateway is refused or ends early, with its gRPC status, in one table.

How a reason travels is every service's: kilburn/reasons.py.
"""

from grpc import StatusCode

from kilburn.reasons import ERROR_KEY, FIELD_KEY, CallError, Reason, quoted

__all__ = ["ERROR_KEY", "FIELD_KEY", "CallError", "Code", "quoted"]


class Code(Reason):
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
