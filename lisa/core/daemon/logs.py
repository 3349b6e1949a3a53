"""Logging for daemons: one line per record, as `text` for people or `json` for programs.

Credentials in URLs are removed from every line.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Literal, TextIO

import msgspec

from lisa.core.model.clock import utc_text

LogFormat = Literal["text", "json"]

_CREDENTIALS = re.compile(r"(?<=://)[^/\s]*@")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_encode = msgspec.json.Encoder(enc_hook=str).encode


def redacted(text: str) -> str:
    """Replace the credentials in every URL of a text by `***`."""
    return _CREDENTIALS.sub("***@", text)


def configure(
    form: LogFormat = "text", level: str = "info", *, stream: TextIO | None = None
) -> None:
    """Set up the root logger of a daemon, replacing any previous setup.

    `stream` defaults to standard error. Loggers of libraries only emit warnings.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_Json() if form == "json" else _Text())
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    for library in ("apscheduler", "asyncio", "redis"):
        logging.getLogger(library).setLevel(logging.WARNING)


def _moment(record: logging.LogRecord) -> str:
    return utc_text(datetime.fromtimestamp(record.created, UTC))


class _Text(logging.Formatter):
    """`2026-01-31T12:00:00.000Z INFO    lisa.manager: ...`, followed by a traceback if any."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_moment(record)} {record.levelname:<7} {record.name}: {record.getMessage()}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return redacted(line)


class _Json(logging.Formatter):
    """One JSON object per line: time, level, logger, message, `extra=` fields, and traceback."""

    def format(self, record: logging.LogRecord) -> str:
        content: dict[str, object] = {
            "time": _moment(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": redacted(record.getMessage()),
        }
        for name, value in vars(record).items():
            if name not in _STANDARD:
                content[name] = redacted(value) if isinstance(value, str) else value
        if record.exc_info:
            content["error"] = redacted(self.formatException(record.exc_info))
        try:
            return _encode(content).decode()
        except UnicodeEncodeError:  # lone surrogates, as in names of files that are not UTF-8
            return json.dumps(content, default=str)
