"""Logging for daemons: one line per record, as `text` for people or `json` for programs.

Credentials in URLs are removed from every line. Neither a full pipe nor a value that cannot be
written affects the thread that logs.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import select
import sys
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import islice
from queue import SimpleQueue
from typing import Literal, TextIO

import msgspec

from lisa.core.model.clock import utc_text

LogFormat = Literal["text", "json"]

_CREDENTIALS = re.compile(r"(\bredis[a-z+]*://)[^\s'\"]*@|(?<=://)[^/\s]*@")
"""Those of a server may hold a slash, although its URL is refused then."""
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_OWN = ("time", "level", "logger", "message", "error")

MOST_LINES = 10_000
"""Lines that may wait to be written; further ones are dropped."""
FLUSH_S = 1.0
MOST_VALUES, MOST_LEVELS = 1000, 10
"""Values that one line shows of its `extra=` fields, and how deep they may be nested."""

_dropped = {"total": 0}


def dropped_lines() -> int:
    """Log lines that this process dropped because the reader of its log was too slow."""
    return _dropped["total"]


def redacted(text: str) -> str:
    """Replace the credentials in every URL of a text by `***`."""
    return _CREDENTIALS.sub(r"\1***@", text)


def configure(
    form: LogFormat = "text", level: str = "info", *, stream: TextIO | None = None
) -> None:
    """Set up the root logger of a daemon, replacing any previous setup.

    `stream` defaults to standard error. Loggers of libraries only emit warnings.
    """
    handler = _Writer(stream or sys.stderr)
    handler.setFormatter(_Json() if form == "json" else _Text())
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    for library in ("apscheduler", "asyncio", "redis"):
        logging.getLogger(library).setLevel(logging.WARNING)


class _Writer(logging.Handler):
    """Writes lines on a thread of its own, so that a full pipe does not block other threads."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._pid = 0
        self._unsaid = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record's line; while too many wait, drop and count it."""
        if self._pid != os.getpid():  # the first line of the process; threads are not forked
            self._pid, self._queued, self._written = os.getpid(), 0, 0
            self._lines: SimpleQueue[str] = SimpleQueue()
            threading.Thread(target=self._write_lines, name="lisa-log", daemon=True).start()
        if self._queued - self._written >= MOST_LINES:
            self._unsaid += 1
            _dropped["total"] += 1
            return
        if self._unsaid:
            self._put(
                _record(
                    "%d log lines were dropped: the reader of the log was too slow", self._unsaid
                )
            )
            self._unsaid = 0
        self._put(record)

    def _put(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception as error:  # noqa: BLE001  from the program's own values
            line = self.format(_record("cannot write a line of %s: %r", record.name, error))
        self._queued += 1
        self._lines.put(line + "\n")

    def _write_lines(self) -> None:
        while True:
            line = self._lines.get()
            try:
                _write(self._stream, line)
            except (OSError, ValueError):  # the log is closed
                _dropped["total"] += 1
            self._written += 1

    def flush(self) -> None:
        """Wait until all lines are written, at most `FLUSH_S`."""
        ends = time.monotonic() + FLUSH_S
        while self._pid == os.getpid() and self._written < self._queued and time.monotonic() < ends:
            time.sleep(0.001)


def _write(stream: TextIO, line: str) -> None:
    """Write past the stream's buffer, whose lock a blocked thread would hold when Python exits."""
    try:
        number = stream.fileno()
    except OSError:  # a stream in memory
        stream.write(line)
        return
    left = line.encode(stream.encoding or "utf-8", "backslashreplace")
    while left:
        try:
            left = left[os.write(number, left) :]
        except BlockingIOError:
            select.select([], [number], [])


def _record(message: str, *args: object) -> logging.LogRecord:
    """A warning of this module."""
    return logging.LogRecord(__name__, logging.WARNING, __file__, 0, message, args, None)


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
    """One JSON object per line: time, level, logger, message, `extra=` fields, and traceback.

    An extra field with one of these names is written as `extra_NAME`.
    """

    def format(self, record: logging.LogRecord) -> str:
        content: dict[str, object] = {
            "time": _moment(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": redacted(record.getMessage()),
        }
        plain = _Plain()
        for name, value in vars(record).items():
            if name not in _STANDARD:
                content[f"extra_{name}" if name in _OWN else name] = plain.value(value)
        if record.exc_info:
            content["error"] = redacted(self.formatException(record.exc_info))
        try:
            return msgspec.json.encode(content).decode()
        except (UnicodeEncodeError, OverflowError):  # a name of a file, a number beyond 64 bits
            return json.dumps(content)


class _Plain:
    """Converts values of one line to what JSON has, without credentials, cycles and depth."""

    def __init__(self) -> None:
        self._left = MOST_VALUES

    def value(self, value: object, levels: int = MOST_LEVELS) -> object:
        """The value, or its text; `...` for what is too deep or too much."""
        self._left -= 1
        if value is None or type(value) in (bool, int):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else str(value)
        if levels == 0 or self._left < 0:
            return "..."
        if isinstance(value, Mapping):
            return {
                self._text(k): self.value(v, levels - 1)
                for k, v in islice(value.items(), self._left + 1)
            }
        if isinstance(value, list | tuple | set | frozenset):
            return [self.value(item, levels - 1) for item in islice(value, self._left + 1)]
        if isinstance(value, datetime):
            return value.isoformat()
        return self._text(value)

    @staticmethod
    def _text(value: object) -> str:
        try:
            return redacted(str(value))
        except Exception:  # noqa: BLE001  of the program's own class
            return f"<{type(value).__name__}>"
