"""Every role is killed between any two of its calls, and nothing is lost, early, or left over.

The points come from a life that each role lives unharmed at first (see `kill_lives`). One that is
found there and cannot be died at fails, and so does a call that turns up only in a life with a
kill: no call goes untested. By default each point is visited once, at its first occurrence: the
three ways to run handlers make the same calls and share them, and a plain read is one point, as it
changes nothing. `make test-slow` visits all.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from lisa.core import scripts
from lisa.core.connection import AsyncConnection, Connection
from lisa.embedded import EmbeddedServer
from tests.faults.kill_life_list import LIVES
from tests.faults.kill_lives import Visit
from tests.faults.kill_nursery import Nursery
from tests.faults.kill_points import is_plain_read

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.faults.kill_points import Point

AT_ONCE = 8
CALLED_BY_NO_ROLE = {"place", "restore"}
"""Jobs of the pipeline call `restore`: tests/spark kills those. A change of the number of shards
calls `place`, and is cut short between all of its calls in test_shards_life."""


CONSUMERS = ("consumer", "consumer on threads", "asyncio consumer")


class Scene:
    """A nursery, and a few servers to live on."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._directory = directory
        self._nursery = Nursery()
        stack.callback(self._nursery.end)
        self._servers: queue.SimpleQueue[str] = queue.SimpleQueue()
        for _ in range(AT_ONCE):
            self._servers.put(stack.enter_context(EmbeddedServer()).url)
        self.pool = stack.enter_context(ThreadPoolExecutor(AT_ONCE))
        self._numbers = iter(range(1_000_000))
        self._lock = threading.Lock()

    def live(self, role: str, visit: Visit) -> list[list[Point]]:
        """One life; the points on the way of each process."""
        with self._lock:
            number = next(self._numbers)
        url = self._servers.get()
        try:
            directory = self._directory / f"{number:04}"
            return LIVES[role](self._nursery, url, directory, visit).run()
        finally:
            self._servers.put(url)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with ExitStack() as stack:
        yield Scene(tmp_path_factory.mktemp("lives"), stack)


@pytest.fixture(scope="module")
def unharmed(scene: Scene) -> dict[str, list[Visit]]:
    """The points of each role, found in two lives without a kill."""
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
    """Not where it is chance.

    Acks go along with the next read, if handlers do not run beside the reader. A read is to be
    interrupted in a process that is stopped when it has nothing to do, the second one. A gateway
    looks at counters as its own clock says, which a quick life may not live to see.
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
    """The points of a role: a line for each call, with the phases at which it was killed there."""
    phases: dict[str, dict[str, int]] = defaultdict(dict)
    for visit in visits:
        phase, name, time = place_of(visit)
        phases[name][phase] = max(time, phases[name].get(phase, 0))
    return "\n".join(
        f"  {name:70} " + "  ".join(f"{phase} x{most}" for phase, most in there.items())
        for name, there in phases.items()
    )


def is_needed(visit: Visit) -> bool:
    """Not of each plain read all points: for all others they are one and the same instant."""
    phase, name, time = place_of(visit)
    return time == 1 and (phase == "before" or not is_plain_read(name))


def share(unharmed: dict[str, list[Visit]], role: str) -> list[Visit]:
    """The first occurrences of a role; of those that several roles have, its part."""
    sharing = CONSUMERS if role in CONSUMERS else (role,)
    firsts = [visit for one in sharing for visit in unharmed[one] if is_needed(visit)]
    mine: list[Visit] = []
    for number, visit in enumerate(dict.fromkeys(firsts)):
        owners = [one for one in sharing if visit in unharmed[one]]
        if owners[number % len(owners)] == role:
            mine.append(visit)
    return mine


def kill_at_all(scene: Scene, role: str, visits: list[Visit], foreseen: list[Visit]) -> None:
    """Visit the points; the table of them is printed, and all that went wrong."""
    wrong = visit_all(scene, role, visits, {place_of(visit).name for visit in foreseen})
    print(f"{role}: killed at {len(visits)} points\n{table(visits)}")  # noqa: T201
    assert not wrong, "\n".join(wrong)


def visit_all(scene: Scene, role: str, visits: list[Visit], names: set[str]) -> list[str]:
    """Live once for each point; what went wrong. A call that is none of those names is wrong."""
    running = [(visit, scene.pool.submit(scene.live, role, visit)) for visit in visits]
    wrong: list[str] = []
    for visit, future in running:
        try:
            lived = future.result()
        except AssertionError as error:
            wrong.append(f"{visit.point}: {error}")
            continue
        made = {
            point.name
            for start, on_the_way in enumerate(lived)
            for point in on_the_way
            if is_certain(role, start, point)
        }
        wrong += [f"{visit.point}: nobody dies at {name!r}" for name in made - names]
    return wrong


@pytest.mark.parametrize("role", list(LIVES))
def test_killed_at_every_step(scene: Scene, unharmed: dict[str, list[Visit]], role: str) -> None:
    kill_at_all(scene, role, share(unharmed, role), unharmed[role])


@pytest.mark.slow
@pytest.mark.parametrize("role", list(LIVES))
def test_killed_at_every_step_each_time(
    scene: Scene, unharmed: dict[str, list[Visit]], role: str
) -> None:
    kill_at_all(scene, role, unharmed[role], unharmed[role])


def test_every_script_is_among_the_calls(unharmed: dict[str, list[Visit]]) -> None:
    called = {place_of(visit).name for visits in unharmed.values() for visit in visits}
    assert set(scripts.names()) - called == CALLED_BY_NO_ROLE


@pytest.mark.parametrize("kind", [Connection, AsyncConnection])
def test_there_is_no_other_way_to_call_the_server(kind: type) -> None:
    """One that is new here has to be given points, by `kill_points.install`."""
    known = {"execute", "execute_many", "execute_chain", "begin", "subscribe", "close"}
    known |= {"behind"}  # calls nobody
    assert {name for name in vars(kind) if not name.startswith("_")} <= known
