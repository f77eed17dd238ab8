"""`python -m cli.daemon -c FILE`: supervisord, which ends when `kilburn up` does, however that ended."""

import os
import sys

from cli import lifeline


def main() -> None:
    """Run supervisord in the foreground."""
    from supervisor.supervisord import main as supervisord

    lifeline.follow_parent()
    os.environ[lifeline.SUPERVISED] = str(os.getpid())  # the services follow supervisord
    supervisord(sys.argv[1:])


if __name__ == "__main__":
    main()
