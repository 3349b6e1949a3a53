"""Scenarios in which a role is killed at a point and replaced, one for each role.

Each scenario ("life") has its own server. It defines the initial state, what the other roles do
meanwhile, and what must be true afterwards.
"""

import json
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from lisa.admin.fsck import check as fsck
from lisa.core.transitions.lease import FIRST, Reclaim
from lisa.core.transitions.promote import Promote
from lisa.core.transitions.upkeep import Expire
from tests.faults.kill_children import Child
from tests.faults.kill_points import Point, is_plain_read, read_log
from tests.roles import Cast
from tests.scripts import all_versions
from tests.servers import PATIENCE

STEP_S = 0.04
RETRY_DELAYS = ",".join("0" * 30)
"""An attempt is lost whenever a process does not get a core for as long as its lease."""
LONG_S = 3 * PATIENCE.total_seconds()
"""A wait here is for a dozen things, in a process that shares the machine with many others."""
ALLOWED = {
    "done", "options", "groups", "stats", "consumers", "history", "events", "archived", "schedules",
    "reply", "lanes", "limits",
}  # fmt: skip
"""What may be left of a topic when all its messages are settled, beside an empty stream."""


class Visit(NamedTuple):
    """Kills process number `start` of a life at a point; without a point, none.

    `fresh`: the server has no scripts and no layout when the role starts.
    """

    point: Point | None
    start: int = 0
    fresh: bool = False


class MissedPoint(AssertionError):
    """The process was not killed at its point."""


class Life(ABC):
    """One role's scenario on one server, with at most one kill."""

    role = ""
    said = ""
    """What each process says once it heeds signals."""

    def __init__(self, url: str, directory: Path, visit: Visit) -> None:
        self.url = url
        self.directory = directory
        self.cast = Cast(url)
        self.ends_as: dict[str, set[str]] = {}
        self.handled: list[dict[str, Any]] = []
        self._visit = visit
        self._starts = 0
        self._child: Child | None = None

    def run(self) -> list[list[Point]]:
        """Run the scenario and check it; the points that each of its processes passed."""
        try:
            self.directory.mkdir(parents=True)
            self._prepare()
            self.start()
            self.live()
            self.stop()
            found = [read_log(log) for log in sorted(self.directory.glob("points-*"))]
            died = [point for _, point in found if point is not None]
            wanted = [self._visit.point] if self._visit.point else []
            # Which reads a process makes, and how often it makes a call, depends on timing: on
            # timers, and on settlements that share a call. A life may not pass this point again.
            is_optional = all(is_plain_read(point.name) or point.time > 1 for point in wanted)
            if died != wanted and (died or not is_optional):
                raise MissedPoint(f"not killed there: {self.output}")
            self.check()
            return [points for points, _ in found]
        finally:
            self._kill()
            self.close()

    def _prepare(self) -> None:
        ask = self.cast.store.ask
        ask("FLUSHALL")
        # Tombstones outlast a life on a busy machine.
        self.cast.declare(ack_timeout="400", retry_delays=RETRY_DELAYS, retention="3600000")
        self.prepare()
        if self._visit.fresh:
            ask("DEL", self.cast.store.keys.schema)
            ask("SCRIPT", "FLUSH")
        else:
            for script in all_versions():
                ask("SCRIPT", "LOAD", script.source)

    def _kill(self) -> None:
        if self._child is not None:
            self._child.signal(signal.SIGKILL)
            self._child.wait()

    def close(self) -> None:
        self.cast.store.close()

    @abstractmethod
    def prepare(self) -> None:
        """Create the state before the role starts."""

    @abstractmethod
    def live(self) -> None:
        """Everything until the role is stopped; `until` waits."""

    def turn(self) -> None:
        """One round of the other roles' work: by default a manager's, by plain transitions."""
        if past := self.cast.store.call(Promote(self.cast.topic)).expired:
            self.cast.store.call(Expire(self.cast.topic, past))
        start: str | None = FIRST
        while start is not None:
            start = self.cast.store.call(Reclaim(self.cast.topic, self.cast.group, start)).cursor

    def order(self) -> dict[str, Any]:
        return {}

    @property
    def output(self) -> str:
        return "".join(one.read_text() for one in sorted(self.directory.glob("output-*")))

    def start(self) -> None:
        """Start the role; only the first process is to be killed."""
        order = {
            "role": self.role,
            "url": self.url,
            "output": str(self.directory / f"output-{self._starts:02}"),
            "points": str(self.directory / f"points-{self._starts:02}"),
            "kill_at": str(self._visit.point or "") if self._starts == self._visit.start else "",
        }
        self._starts += 1
        self._child = Child(order | self.order())

    def replace(self) -> bool:
        """Replace the process if it was killed; true if it exited normally."""
        child = self._child
        assert child is not None
        if child.status is None:
            return False
        if child.status == -signal.SIGKILL and self._is_the_one():
            self.start()
            return False
        assert child.status == 0, f"ended as {child.status}: {self.output}"
        return True

    def until(self, condition: Callable[[], object]) -> None:
        """Run rounds, and replace the role if necessary, until a condition is true."""
        ends = time.monotonic() + LONG_S
        while not condition():
            assert time.monotonic() < ends, f"never: {condition}\n{self.told()}\n{self.output}"
            self.replace()
            self.turn()
            time.sleep(STEP_S)

    def stop(self) -> None:
        """Stop the role; one that is killed while it stops is not replaced."""
        if self.said:
            self.until(lambda: self.replace() or self.said in self._last_words())
        child = self._child
        assert child is not None
        child.signal(signal.SIGTERM)
        assert child.wait() in {0, -signal.SIGKILL if self._is_the_one() else 0}, self.output

    def _is_the_one(self) -> bool:
        """True if the latest process is the one to be killed."""
        return self._visit.point is not None and self._starts - 1 == self._visit.start

    def _last_words(self) -> str:
        output = self.directory / f"output-{self._starts - 1:02}"
        return output.read_text() if output.exists() else ""

    def has_come_by(self, phase: str, name: str, time: int = 1) -> bool:
        """True if any of its processes has passed a point, or died there."""
        logs = [read_log(log)[0] for log in self.directory.glob("points-*")]
        return any(Point(phase, name, time) in points for points in logs)

    def consume(self, cast: Cast | None = None) -> None:
        cast = cast or self.cast
        for entry in cast.take():
            self.note_delivery(entry.id, entry.due_ms)
            cast.ack(entry)

    def note_delivery(self, message_id: str, due_ms: int) -> None:
        now_ms = time.time_ns() // 1_000_000
        self.handled.append({"id": message_id, "due_ms": due_ms, "at_ms": now_ms})

    def ends(self, ids: Iterable[str], *states: str) -> None:
        self.ends_as |= {message_id: set(states) for message_id in ids}

    def are_all_at_an_end(self) -> bool:
        return not self.told()

    def told(self) -> dict[str, tuple[str, set[str]]]:
        """Unfinished messages, each with its actual and expected outcome."""
        states = zip(self.ends_as.items(), self.cast.states(list(self.ends_as)), strict=True)
        return {one: (is_, wanted) for (one, wanted), is_ in states if is_ not in wanted}

    def check(self) -> None:
        """Check that nothing was lost, early, wrongly handled, or left over."""
        ledger = self.directory / "handled"
        if ledger.exists():
            self.handled += [json.loads(line) for line in ledger.read_text().splitlines()]
        assert self.told() == {}, self.output
        early = [one for one in self.handled if one["at_ms"] < one["due_ms"]]
        assert early == []
        handled = {one["id"] for one in self.handled}
        for message_id, states in self.ends_as.items():
            assert (message_id in handled) or not states <= {"acked"}, f"never handled {message_id}"
            never = states <= {"cancelled", "expired", "skipped"}
            assert not (never and message_id in handled), f"handled {message_id}, {states}"
        report = self.cast.store.drive(fsck(self.cast.store))
        assert report.findings == []
        assert self.left() == set()

    def left(self) -> set[str]:
        """Keys that should have been deleted with their messages."""
        dead = {one for one in self.ends_as if self.cast.state(one) == "garbage"}
        found: set[str] = set()
        for key in map(bytes.decode, self.cast.store.ask("KEYS", "lisa:{*")):
            topic, _, rest = key.partition("}:")
            kind = rest.rpartition(":")[2] if rest.startswith("g:") else rest.partition(":")[0]
            of_garbage = kind in ("garbage", "attempts", "reasons", "policy") or (
                kind == "body" and rest.partition(":")[2] in dead
            )
            if kind in ALLOWED or (dead and of_garbage):
                continue
            if kind == "ready" and self.cast.store.ask("XLEN", key) == 0:
                continue
            found.add(f"{topic}}}:{rest}")
        return found
