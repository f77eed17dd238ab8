"""`python -m cli.daemon -c FILE`: supervisord, which ends when `kilburn up` does, however that ended."""

import json
import os
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from cli import lifeline
from cli.options import ENVIRONMENT_PREFIX

#: How supervisord tells that a service ended well when it was asked to. It takes status 0 for unexpected (a service that ends so
#: by itself is started again), and so tells it as a warning.
_ENDED_WELL: Final = re.compile(r"stopped: \w+ \(exit status 0\)")

#: supervisord's names of levels -> those of the services' logs.
_LEVELS: Final = {"CRIT": "critical", "ERRO": "error", "WARN": "warning", "INFO": "info"}


class _JsonFormat:
    """A format of supervisord's own log lines, which it applies by `%`: the services' JSON."""

    def __mod__(self, values: Mapping[str, str]) -> str:
        level = _LEVELS.get(values["levelname"], "debug")
        timestamp = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        line = {"process": "supervisord", "event": values["message"], "level": level, "timestamp": timestamp}
        return json.dumps(line) + "\n"


def main() -> None:
    """Run supervisord in the foreground."""
    from supervisor.loggers import Handler, Logger
    from supervisor.supervisord import main as supervisord

    warn = Logger.warn

    def warn_or_inform(logger: Any, message: str, **values: object) -> None:  # noqa: ANN401 - supervisor has no types
        (logger.info if _ENDED_WELL.fullmatch(message) else warn.__get__(logger))(message, **values)

    set_format = Handler.setFormat

    def set_json_format(handler: Any, format_: str) -> None:  # noqa: ANN401
        """Leave the format of what a service writes, which is its message alone, as it is."""
        set_format(handler, _JsonFormat() if "%(levelname)s" in format_ else format_)

    Logger.warn = warn_or_inform
    if os.environ.get(f"{ENVIRONMENT_PREFIX}LOG_FORMAT") == "json":
        Handler.setFormat = set_json_format
    lifeline.follow_parent()
    os.environ[lifeline.SUPERVISED] = str(os.getpid())  # the services follow supervisord
    supervisord(sys.argv[1:])


if __name__ == "__main__":
    main()
