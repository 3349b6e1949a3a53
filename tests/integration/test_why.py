"""`lisa why`: one sentence that says why a message is not running now."""

import re
from typing import Any

import pytest

from lisa import admin
from lisa.admin.why import Reason
from lisa.core.model.keys import keyed_id
from lisa.core.store.store import SyncStore
from lisa.core.transitions.delivery import Pull
from lisa.core.transitions.promote import Promote
from lisa.core.transitions.retry import Deferral, Fail, Failure, Postpone
from tests.consumers import Bench
from tests.rows import Item, enqueue
from tests.servers import flush

pytestmark = pytest.mark.usefixtures("bench")


@pytest.fixture
def bench(valkey_server: Any) -> Bench:
    return Bench(flush(valkey_server.url))


class Topic:
    """The topic `t` with one group; no role runs."""

    def __init__(self, bench: Bench, **options: Any) -> None:
        self.store: SyncStore = bench.store
        bench.declare("t", **options)

    def send(self, *names: str, due: str = "+0") -> None:
        items = [Item(whole(name), due, b"1AAAAAAAA-j0000{}") for name in names]
        self.store.call(enqueue("t", "AAAAAAAA", items))
        self.store.call(Promote("t"))

    def pull(self, count: int = 1) -> list[tuple[str, str]]:
        """Take messages; returns their ids and entries."""
        taken = self.store.call(Pull("t", "lisa", "worker-1", count)).entries
        return [(entry.id, entry.entry) for entry in taken]

    def why(self, name: str) -> str:
        reasons: list[Reason] = self.store.drive(admin.why.why(self.store, "t", whole(name)))
        assert len(reasons) == 1
        return re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+Z", "<instant>", reasons[0].sentence)


def whole(name: str) -> str:
    key, slash, own = name.rpartition("/")
    return keyed_id(key, own) if slash else own


def test_messages_that_wait(bench: Bench) -> None:
    topic = Topic(bench)
    topic.send("a", due="+60000")
    assert topic.why("a") == "It waits until it is due, <instant>."
    topic.send("b")
    assert topic.why("b") == "It is ready, but no consumer of group lisa runs: start one."
    (taken,) = topic.pull()
    assert re.match(r"It runs, or is about to: worker-1 has had it for \d+", topic.why("b"))
    topic.store.call(Postpone("t", "lisa", [Deferral(*taken, 60_000, "later")]))
    assert topic.why("b") == "It waits for its next delivery until <instant> (later)."
    assert topic.store.drive(admin.why.why(topic.store, "t", "unknown")) == []


def test_a_paused_topic(bench: Bench) -> None:
    topic = Topic(bench)
    topic.store.drive(admin.topics.pause(topic.store, "t"))
    topic.send("a", due="+1")
    while (said := topic.why("a")).startswith("It waits until"):
        pass
    assert said == "Its due time has come, but the topic is paused: run `lisa topic resume`."


def test_a_full_lane_names_who_holds_it(bench: Bench) -> None:
    topic = Topic(bench, key_concurrency=1)
    topic.send("k/1", "k/2", "k/3")
    topic.pull()
    assert topic.why("k/3") == (
        "The slot of key k is taken, by k / 1 in worker-1; 1 of key k come before it."
    )


def test_a_rate_says_when_it_opens(bench: Bench) -> None:
    topic = Topic(bench, key_rate="2/m")
    topic.send("k/1", "k/2")
    assert topic.why("k/2") == "The rate of key k, 2/m, lets the next through at <instant>."


def test_a_rate_of_the_group_says_when_it_opens(bench: Bench) -> None:
    topic = Topic(bench, rate="2/m")
    topic.send("k/1", "l/1")
    assert topic.why("l/1") == "The rate of group lisa, 2/m, lets the next through at <instant>."


def test_a_resting_lane(bench: Bench) -> None:
    topic = Topic(bench)
    topic.send("k/1")
    (taken,) = topic.pull()
    rest = Deferral(*taken, 60_000, "full", rests_lane=True)
    topic.store.call(Postpone("t", "lisa", [rest]))
    assert topic.why("k/1") == "A handler met a limit: key k rests until <instant>."


@pytest.mark.parametrize(
    ("order", "delay", "said"),
    [
        ("continue", 60_000, "k / 1 before it is tried again at <instant> (no)."),
        ("hold", "discard", "k / 1 before it is dead: requeue, cancel or purge that one."),
    ],
)
def test_behind_a_failing_head(bench: Bench, order: str, delay: Any, said: str) -> None:
    topic = Topic(bench, order=order)
    topic.send("k/1", "k/2")
    (taken,) = topic.pull()
    topic.store.call(Fail("t", "lisa", [Failure(*taken, "no", delay)]))
    topic.store.call(Promote("t"))
    assert topic.why("k/2") == said


def test_a_group_without_free_slots(bench: Bench) -> None:
    topic = Topic(bench, concurrency=1)
    topic.send("a", "b")
    assert topic.why("b") == "All slots of group lisa are taken (1)."
