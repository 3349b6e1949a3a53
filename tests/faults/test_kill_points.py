"""Kills every role between any two of its calls; nothing is lost, early or left over.

The points are collected in a run of each role without a kill (see `kill_lives`). The test fails if
a call that changes something is not repeated, or occurs only in a run with a kill, so that every
such call is tested. Reads may vary with timing, because a kill at a read is equivalent to a kill
before the next call. `make test` kills each role at one point, `make test-all` at the first
occurrence of each (a plain read is one point), `make test-slow` at all.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path

import pytest

from lisa.core.redis.connection import AsyncConnection, Connection
from lisa.core.transitions import loader
from lisa.embedded import EmbeddedServer
from tests.contract.samples import SAMPLES
from tests.faults.kill_life_list import LIVES
from tests.faults.kill_lives import MissedPoint, Visit
from tests.faults.kill_points import Point, is_plain_read

Unharmed = Callable[[str], list[Visit]]
"""The points of a role."""

AT_ONCE = 8
"""The number of servers, and of lives at the same time."""

LIVES_FOR_A_POINT = 3
MOST_MISSED = 0.1
"""The share of visits at which a process may make a call less often than the one before."""

ONE_POINT = {
    "producer": Point("sent", "enqueue"),
    "asyncio producer": Point("after", "enqueue"),
    "manager": Point("sent", "promote"),
    "consumer": Point("after", "XREADGROUP ready"),
    "asyncio consumer": Point("after", "XREADGROUP ready"),
    "gateway": Point("sent", "enqueue"),
}


class Scene:
    """Lives at once, each on a server of its own."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._directory = directory
        self._stack = stack
        self._servers: queue.SimpleQueue[str] = queue.SimpleQueue()
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
            directory = self._directory / f"{next(self._numbers):04}"
            if self._servers.empty():
                self._servers.put(self._stack.enter_context(EmbeddedServer()).url)
            url = self._servers.get()
        try:
            return LIVES[role](url, directory, visit).run()
        finally:
            self._servers.put(url)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with ExitStack() as stack:
        yield Scene(tmp_path_factory.mktemp("lives"), stack)


@pytest.fixture(scope="module")
def unharmed(scene: Scene) -> Unharmed:
    """The points of a role, collected in two lives without a kill."""

    @cache
    def points_of(role: str) -> list[Visit]:
        states = (False, True)
        lives = [scene.pool.submit(scene.live, role, Visit(None, fresh=one)) for one in states]
        visits: dict[Point, Visit] = {}
        for is_fresh, life in zip(states, lives, strict=True):
            known = {point.name for point in visits}  # those of the first life
            for start, passed in enumerate(life.result()):
                for point in passed:
                    if is_certain(role, start, point) and point.name not in known:
                        visits.setdefault(point, Visit(point, start, is_fresh))
        return list(visits.values())

    return points_of


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
    return role == "consumer" or not point.name.endswith(" + XREADGROUP ready")


def place_of(visit: Visit) -> Point:
    assert visit.point is not None
    return visit.point


def is_needed(visit: Visit) -> bool:
    """True unless the point is equivalent to another, as most points of a plain read are."""
    phase, name, time = place_of(visit)
    return time == 1 and (phase == "before" or not is_plain_read(name))


def kill_at_all(scene: Scene, role: str, visits: list[Visit], foreseen: list[Visit]) -> None:
    """Run one life for each point; all failures are reported.

    A call with an unknown name is an error unless it only reads: which reads a role makes depends
    on the progress of others, and a kill at a read is like a kill before the next call.
    """
    names = {place_of(visit).name for visit in foreseen}
    running = [(visit, scene.pool.submit(scene.live, role, visit)) for visit in visits]
    wrong: list[str] = []
    missed: list[str] = []
    for visit, future in running:
        try:
            lived = future.result()
        except AssertionError as error:
            wrong.append(f"{visit.point}: {error}")
            continue
        passed = [(start, point) for start, points in enumerate(lived) for point in points]
        is_passed = any(point == visit.point for _, point in passed)
        if not is_passed and not is_plain_read(place_of(visit).name):
            missed.append(f"{visit.point}: not killed there")
        made = {point.name for start, point in passed if is_certain(role, start, point)}
        unknown = [name for name in made - names if not is_plain_read(name)]
        wrong += [f"{visit.point}: no process is killed at {name!r}" for name in unknown]
    wrong += missed if len(missed) > MOST_MISSED * len(visits) else []
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("role", LIVES)
def test_killed_at_one_point(scene: Scene, role: str) -> None:
    assert scene.live(role, Visit(ONE_POINT[role]))


@pytest.mark.full
@pytest.mark.parametrize("role", LIVES)
def test_killed_at_every_step(scene: Scene, unharmed: Unharmed, role: str) -> None:
    kill_at_all(scene, role, list(filter(is_needed, unharmed(role))), unharmed(role))


@pytest.mark.slow
@pytest.mark.parametrize("role", LIVES)
def test_killed_at_every_step_each_time(scene: Scene, unharmed: Unharmed, role: str) -> None:
    kill_at_all(scene, role, unharmed(role), unharmed(role))


@pytest.mark.full
def test_every_script_is_among_the_calls(unharmed: Unharmed) -> None:
    """The others: jobs of the pipeline call `restore`, which tests/spark kills; a change of shards
    calls `set_layout`, `absorb` and `clear`, which test_shards_life cuts short between all calls;
    `renew` follows a step of the server's clock, and may be repeated (tests/contract); `recount` is
    called by an operator's fsck."""
    called = {place_of(visit).name for role in LIVES for visit in unharmed(role)}
    by_roles = {name for name, sample in SAMPLES.items() if sample.is_called_by_roles}
    assert called & set(loader.names()) == by_roles


@pytest.mark.parametrize("kind", [Connection, AsyncConnection])
def test_there_is_no_other_way_to_call_the_server(kind: type) -> None:
    """A new way must be given points by `kill_points.install`."""
    known = {"execute", "execute_many", "execute_chain", "subscribe", "close"}
    # No command with a key:
    known |= {"behind", "disconnect_node", "execute_on_each", "reconnect", "refresh", "slots"}
    assert {name for name in dir(kind) if not name.startswith("_")} <= known
