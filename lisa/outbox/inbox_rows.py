"""The rows of an inbox: which delivery each one stands for, and when it goes.

Shared by the inboxes of SQLAlchemy and of Django.
"""

from __future__ import annotations

import logging
import threading
import time
from datetime import timedelta
from hashlib import blake2b
from typing import NamedTuple

from lisa.core.model.clock import duration_ms, option_duration
from lisa.core.model.errors import ConfigError
from lisa.core.model.message import Message

KEEP = "7d"
PORTION = 500
"""How many expired rows are deleted at a time; SQLite before 3.32 takes 999 parameters."""

DELETE_EVERY_S = 60.0

ROLLED_BACK = (
    "the handler's transaction was rolled back, by the handler, or by the database in a deadlock "
    "or after a failed statement; to undo a part, or to catch a database error, put the "
    "statements into "
)
"""Why a delivery fails whose row is not there before the commit; what to use instead follows."""

log = logging.getLogger("lisa.consumer")


class InboxRow(NamedTuple):
    """A row of an inbox: 16 bytes, and epoch milliseconds."""

    digest: bytes
    expires_ms: int


def digest_of(message: Message) -> bytes:
    """Identifies one send of a message to one group, at each of its deliveries; 16 bytes."""
    parts = (message.topic, message.group, message.id, message.token)
    return blake2b("\0".join(parts).encode(), digest_size=16).digest()


def now_ms() -> int:
    """This machine's clock in epoch milliseconds."""
    return int(time.time() * 1000)


def log_handled(message: Message) -> None:
    """Log that a delivery is acked without a call."""
    said = "topic %s: message %s was handled before, and is acked"
    log.info(said, message.topic, message.id, extra=message.log_fields)


def log_not_deleted(error: Exception) -> None:
    """Log why expired rows stay."""
    log.warning("expired rows of the inbox cannot be deleted: %s", error)


class InboxRows:
    """Makes the rows of an inbox, and says when to delete expired ones.

    A consumer deletes one portion a minute, after a message. A full portion suggests that there are
    more expired rows, so the next one is deleted after the next message.

    keep: how long rows are kept. Raises ConfigError.
    """

    def __init__(self, keep: timedelta | str) -> None:
        self._keep_ms = duration_ms(option_duration("keep", keep))
        if self._keep_ms <= 0:
            raise ConfigError("keep must be above 0")
        self._lock = threading.Lock()
        self._delete_at = 0.0

    def row_of(self, message: Message) -> InboxRow:
        """The row of a delivery."""
        return InboxRow(digest_of(message), now_ms() + self._keep_ms)

    def begin_deleting(self) -> bool:
        """Whether the caller is to delete a portion of expired rows now."""
        now = time.monotonic()
        with self._lock:
            if now < self._delete_at:
                return False
            self._delete_at = now + DELETE_EVERY_S
            return True

    def deleted(self, count: int) -> None:
        """Take note of the size of a portion."""
        if count >= PORTION:
            self._delete_at = 0.0
