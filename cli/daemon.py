"""`python -m cli.daemon -c FILE`: supervisord, which ends when `kilburn up` does, however that ended."""

import os
import re
import sys
from typing import Any, Final

from cli import lifeline

#: How supervisord tells that a service ended well when it was asked to. It takes status 0 for unexpected (a service that ends so
#: by itself is started again), and so tells it as a warning.
_ENDED_WELL: Final = re.compile(r"stopped: \w+ \(exit status 0\)")


def main() -> None:
    """Run supervisord in the foreground."""
    from supervisor.loggers import Logger
    from supervisor.supervisord import main as supervisord

    warn = Logger.warn

    def warn_or_inform(logger: Any, message: str, **values: object) -> None:  # noqa: ANN401 - supervisor has no types
        (logger.info if _ENDED_WELL.fullmatch(message) else warn.__get__(logger))(message, **values)

    Logger.warn = warn_or_inform
    lifeline.follow_parent()
    os.environ[lifeline.SUPERVISED] = str(os.getpid())  # the services follow supervisord
    supervisord(sys.argv[1:])


if __name__ == "__main__":
    main()
