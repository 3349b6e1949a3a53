"""Warns when messages are overdue and no manager is running.

Producers and consumers work without a manager, so nothing else would tell a new user why a message
that was sent for later never arrives.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from lisa.core.model.clock import duration_ms, human
from lisa.core.model.errors import LisaError
from lisa.core.redis import errors
from lisa.core.redis.flow import Aside, Flow, any_runs
from lisa.core.store.presence import ManagerPresence, alive, records_in, write_refusal
from lisa.core.store.replies import microseconds
from lisa.core.store.store import Store

OVERDUE = timedelta(seconds=3)
"""A running manager promotes within milliseconds; one that starts needs a second."""

OVERDUE_AT_END = timedelta(seconds=0.5)
"""The same for the last look of a role: a short program ends before it could warn otherwise."""

WARN_EVERY_S = 60.0
LAST_LOOK_S = 0.25

log = logging.getLogger("lisa")


class ManagerWatch:
    """Looks at single topics for one role, and warns at most once per minute."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._warned = -math.inf
        self.running: set[Any] = set()
        """Threads or tasks of looks that have not ended."""

    def look(self, shards: Sequence[tuple[str, str]]) -> Flow[None]:
        """Look at topics beside the caller's flow, unless a look runs or a warning is recent.

        shards: with the group whose retries to look at as well, or "".
        """
        return self._aside(shards, OVERDUE, within_s=0.0)

    def last_look(self, shard: str, group: str = "") -> Flow[None]:
        """Look before the role ends, for a quarter of a second at most."""
        overdue = min(OVERDUE, OVERDUE_AT_END)
        return self._aside([(shard, group)], overdue, within_s=LAST_LOOK_S)

    def _aside(
        self, shards: Sequence[tuple[str, str]], overdue: timedelta, *, within_s: float
    ) -> Flow[None]:
        if not any_runs(self.running) and time.monotonic() - self._warned >= WARN_EVERY_S:
            yield Aside(self._look_at_all(shards, overdue), within_s, self.running)

    def _look_at_all(self, shards: Sequence[tuple[str, str]], overdue: timedelta) -> Flow[None]:
        for shard, group in shards:
            if time.monotonic() - self._warned >= WARN_EVERY_S:
                yield from self._look(shard, group, overdue)

    def _look(self, shard: str, group: str, overdue: timedelta) -> Flow[None]:
        try:
            late_ms = yield from overdue_without_manager(self._store, shard, group, overdue)
        except (LisaError, *errors.ClientError) as error:
            log.debug("cannot look for overdue messages of topic %s: %s", shard, error)
            return
        except Exception:  # the role may close its connection during the look
            log.debug("cannot look for overdue messages of topic %s", shard, exc_info=True)
            return
        if late_ms is not None:
            self._warned = time.monotonic()
            log.warning("topic %s: %s", shard, warning(late_ms))


def warning(late_ms: int, what: str = "messages") -> str:
    """What to tell the user about messages or schedules that are overdue by that much."""
    return (
        f"{what} are overdue by {human(late_ms)}, and no manager is running; "
        "start one: lisa-manager"
    )


def overdue_without_manager(
    store: Store, shard: str, group: str, overdue: timedelta
) -> Flow[int | None]:
    """By how many ms the first waiting message is overdue if no manager runs, else None.

    overdue: less than this does not count. One attempt; raises LisaError. A user without the rights
    to look gets None.
    """
    keys = store.keys.topic(shard)
    queues = [keys.waiting, *([keys.group(group).retry] if group else [])]
    heads = yield from store.commands_once([("ZRANGE", key, 0, 0, "WITHSCORES") for key in queues])
    dues = [float(head[1]) for head in heads if isinstance(head, list) and head]
    if not dues:
        return None
    now_ms = microseconds((yield from store.command_once("TIME"))) // 1000
    if now_ms - min(dues) < duration_ms(overdue):
        return None
    records = yield from store.command_once("HGETALL", store.keys.managers)
    if alive(records_in(records, ManagerPresence), now_ms):
        return None
    if (yield from write_refusal(store, store.keys.managers)):
        return None  # managers cannot write their heartbeats
    return int(now_ms - min(dues))
