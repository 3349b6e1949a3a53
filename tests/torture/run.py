"""One run from beginning to end: load, faults, drain, and the final state."""

from __future__ import annotations

import heapq
import json
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import redis

from lisa.admin.fsck import check
from lisa.admin.messages import LiveState, list_messages
from lisa.core.model.errors import LisaError
from lisa.core.store.store import chunks
from tests.torture import ticking
from tests.torture.faults import begin
from tests.torture.foreign import numbers_in, repair
from tests.torture.plan import draw
from tests.torture.restoring import WITHIN_S, has_begun, restore
from tests.torture.samples import EVERY_S, Sampler
from tests.torture.stage import Stage
from tests.torture.world import ACK_S, FOREIGN, MINUTE_MS, TOPICS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.torture.foreign import Repaired
    from tests.torture.options import Options
    from tests.torture.plan import Fault

TICK_S = 0.05
TELL_EVERY_S = 10.0
STARTS_WITHIN_S = 120.0  # all roles, on a busy machine
STUCK_AFTER_S = 10 * ACK_S
"""Messages are stuck after the longest delay, a closed window, and this long without 10 % progress
or a fault."""

LESS = 0.9

PAGE = 500


class Schedule:
    """Steps of faults and other work, each at its time."""

    def __init__(self) -> None:
        self._steps: list[tuple[float, int, Iterator[float]]] = []
        self._count = 0
        self.faults = 0

    def add(self, at: float, work: Iterator[float]) -> None:
        self._count += 1
        heapq.heappush(self._steps, (at, self._count, work))

    def step(self) -> bool:
        """Run what is due; returns whether anything is left."""
        while self._steps and self._steps[0][0] <= time.monotonic():
            _, number, work = heapq.heappop(self._steps)
            for pause in work:
                heapq.heappush(self._steps, (time.monotonic() + pause, number, work))
                break
        return bool(self._steps)


def run(options: Options, tell: Callable[[str], None]) -> None:
    """Run, and write the ledgers, `stage.jsonl`, `samples.jsonl` and `final.json` to `out`."""
    with Stage(options) as stage:
        stage.note(
            "begin",
            options={
                **options._asdict(),
                "out": str(options.out),
                "earlier": str(options.earlier or ""),
            },
        )
        _Run(stage, tell).whole()


class _Run:
    def __init__(self, stage: Stage, tell: Callable[[str], None]) -> None:
        self._stage = stage
        self._tell = tell
        self._began = time.monotonic()
        self._sampler = Sampler(stage)
        self._next_sample = self._next_word = 0.0
        self._doing = ""
        self._first_ticks: dict[str, int] | None = None

    def whole(self) -> None:
        stage, options = self._stage, self._stage.options
        for kind in ("manager", "consumer", "gateway", "puller", "archive"):
            self._start(kind)
        self._await_groups()
        self._await_gateway()
        if not options.restore:
            self._first_ticks = ticking.begin(stage.store)
        self._start("producer")
        if options.restore:
            self._await_archive()
        self._began = time.monotonic()
        stage.note("load")
        schedule = Schedule()
        for fault in draw(
            options.seed, options.seconds, options.every_s, options.cast, options.kinds
        ):
            schedule.add(self._began + fault.at_s, self._fault(fault))
        self._until(self._began + options.seconds, schedule)
        stage.end_roles("producer")
        stage.note("sent")
        if options.restore:
            self._tell("restoring")
            stage.end_roles("archive")
            restore(stage)
        if options.persistence != "always" and set(FOREIGN) & set(options.kinds):
            # A server that loses data may lose a repair but keep the damage.
            self._repair()
        self._drain()
        for kind in ("puller", "gateway", "consumer", "manager"):
            stage.end_roles(kind)
        (stage.out / "final.json").write_text(json.dumps(self._final()), encoding="utf-8")
        stage.note("over", lost_replies=stage.proxy.lost)

    def _await_groups(self) -> None:
        """A group declared later does not owe messages promoted earlier."""
        store, ends = self._stage.store, time.monotonic() + STARTS_WITHIN_S
        for topic in TOPICS:
            while set(store.drive(store.groups(topic.name))) != set(topic.groups):
                assert time.monotonic() < ends, f"nobody declared the groups of {topic.name}"
                self._look()
                time.sleep(TICK_S)
        self._stage.tail.begin()

    def _await_gateway(self) -> None:
        """Calls before the gateway listens fail without a fault."""
        ends = time.monotonic() + STARTS_WITHIN_S
        while not self._stage.is_gateway_open:
            assert time.monotonic() < ends, "the gateway did not begin"
            self._look()
            time.sleep(TICK_S)

    def _await_archive(self) -> None:
        ends = time.monotonic() + WITHIN_S
        while not has_begun(self._stage.out / "archive"):
            assert time.monotonic() < ends, "the archive did not begin"
            self._look()
            time.sleep(TICK_S)

    def _start(self, kind: str) -> None:
        for role in self._stage.roles.values():
            if role.kind == kind:
                self._stage.start(role)

    def _fault(self, fault: Fault) -> Iterator[float]:
        self._doing = f"{fault.kind} {fault.target}"
        yield from begin(self._stage, fault)

    def _until(self, ends: float, schedule: Schedule) -> None:
        """Run until that instant, and until the last fault has ended."""
        left = True
        while left or time.monotonic() < ends:
            left = schedule.step()
            self._look()
            time.sleep(TICK_S)

    def _look(self) -> None:
        stage, now = self._stage, time.monotonic()
        stage.restart_those_that_died()
        if not stage.is_up:
            return
        with suppress(redis.RedisError, LisaError):
            stage.tail.step()
            if now >= self._next_sample:
                self._next_sample = now + EVERY_S
                self._sampler.step()
            if now >= self._next_word:
                self._next_word = now + TELL_EVERY_S
                self._tell(self._word())

    def _word(self) -> str:
        counts = {"sent": 0, "acked": 0}
        for topic in TOPICS:
            for name, n in self._stage.store.drive(self._stage.store.stats(topic.name)).items():
                if name == "sent" or name.startswith("acked@"):
                    counts[name.partition("@")[0]] += n
        standing = self._stage.standing()
        return (
            f"{time.monotonic() - self._began:6.0f} s  {counts['sent']:,} sent  "
            f"{counts['acked']:,} acked  "
            + "  ".join(f"{n:,} {name}" for name, n in standing.items())
            + f"  ({self._doing})"
        )

    def _repair(self) -> None:
        work = repair(self._stage, [topic.name for topic in TOPICS])
        while True:
            try:
                time.sleep(next(work))
            except StopIteration as end:
                found: Repaired = end.value
                break
            self._look()
        self._stage.note("repair", repairing=found.began, repaired=found.kinds, found=found.words)

    def _drain(self) -> None:
        """Until only garbage is left, or nothing has moved for longer than anything may take."""
        best, since = None, time.monotonic()
        self._doing = "draining"
        patience_s = self._stage.options.longest_s + MINUTE_MS / 1000 + STUCK_AFTER_S
        while time.monotonic() < since + patience_s:
            self._look()
            standing = self._stage.standing()
            left = sum(n for name, n in standing.items() if name != "garbage")
            if not left:
                return
            if best is None or left <= LESS * best:
                best, since = left, time.monotonic()
            time.sleep(4 * TICK_S)

    def _final(self) -> dict[str, Any]:
        """All live messages, the findings of fsck, and the counters."""
        store = self._stage.store
        report = store.drive(check(store, [topic.name for topic in TOPICS]))
        rows = [row for topic in TOPICS for row in self._live(topic.name)]
        stats = {one.name: store.drive(store.stats(one.name)) for one in TOPICS}
        return {
            "live": rows,
            "bodies": report.bodies,
            "ticks": None if self._first_ticks is None else ticking.found(store, self._first_ticks),
            "stats": stats,
            "findings": [
                {
                    "kind": one.kind,
                    "topic": one.topic,
                    "group": one.group,
                    "id": one.id,
                    "what": one.what,
                }
                for one in report.findings
            ],
        }

    def _live(self, topic: str) -> Iterator[dict[str, Any]]:
        store = self._stage.store
        keys = store.keys.topic(topic)
        for state in LiveState:
            cursor: str | None = None
            while True:
                page = store.drive(list_messages(store, topic, state, cursor=cursor, limit=PAGE))
                for some in chunks(page.rows, PAGE):
                    bodies = store.ask("MGET", *[keys.body(row.id) for row in some])
                    for row, body in zip(some, bodies, strict=True):
                        [number] = numbers_in([body]) or [0]  # 0: a record without a message
                        yield {
                            "number": number,
                            "topic": topic,
                            "group": row.group,
                            "state": str(state),
                            "id": row.id,
                            "attempts": row.attempts,
                            "reason": row.reason,
                        }
                cursor = page.cursor
                if cursor is None:
                    break
