"""Pacing of pushes to a target, without a gateway."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from lisa.admin.push import StoredPushTarget
from lisa.core.delivery.degradation import DEGRADED_AFTER, FIRST_S, LONGEST_S
from lisa.gateway.push.pace import TargetRecord
from lisa.gateway.push.pusher import Pusher
from lisa.gateway.request_metrics import Meter


def test_pushes_that_fail_together_cost_one_pause() -> None:
    """A failure of one second during a hundred pushes must not pause them for half a minute."""
    pace = TargetRecord()
    for _ in range(DEGRADED_AFTER + 80):
        pace.failed()
    assert pace.is_degraded
    assert 0 < pace.left_s <= FIRST_S


def test_pauses_grow_with_each_push_that_fails_after_one() -> None:
    pace = TargetRecord()
    for _ in range(DEGRADED_AFTER):
        pace.failed()
    paused = []
    for _ in range(9):
        paused.append(round(pace.left_s, 1))
        pace.resumes = 0.0  # the pause ends
        pace.failed()
    assert paused[:4] == [round(FIRST_S, 1), 0.5, 1.0, 2.0]
    assert paused[-1] == LONGEST_S


def test_a_push_that_began_before_a_wait_does_not_end_it() -> None:
    pace = TargetRecord()
    pace.asked_to_wait(10.0)
    assert not pace.succeeded()
    pace.resumes = 0.0  # the wait ends
    assert pace.most(5) == 1
    assert pace.succeeded()
    assert pace.most(5) == 5


class _Ending(TargetRecord):
    """A pause that ends between two reads of `left_s`."""

    def __init__(self) -> None:
        super().__init__()
        self._left = [1e-9]

    @property
    def left_s(self) -> float:
        return self._left.pop() if self._left else 0.0


async def test_a_wait_may_end_between_two_reads_of_it() -> None:
    hub: Any = SimpleNamespace(
        broker=SimpleNamespace(is_closing=False),
        meter=Meter(),
        settings=SimpleNamespace(gateway_server=SimpleNamespace(push_concurrency=1)),
    )
    target = StoredPushTarget(topic="t", group="g", url="http://hooks.example.com/", secret="")
    poster: Any = None
    pusher = Pusher(hub, poster, target, lambda: None)
    taken = asyncio.Event()

    async def take(most: int) -> list[Any]:
        assert most == 1
        taken.set()
        await asyncio.Event().wait()
        return []

    pusher._pace = _Ending()
    pusher._take = take  # type: ignore[method-assign]
    async with asyncio.timeout(5):
        await taken.wait()
    pusher.stop_pulling()
    await pusher.stop(0)
