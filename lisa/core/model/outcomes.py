"""Exceptions with which a handler settles its message, and the texts of failures."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable, Iterator
from datetime import timedelta

from lisa.core.model.clock import checked_delay_ms
from lisa.core.model.errors import InvalidMessage

LONGEST_REASON_BYTES = 1024
LONGEST_TRACEBACK_BYTES = 2048
MOST_FRAMES = 20
_CUT = "...\n"
_DURATION = re.compile(
    r"(\d+(\.\d+)?\s*(ms|[smhdw]|sec|min|hr|second|minute|hour|day|week)s?\s*)+", re.IGNORECASE
)
"""What reads as a duration, also in units that Lisa does not know."""


class Retry(Exception):
    """Retry the message after `delay`, or after the policy's pause. Counts as an attempt.

    Raises InvalidMessage for a duration as the reason, and for an invalid delay.
    """

    def __init__(self, reason: str = "", *, delay: timedelta | str | None = None) -> None:
        self.delay = _checked_delay("Retry", reason, delay)
        super().__init__(reason or "the handler asked for a retry")


class Defer(Exception):
    """Deliver the message again after `delay`, because it cannot be handled now.

    Counts no attempt: only a ttl ends a message that is always deferred. Raises InvalidMessage
    without a delay, for an invalid one, and for a duration as the reason.
    """

    def __init__(self, reason: str = "", *, delay: timedelta | str | None = None) -> None:
        self.delay = _checked_delay("Defer", reason, delay)
        if self.delay is None:
            raise InvalidMessage("Defer has no delay; write Defer(delay='10s')")
        super().__init__(reason or "the handler deferred the message")


class Limited(Defer):
    """Deliver the message again after `retry_after`, and let its lane rest until then.

    For a handler that meets a limit of a remote system: no other message with the same key is
    delivered to the group meanwhile; without a key, no other message without a key. Counts no
    attempt. Raises InvalidMessage without a duration, and for an invalid one.
    """

    def __init__(self, reason: str = "", *, retry_after: timedelta | str | None = None) -> None:
        if retry_after is None:
            raise InvalidMessage("Limited has no pause; write Limited(retry_after='10s')")
        super().__init__(reason or "the handler met a limit", delay=retry_after)


class Discard(Exception):
    """Move the message to garbage immediately, with the reason."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason or "the handler discarded the message")


def _checked_delay(name: str, reason: object, delay: timedelta | str | None) -> timedelta | None:
    """The delay of an outcome. Raises InvalidMessage if the reason is meant to be the delay."""
    is_text = isinstance(reason, str) and (delay is not None or not _DURATION.fullmatch(reason))
    if not is_text and isinstance(reason, (str, int, float, timedelta)):
        raise InvalidMessage(
            f"{name}({reason!r}) has a pause as its reason; write {name}(delay='10s')"
        )
    return None if delay is None else timedelta(milliseconds=checked_delay_ms(delay))


def meant_to_be_raised(result: object) -> Exception | None:
    """The outcome that a handler returned: a `Retry`, `Defer` or `Discard`, or the class itself.

    An invalid outcome gives the error that its constructor raises: the class `Defer` lacks a delay.
    """
    if isinstance(result, (Retry, Defer, Discard)):
        return result
    if not isinstance(result, type) or not issubclass(result, (Retry, Defer, Discard)):
        return None
    try:
        return result()
    except Exception as error:  # noqa: BLE001  a subclass may raise anything
        return error


def leaves_of(error: BaseException) -> Iterator[BaseException]:
    """The errors that an exception group holds, in order; the error itself if it is not a group."""
    if not isinstance(error, BaseExceptionGroup):
        yield error
        return
    for inner in error.exceptions:
        yield from leaves_of(inner)


def reason_of(error: BaseException) -> str:
    """`ExceptionName: message`, at most 1 KiB of UTF-8; a group's message names its leaves."""
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
    """An exception's text; empty if its `__str__` fails. That of a group names its leaves."""
    try:
        if isinstance(error, BaseExceptionGroup):
            leaves = joined(map(reason_of, leaves_of(error)))
            return f"{error.message}: {leaves}" if error.message else leaves
        return str(error)
    except Exception:  # noqa: BLE001  __str__ is user code and may raise anything
        return ""


def joined(reasons: Iterable[str]) -> str:
    """Reasons as one text, each once."""
    return "; ".join(dict.fromkeys(reasons))
