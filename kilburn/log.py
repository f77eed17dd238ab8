"""Structured logs on standard error, one configuration for each process."""

import logging
import sys
from typing import Final

import structlog

from kilburn.config import LogConfig

_LEVELS: Final = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

Logger = structlog.typing.FilteringBoundLogger


def configure(config: LogConfig, process: str) -> Logger:
    """Set up structlog for this process and return its logger, bound to the process's name."""
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if config.format == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=0)
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info if config.format == "json" else _keep,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[config.level]),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    logger: Logger = structlog.get_logger().bind(process=process)
    return logger


def _keep(_: structlog.typing.WrappedLogger, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    return event
