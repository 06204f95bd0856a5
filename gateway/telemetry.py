"""Logs: one line an event, as text for people or JSON for machines.

A line has an event word and ids. It never has code, outputs, tokens or values of environment variables; that is kept by never
passing them to a logger, and a test looks for them.
"""

import logging
import sys
from typing import Literal

import structlog


def configure(level: str, form: Literal["console", "json"]) -> None:
    """Sends all logs to stderr. Called once, by whoever starts the process."""
    number = getattr(logging, level.upper())
    renderer: structlog.types.Processor = (
        structlog.processors.JSONRenderer()
        if form == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback)
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info if form == "json" else _as_is,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )


def _as_is(_logger: object, _method: str, event: structlog.types.EventDict) -> structlog.types.EventDict:
    return event
