"""Late policies with real managers: what happens to the messages of an outage."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from lisa import Manager, Outgoing, Producer
from lisa.admin.fsck import check
from lisa.core.model import signals
from tests.roles import Cast
from tests.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lisa import Message

pytestmark = pytest.mark.timeout(300)

MINUTE = 60_000
A_WHILE = timedelta(minutes=2)
LATE = "600000"
FAR = 4_000_000_000_000


@pytest.fixture
def cast(redis_url: str) -> Iterator[Cast]:
    cast = Cast(redis_url).declare()
    yield cast
    cast.store.close()


@contextmanager
def managers(url: str, count: int = 2) -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(count):
            made = Manager(url)
            made.start()
            stack.callback(made.stop)
        yield


def states(cast: Cast, ids: list[str]) -> list[str]:
    return [state for i in range(0, len(ids), 100) for state in cast.states(ids[i : i + 100])]


@pytest.mark.parametrize("count", [2_000, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("then", "end"), [("skip", "skipped"), ("garbage", "garbage"), ("run", "ready")]
)
def test_an_outage_ends_with_exact_counts(
    cast: Cast, redis_url: str, then: str, end: str, count: int
) -> None:
    """Two thirds of the messages are late when managers start, one third is on time."""
    cast.configure(late=f"{LATE},{then}", max_ready=str(2 * count))
    with Producer(redis_url) as producer:
        now_ms = cast.now_ms()
        dues = {
            f"m{n}": now_ms - (10 * MINUTE + n if n % 3 else 8 * MINUTE - n) for n in range(count)
        }
        ahead = producer.send("orders", "later", at_ms=FAR)
        for n in range(0, count, 500):
            some = list(dues.items())[n : n + 500]
            producer.send_many("orders", [Outgoing("x", id=id_, at_ms=due) for id_, due in some])
    with managers(redis_url):
        wait_until(lambda: cast.store.ask("ZCARD", cast.keys.waiting) == 1, timeout=A_WHILE)
    late, on_time = [n for n in dues if int(n[1:]) % 3], [n for n in dues if not int(n[1:]) % 3]
    assert Counter(states(cast, late)) == {end: len(late)}
    assert Counter(states(cast, on_time)) == {"ready": len(on_time)}
    stats = cast.stats()
    ends = {"skipped": stats.get("skipped", 0), "garbage": stats.get("garbage@g", 0)}
    assert ends == {"skipped": 0, "garbage": 0} | ({end: len(late)} if end in ends else {})
    assert stats["sent"] == sum(ends.values()) + stats["promoted"] + 1
    assert cast.state(ahead) == "waiting"
    assert cast.store.drive(check(cast.store, ["orders"])).total == 0


def test_the_end_of_a_late_message_is_signalled(cast: Cast, redis_url: str) -> None:
    heard: list[tuple[str, str, str, object]] = []

    def hear(name: str, message: Message) -> None:
        heard.append((name, message.id, message.reason or "", message.body))

    with (
        signals.everywhere.expired.connected_to(lambda _, message: hear("expired", message)),
        signals.everywhere.dead.connected_to(lambda _, message: hear("dead", message)),
    ):
        cast.configure(late=f"{LATE},skip")
        with Producer(redis_url) as producer:
            producer.send("orders", {"n": 1}, id="a", at_ms=cast.now_ms() - 11 * MINUTE)
            with managers(redis_url, 1):
                wait_until(lambda: len(heard) == 1)
                cast.configure(late=f"{LATE},garbage")
                producer.send("orders", {"n": 2}, id="b", at_ms=cast.now_ms() - 11 * MINUTE)
                wait_until(lambda: len(heard) == 2)
    why = "too late (late policy)"
    assert heard == [("expired", "a", why, {"n": 1}), ("dead", "b", why, {"n": 2})]
