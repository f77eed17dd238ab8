"""No process outlives the one that answers for it: what Linux offers for that.

`follow_parent` makes a child end with its parent, even where the parent is killed; `adopt_orphans` gives a launcher the
descendants whose own parent died, so that it can end them. Knows no service.
"""

import ctypes
import os
import signal
import sys
from typing import Final

#: The process id of the parent to follow. Its presence also says that the process was started by `kilburn up`.
SUPERVISED: Final = "KILBURN_SUPERVISED"

# Of <linux/prctl.h>.
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36


def supervised() -> bool:
    """Return whether this process was started by `kilburn up`."""
    return SUPERVISED in os.environ


def follow_parent(end: signal.Signals = signal.SIGTERM) -> None:
    """Get SIGTERM, or another signal, when the parent that `SUPERVISED` names ends; end now where it is gone already."""
    parent = int(os.environ[SUPERVISED])
    _prctl(_PR_SET_PDEATHSIG, end)
    if os.getppid() != parent:  # it ended before the call above
        sys.exit(0)


def environment_of_child() -> dict[str, str]:
    """Return the environment for a child that is to follow this process."""
    return os.environ | {SUPERVISED: str(os.getpid())}


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, in the place of process 1."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")
