"""Schema check and topic registration on a cluster, where single nodes may be down.

`lisa:schema`, `lisa:topics` and `lisa:scheduled` are each on one node of a cluster, usually not the
topic's own. Work on a topic must not wait for them, so check and registration run beside the
caller's flow. While their nodes answer, the caller waits a few milliseconds for the result. Once a
node does not answer, the caller continues, and later calls retry at most every `AGAIN_S`, without
waiting. At its end a caller tries once more, and waits longer. What it leaves undone, managers do:
they search after each outage that lasts as long.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from lisa.core.model.errors import ConfigError, LisaError
from lisa.core.redis import errors
from lisa.core.redis.flow import Aside, Flow, any_runs

WITHIN_S = 0.25
"""Longest wait for a node that is not known to be down."""

AGAIN_S = 2.0

LAST_S = 2.0
"""Longest wait at the end. Managers notice a node that hangs for as long: they probe it each second
and expect the reply within another one."""

IDLE_AFTER_MS = 3_600_000
"""How long after its last registration managers unlist a topic without messages."""

DELETED_LISTED_MS = 60_000
"""How long a deleted topic stays listed, for producers that have registered it and still send."""

log = logging.getLogger(__name__)


def nothing() -> Flow[None]:
    """A flow without steps."""
    yield from ()


class TopicRegistration:
    """Pending schema check and topic registrations of one store.

    keys: what is read and written, for the log.
    add: lists topics. check: checks the schema. Both make a single attempt.
    """

    def __init__(
        self,
        keys: str,
        add: Callable[[Iterable[str]], Flow[None]],
        check: Callable[[], Flow[None]] = nothing,
    ) -> None:
        self._keys = keys
        self._add = add
        self._check = check
        self._owes_check = False
        self._unlisted: dict[str, None] = {}
        self._refusal: ConfigError | None = None
        self._is_away = False
        self._tried = 0.0
        self.running: set[Any] = set()

    def check(self) -> Flow[bool]:
        """Check the schema. Returns whether the check is complete. Raises ConfigError."""
        self._owes_check = True
        yield from self._attend()
        return not self._owes_check

    def add(self, topics: Iterable[str]) -> Flow[bool]:
        """List topics. Returns whether all are listed. Raises ConfigError."""
        wanted = dict.fromkeys(topics)
        self._unlisted |= wanted
        yield from self._attend()
        return self._unlisted.keys().isdisjoint(wanted)

    def finish(self) -> Flow[None]:
        """List the topics that are left, before the caller ends."""
        if self._unlisted:
            yield Aside(self._attempt(list(self._unlisted), {}), LAST_S, self.running)

    def _attend(self) -> Flow[None]:
        waits = not self._is_away
        if waits or (not any_runs(self.running) and time.monotonic() - self._tried >= AGAIN_S):
            self._tried = time.monotonic()
            attempt: dict[str, bool] = {}
            flow = self._attempt(list(self._unlisted), attempt)
            yield Aside(flow, WITHIN_S if waits else 0.0, self.running)
            if waits and not attempt:
                self._failed(f"no answer within {WITHIN_S:g} s")
        refusal, self._refusal = self._refusal, None
        if refusal is not None:
            raise refusal

    def _attempt(self, topics: list[str], attempt: dict[str, bool]) -> Flow[None]:
        try:
            if self._owes_check:
                yield from self._check()
                self._owes_check = False
            if topics:
                yield from self._add(topics)
        except ConfigError as error:
            self._refusal = error
        except (LisaError, *errors.ClientError) as error:
            self._failed(error)
        except Exception as error:  # noqa: BLE001  this flow has no caller that would see the error
            self._failed(repr(error))
        else:
            for topic in topics:
                self._unlisted.pop(topic, None)
            if self._is_away:
                log.info("the nodes that hold %s answer again", self._keys)
            self._is_away = False
        attempt["ended"] = True

    def _failed(self, why: object) -> None:
        if not self._is_away:
            log.warning("cannot read or write %s; will retry: %s", self._keys, why)
        self._is_away = True
