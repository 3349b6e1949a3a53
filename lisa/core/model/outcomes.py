"""Exceptions with which a handler settles its message, and the texts of failures."""

from __future__ import annotations

import traceback
from datetime import timedelta

from lisa.core.model.clock import checked_delay_ms
from lisa.core.model.errors import InvalidMessage

LONGEST_REASON_BYTES = 1024
LONGEST_TRACEBACK_BYTES = 2048
MOST_FRAMES = 20
_CUT = "...\n"


class Retry(Exception):
    """Retry the message after `delay`, or after the policy's pause. Counts as an attempt.

    Raises InvalidMessage for a number or a timedelta as the reason, and for an invalid delay.
    """

    def __init__(self, reason: str = "", *, delay: timedelta | str | None = None) -> None:
        given: object = reason
        if isinstance(given, (int, float, timedelta)):
            raise InvalidMessage(
                f"Retry({reason!r}) has a pause as its reason; write Retry(delay='10s')"
            )
        super().__init__(reason or "the handler asked for a retry")
        self.delay = None if delay is None else timedelta(milliseconds=checked_delay_ms(delay))


class Discard(Exception):
    """Move the message to garbage immediately, with the reason."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason or "the handler discarded the message")


def meant_to_be_raised(result: object) -> Retry | Discard | None:
    """The `Retry` or `Discard` that a handler returned, as an instance or without parentheses."""
    if result is Retry or result is Discard:
        return result()
    return result if isinstance(result, (Retry, Discard)) else None


def reason_of(error: BaseException) -> str:
    """`ExceptionName: message`, at most 1 KiB of UTF-8."""
    text = text_of(error)
    name = type(error).__name__
    encoded = (f"{name}: {text}" if text else name).encode("utf-8", "replace")
    return encoded[:LONGEST_REASON_BYTES].decode("utf-8", "ignore")


def traceback_of(error: BaseException) -> str:
    """The traceback without Lisa's own frames: its end, at most 2 KiB of UTF-8; "" if it fails."""
    first = error.__traceback__
    while first and str(first.tb_frame.f_globals.get("__name__")).startswith("lisa."):
        first = first.tb_next
    try:
        lines = traceback.format_exception(type(error), error, first, limit=-MOST_FRAMES)
    except Exception:  # noqa: BLE001  reads attributes of the exception, which are user code
        return ""
    encoded = "".join(lines).rstrip().encode("utf-8", "replace")
    if len(encoded) <= LONGEST_TRACEBACK_BYTES:
        return encoded.decode()
    kept = encoded[len(_CUT) - LONGEST_TRACEBACK_BYTES :].decode("utf-8", "ignore")
    return _CUT + kept.partition("\n")[2] if "\n" in kept else _CUT + kept


def text_of(error: BaseException) -> str:
    """An exception's text; empty if its `__str__` fails."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001  __str__ is user code and may raise anything
        return ""
