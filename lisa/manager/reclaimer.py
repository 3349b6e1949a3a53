"""in flight for too long -> retry or garbage: as soon as the oldest lease can end.

A full look goes through a group's whole pending list, window by window, and says when its oldest
lease can end: no delivery made later, with the topic's ack timeout, ends before that. Where nothing
is in flight, a plain read says so, and the next full look comes one ack timeout later. Leases of
their own may be shorter, so a glance each second tells where there are any.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence

from lisa.core.clock import duration_ms
from lisa.core.errors import GroupRemoved, LisaError
from lisa.core.metrics.numbers import Tally
from lisa.core.options import TopicOptions
from lisa.core.store import SyncStore
from lisa.core.transitions.reclaim import Reclaim, Reclaimed, TakenBack
from lisa.core.transitions.retry import Failed
from lisa.manager.announcer import Announcer
from lisa.manager.lookout import ask_all, standing, whole
from lisa.manager.loop import Outcome

__all__ = ["Reclaimer"]

GLANCE_S = 1.0
ACK_TIMEOUT_MS = duration_ms(TopicOptions().ack_timeout)
CLOSEST_S = 0.050
HARMLESS = 0.25  # of an ack timeout: those who hold leases renew them with two thirds left
FARTHEST_S = 60.0  # an ack timeout that was shortened meanwhile shows by then at the latest
BEFORE_ALL = "0-0"  # ends a range before the first entry: only leases of their own are looked at

log = logging.getLogger(__name__)


class Reclaimer:
    """Takes back what was in flight for too long. `window`: pending entries that one call sees."""

    def __init__(self, store: SyncStore, announcer: Announcer, window: int) -> None:
        self.moved = Tally()
        self._store = store
        self._announcer = announcer
        self._window = window
        self._scan_at: dict[tuple[str, str], float] = {}
        self._outages: tuple[tuple[float, float], ...] = ()
        self._held_until: dict[str, float] = {}

    def hold(self, since: float, gap_s: float = math.inf) -> None:
        """Wait until one ack timeout after an instant: an outage ages leases unfairly.

        One of a quarter of the ack timeout or less harms nobody: without a wait then, a
        connection that is cut again and again does not put off the taking back for ever.
        """
        # A later one that was no shorter says all that an earlier one did.
        kept = [one for one in self._outages if one[1] > gap_s]
        self._outages = (*kept, (since, gap_s))
        self._held_until.clear()

    def look_at_all(self) -> None:
        """Make the next look at every group a full one."""
        self._scan_at.clear()

    def forget(self, topic: str) -> None:
        """Keep nothing of a topic that is gone."""
        self._held_until.pop(topic, None)
        for key in [key for key in self._scan_at if key[0] == topic]:
            self._scan_at.pop(key, None)

    def glance(self, topics: Sequence[str]) -> list[str]:
        """Those that a step is to look at: a lease of its own, or a group that is new to us.

        To be asked each `GLANCE_S`. Raises ServerUnavailable.
        """
        new: set[str] = set()
        leases: dict[str, list[str]] = {}
        for topic in topics:
            for name in self._store.known_groups(topic) or ():
                if (topic, name) not in self._scan_at:
                    new.add(topic)
                own = self._store.keys.topic(topic).group(name)
                leases.setdefault(topic, []).append(own.leases)
        return sorted(new.union(standing(self._store, leases)))

    def step(self, topics: Sequence[str]) -> list[Outcome]:
        """Look at each topic's groups, first windows in one round trip; when to look again."""
        outcomes: dict[str, Outcome] = {}
        looks: list[Reclaim] = []
        now = time.monotonic()
        for topic in topics:
            try:
                held = self._hold_of(topic)
                outcomes[topic] = held if held > now else now + FARTHEST_S
                if held <= now:
                    looks += self._looks(topic, now)
            except LisaError as error:
                outcomes[topic] = error
        calls, latest = self._worth_it(looks, now)
        results = self._store.drive(self._store.run_many(calls)) if calls else []
        received = time.monotonic()
        for call, at_latest, result in zip(calls, latest, results, strict=True):
            so_far = outcomes[call.topic]
            if isinstance(so_far, float):
                at = self._settle(call, result, received, at_latest)
                outcomes[call.topic] = min(so_far, at) if isinstance(at, float) else at
        for look in looks:
            so_far = outcomes[look.topic]
            if isinstance(so_far, float):
                next_full = self._scan_at.get((look.topic, look.group), so_far)
                outcomes[look.topic] = min(so_far, next_full)
        return [outcomes[topic] for topic in topics]

    def _looks(self, topic: str, now: float) -> list[Reclaim]:
        groups = self._store.known_groups(topic)
        if groups is None:
            groups = self._store.drive(self._store.groups(topic))
        full = {group: self._scan_at.get((topic, group), now) <= now for group in groups}
        return [
            Reclaim(topic, group, window=self._window)
            if full[group]
            else Reclaim(topic, group, end=BEFORE_ALL, window=self._window)
            for group in groups
        ]

    def _worth_it(self, looks: Sequence[Reclaim], now: float) -> tuple[list[Reclaim], list[float]]:
        """Those where plain reads found anything: in flight, or (no full look) leases.

        With each comes the instant of its next look at the latest.
        """
        questions: list[tuple[str, ...]] = []
        for look in looks:
            keys = self._store.keys.topic(look.topic)
            own = keys.group(look.group)
            if look.end == BEFORE_ALL:
                questions.append(("EXISTS", own.leases))
            else:
                questions.append(("XPENDING", own.ready, look.group))
                questions.append(("HGET", keys.options, "ack_timeout"))
        replies = iter(ask_all(self._store, questions))
        found, latest = list[Reclaim](), list[float]()
        for look in looks:
            reply, at = next(replies), now + FARTHEST_S
            if look.end != BEFORE_ALL:
                # However long the leases seen are: what is delivered from now on ends by then.
                at = now + min(whole(next(replies), ACK_TIMEOUT_MS) / 1e3, FARTHEST_S)
                if isinstance(reply, list) and reply[0] == 0:
                    self._scan_at[look.topic, look.group] = at
                    continue
            if reply != 0:
                found.append(look)
                latest.append(at)
        return found, latest

    def _settle(
        self, call: Reclaim, result: Reclaimed | LisaError, received: float, latest: float
    ) -> Outcome:
        """Go on to the end of one group's list; when to look at it again."""
        try:
            if isinstance(result, GroupRemoved):
                self._store.drive(self._store.groups(call.topic))
                return latest
            if isinstance(result, LisaError):
                return result
            ends = self._follow(call, result, received)
        except LisaError as error:
            return error
        at = min(max(ends, time.monotonic() + CLOSEST_S), latest)
        if call.end != BEFORE_ALL:
            self._scan_at[call.topic, call.group] = at
        return at

    def _follow(self, call: Reclaim, result: Reclaimed, received: float) -> float:
        """Window after window; the instant at which the earliest lease that was seen can end."""
        topic, group, ends = call.topic, call.group, math.inf
        moved, cleared = 0, 0
        while True:
            moved, cleared = moved + len(result.moved), cleared + result.cleared
            self._announcer.failed(topic, group, result.moved)
            self._log_deaths(topic, group, result.moved)
            if result.next_end_ms is not None:
                ends = min(ends, received + (result.next_end_ms + 1) / 1e3)
            if result.cursor is None:
                break
            result = self._store.call(
                Reclaim(topic, group, start=result.cursor, end=call.end, window=self._window)
            )
            received = time.monotonic()
        if moved or cleared:
            self.moved.add(moved, "reclaimed")
            self.moved.add(cleared, "cleared")
            log.info(
                "topic %s, group %s: %d taken back after the ack timeout, %d entries cleared",
                topic, group, moved, cleared, extra={"topic": topic, "group": group},
            )  # fmt: skip
        return ends

    def _log_deaths(self, topic: str, group: str, moved: Sequence[TakenBack]) -> None:
        for message_id, _, retried in moved:
            if retried.outcome is Failed.DEAD:
                log.warning(
                    "topic %s, group %s: message %r went to garbage after %d attempts",
                    topic, group, message_id, retried.failed_attempts,
                    extra={"topic": topic, "group": group},
                )  # fmt: skip

    def _hold_of(self, topic: str) -> float:
        outages = self._outages
        if not outages:
            return 0.0
        until = self._held_until.get(topic)
        if until is None:
            options = self._store.drive(self._store.options(topic))
            timeout_s = options.ack_timeout.total_seconds()
            harmful = [since for since, gap_s in outages if gap_s > timeout_s * HARMLESS]
            until = max(harmful, default=-math.inf) + timeout_s
            if outages is self._outages:
                self._held_until[topic] = until
        return until
