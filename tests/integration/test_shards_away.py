"""Topics that are split, on nodes that are away."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from lisa import Manager
from lisa.core.errors import ServerUnavailable
from lisa.manager.registry import Registry
from lisa.manager.sharder import Sharder
from tests.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pytest

TOPICS = [f"t{n}" for n in range(6)]


def test_topics_whose_node_is_away_do_not_hold_up_what_else_a_manager_does(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    register = Registry.step

    def pick(_: Sharder, __: Iterable[str]) -> list[str]:
        return TOPICS

    def step(_: Sharder, topic: str) -> None:
        done.append(topic)
        raise ServerUnavailable("its node is away")

    def registers(self: Registry) -> None:
        done.append("others")
        register(self)

    monkeypatch.setattr(Sharder, "pick", pick)
    monkeypatch.setattr(Sharder, "step", step)
    monkeypatch.setattr(Registry, "step", registers)
    groups = {topic: ["lisa"] for topic in TOPICS}
    with Manager(redis_url, groups=groups, sweep=timedelta(hours=1)):  # it looks at them as well
        wait_until(lambda: done.count("t0") >= 2)
    assert set(done) == {*TOPICS, "others"}, "each has its turn"
    tried = [(done[i], done[i + 1]) for i in range(len(done) - 1) if done[i] != "others"]
    assert all(then == "others" for _, then in tried), done
