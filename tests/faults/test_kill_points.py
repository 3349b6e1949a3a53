"""Kills every role between any two of its calls; nothing is lost, early or left over.

The points are collected in a run of each role without a kill (see `kill_lives`). The test fails if
a call that changes something is not repeated, or occurs only in a run with a kill, so that every
such call is tested. Reads may vary with timing, because a kill at a read is equivalent to a kill
before the next call. By default each point is visited once, at its first occurrence: the three
kinds of handlers make the same calls and share them, and a plain read is one point.
`make test-slow` visits all.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from lisa.core.redis.connection import AsyncConnection, Connection
from lisa.core.transitions import loader
from lisa.embedded import EmbeddedServer
from tests.contract.samples import SAMPLES
from tests.faults.kill_clock_life import ManagerClockLife
from tests.faults.kill_life_list import LIVES
from tests.faults.kill_lives import MissedPoint, Visit
from tests.faults.kill_nursery import Nursery
from tests.faults.kill_points import Point, is_plain_read
from tests.shifted_server import ShiftedServer, missing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


AT_ONCE = 8
"""Jobs of the pipeline call `restore`: tests/spark kills those. A change of the number of shards
calls `set_layout`, and deleting former ones calls `absorb` and `clear`: test_shards_life cuts both
short between all of their calls. `renew` follows a step of the server's clock: see the last
test here."""


LIVES_FOR_A_POINT = 3

MOST_MISSED = 0.1
"""The share of visits at which a process may make a call less often than the one before."""

CONSUMERS = ("consumer", "consumer on threads", "asyncio consumer")


class Scene:
    """A nursery and a few servers."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._directory = directory
        self.nursery = Nursery()
        stack.callback(self.nursery.end)
        self._servers: queue.SimpleQueue[str] = queue.SimpleQueue()
        for _ in range(AT_ONCE):
            self._servers.put(stack.enter_context(EmbeddedServer()).url)
        self.pool = stack.enter_context(ThreadPoolExecutor(AT_ONCE))
        self._numbers = iter(range(1_000_000))
        self._lock = threading.Lock()

    def live(self, role: str, visit: Visit) -> list[list[Point]]:
        """Run one life; the points that each process passed.

        It is repeated if the process was not killed at its point: one that gets no core for as long
        as its leases loses messages, and has less to do.
        """
        for _ in range(LIVES_FOR_A_POINT - 1):
            with suppress(MissedPoint):
                return self._live(role, visit)
        return self._live(role, visit)

    def _live(self, role: str, visit: Visit) -> list[list[Point]]:
        with self._lock:
            number = next(self._numbers)
        url = self._servers.get()
        try:
            directory = self._directory / f"{number:04}"
            return LIVES[role](self.nursery, url, directory, visit).run()
        finally:
            self._servers.put(url)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with ExitStack() as stack:
        yield Scene(tmp_path_factory.mktemp("lives"), stack)


@pytest.fixture(scope="module")
def unharmed(scene: Scene) -> dict[str, list[Visit]]:
    """The points of each role, collected in two lives without a kill."""
    lives = {
        (role, fresh): scene.pool.submit(scene.live, role, Visit(None, fresh=fresh))
        for role in LIVES
        for fresh in (False, True)
    }
    found: dict[str, list[Visit]] = {}
    for role in LIVES:
        visits: dict[Point, Visit] = {}
        names: set[str] = set()
        for fresh in (False, True):
            points = lives[role, fresh].result()
            for start, on_the_way in enumerate(points):
                for point in on_the_way:
                    if is_certain(role, start, point) and (not fresh or point.name not in names):
                        visits.setdefault(point, Visit(point, start, fresh))
            names = {point.name for point in visits}
        found[role] = list(visits.values())
    return found


def is_certain(role: str, start: int, point: Point) -> bool:
    """True unless the call depends on timing.

    Acks are sent with the next read unless handlers run concurrently with the reader. A read is
    only interrupted in a process that is stopped while idle, the second one. A gateway reads
    counters by its own clock, which a short life may not reach.
    """
    if role == "gateway" and point.name == "HGETALL stats":
        return False
    if point.name == "CLIENT UNBLOCK":
        return start > 0
    return role == CONSUMERS[0] or not point.name.endswith(" + XREADGROUP ready")


def place_of(visit: Visit) -> Point:
    assert visit.point is not None
    return visit.point


def table(visits: list[Visit]) -> str:
    """The points of a role: a line for each call, with the phases of its kills."""
    phases: dict[str, dict[str, int]] = defaultdict(dict)
    for visit in visits:
        phase, name, time = place_of(visit)
        phases[name][phase] = max(time, phases[name].get(phase, 0))
    return "\n".join(
        f"  {name:70} " + "  ".join(f"{phase} x{most}" for phase, most in there.items())
        for name, there in phases.items()
    )


def is_needed(visit: Visit) -> bool:
    """True unless the point is equivalent to another, as most points of a plain read are."""
    phase, name, time = place_of(visit)
    return time == 1 and (phase == "before" or not is_plain_read(name))


def share(unharmed: dict[str, list[Visit]], role: str) -> list[Visit]:
    """The first occurrences of a role; points common to several roles are divided."""
    sharing = CONSUMERS if role in CONSUMERS else (role,)
    firsts = [visit for one in sharing for visit in unharmed[one] if is_needed(visit)]
    mine: list[Visit] = []
    for number, visit in enumerate(dict.fromkeys(firsts)):
        owners = [one for one in sharing if visit in unharmed[one]]
        if owners[number % len(owners)] == role:
            mine.append(visit)
    return mine


def kill_at_all(scene: Scene, role: str, visits: list[Visit], foreseen: list[Visit]) -> None:
    """Visit the points; print their table and all failures."""
    wrong = visit_all(scene, role, visits, {place_of(visit).name for visit in foreseen})
    print(f"{role}: killed at {len(visits)} points\n{table(visits)}")  # noqa: T201
    assert not wrong, "\n".join(wrong)


def visit_all(scene: Scene, role: str, visits: list[Visit], names: set[str]) -> list[str]:
    """Run one life for each point; the failures.

    A call with an unknown name is an error unless it only reads: which reads a role makes depends
    on the progress of others, and a kill at a read is like a kill before the next call.
    """
    running = [(visit, scene.pool.submit(scene.live, role, visit)) for visit in visits]
    wrong: list[str] = []
    missed: list[str] = []
    for visit, future in running:
        try:
            lived = future.result()
        except AssertionError as error:
            wrong.append(f"{visit.point}: {error}")
            continue
        passed = {point for on_the_way in lived for point in on_the_way}
        if place_of(visit) not in passed and not is_plain_read(place_of(visit).name):
            missed.append(f"{visit.point}: not killed there")
        made = {
            point.name
            for start, on_the_way in enumerate(lived)
            for point in on_the_way
            if is_certain(role, start, point)
        }
        wrong += [
            f"{visit.point}: no process is killed at {name!r}"
            for name in made - names
            if not is_plain_read(name)
        ]
    return wrong + (missed if len(missed) > MOST_MISSED * len(visits) else [])


@pytest.mark.full
@pytest.mark.parametrize("role", list(LIVES))
def test_killed_at_every_step(scene: Scene, unharmed: dict[str, list[Visit]], role: str) -> None:
    kill_at_all(scene, role, share(unharmed, role), unharmed[role])


@pytest.mark.slow
@pytest.mark.parametrize("role", list(LIVES))
def test_killed_at_every_step_each_time(
    scene: Scene, unharmed: dict[str, list[Visit]], role: str
) -> None:
    kill_at_all(scene, role, unharmed[role], unharmed[role])


@pytest.mark.full
def test_every_script_is_among_the_calls(unharmed: dict[str, list[Visit]]) -> None:
    called = {place_of(visit).name for visits in unharmed.values() for visit in visits}
    by_roles = {name for name, sample in SAMPLES.items() if sample.is_called_by_roles}
    assert called & set(loader.names()) == by_roles


@pytest.mark.parametrize("kind", [Connection, AsyncConnection])
def test_there_is_no_other_way_to_call_the_server(kind: type) -> None:
    """A new way must be given points by `kill_points.install`."""
    known = {"execute", "execute_many", "execute_chain", "begin", "subscribe", "close"}
    known |= {"behind", "disconnect_node", "reconnect", "refresh", "slots"}  # no command with a key
    assert {name for name in vars(kind) if not name.startswith("_")} <= known


@pytest.mark.full
@pytest.mark.parametrize("by_s", [3600, -3600], ids=["forward", "back"])
def test_killed_while_leases_are_renewed(scene: Scene, tmp_path: Path, by_s: int) -> None:
    """Kills at each window of 50 leases, after the server's clock was set."""
    if reason := missing():
        pytest.skip(reason)

    def live(point: Point) -> None:
        directory = tmp_path / f"{point.phase}-{point.time}"
        with ShiftedServer(directory / "server") as server:
            life = ManagerClockLife(scene.nursery, server.url, directory / "life", Visit(point))
            life.set_clock = lambda: server.step(timedelta(seconds=by_s))
            life.run()

    points = [
        Point(phase, "renew", time) for phase in ("before", "sent", "after") for time in (1, 2)
    ]
    for lived in [scene.pool.submit(live, point) for point in points]:
        lived.result()
