"""How fast a target is pushed to, without a gateway: the rule alone."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from lisa.admin.push import PushTarget
from lisa.gateway.push.pace import DEGRADED_AFTER, FIRST_PAUSE_S, LONGEST_PAUSE_S, Pace
from lisa.gateway.push.pusher import Pusher


def test_pushes_that_fail_together_cost_one_pause() -> None:
    """A blip of a second that meets a hundred pushes at once is no outage of half a minute."""
    pace = Pace()
    for _ in range(DEGRADED_AFTER + 80):
        pace.failed()
    assert pace.is_degraded
    assert 0 < pace.left_s <= FIRST_PAUSE_S


def test_pauses_grow_with_each_push_that_fails_after_one() -> None:
    pace = Pace()
    for _ in range(DEGRADED_AFTER):
        pace.failed()
    paused = []
    for _ in range(9):
        paused.append(round(pace.left_s, 1))
        pace.resumes = 0.0  # the pause is over
        pace.failed()
    assert paused[:4] == [round(FIRST_PAUSE_S, 1), 0.5, 1.0, 2.0]
    assert paused[-1] == LONGEST_PAUSE_S


def test_what_was_under_way_before_a_rest_does_not_end_the_caution_after_it() -> None:
    pace = Pace()
    pace.asked_to_wait(10.0)
    assert not pace.arrived()
    pace.resumes = 0.0  # the rest is over
    assert pace.most(5) == 1
    assert pace.arrived()
    assert pace.most(5) == 5


class _Ending(Pace):
    """A rest that ends between two looks at it."""

    def __init__(self) -> None:
        super().__init__()
        self._left = [1e-9]

    @property
    def left_s(self) -> float:
        return self._left.pop() if self._left else 0.0


async def test_a_rest_that_ends_while_it_is_looked_at_ends() -> None:
    hub: Any = SimpleNamespace(
        room=SimpleNamespace(is_closing=False),
        settings=SimpleNamespace(gateway_server=SimpleNamespace(push_concurrency=1)),
    )
    target = PushTarget(topic="t", group="g", url="http://hooks.example.com/", secret="")
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
    pusher.take_no_more()
    await pusher.stop(0)
