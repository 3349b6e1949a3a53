"""At maxmemory only new messages are refused: everything that drains the server works."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from lisa.core.model.errors import ServerUnavailable
from lisa.core.transitions.ack import Ack, Acked
from lisa.core.transitions.cancel import Cancel, Cancelled
from lisa.core.transitions.configure import Configure
from lisa.core.transitions.declare import Declare
from lisa.core.transitions.expire import Expire, Expired
from lisa.core.transitions.extend import Extend
from lisa.core.transitions.forget import Forget
from lisa.core.transitions.inspect import Inspect
from lisa.core.transitions.mend import Mend
from lisa.core.transitions.open import Open
from lisa.core.transitions.promote import Promote
from lisa.core.transitions.pull import Pull
from lisa.core.transitions.purge import Purge
from lisa.core.transitions.reclaim import Reclaim
from lisa.core.transitions.release import Release
from lisa.core.transitions.requeue import Requeue
from lisa.core.transitions.reschedule import Reschedule, Rescheduled
from lisa.core.transitions.retry import Fail, Failed, Failure
from lisa.core.transitions.trim import Trim
from lisa.core.transitions.undeclare import Undeclare
from tests.contract.bench import TOPIC, item
from tests.contract.state import FOREIGN, G, Row

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.contract.bench import Bench

pytestmark = pytest.mark.not_on_fakeredis("it has no maxmemory")
FAR = 4_000_000_000_000
LONG = 60_000
LIVE = {"a": "A-", "b": "A-", "c": "A-"}


@pytest.fixture(params=[{}, {"journal": "1"}], ids=["plain", "journal"])
def starved(bench: Bench, request: pytest.FixtureRequest) -> Iterator[Bench]:
    """A bench whose server refuses commands that may take memory, from `starve()` on.

    The journal takes memory, too, and must not prevent draining.
    """
    for name, value in request.param.items():
        bench.store.ask("HSET", bench.keys.options, name, value)
    yield bench
    bench.store.ask("CONFIG", "SET", "maxmemory", 0)


def starve(bench: Bench) -> None:
    bench.store.ask("CONFIG", "SET", "maxmemory", 1)


@pytest.mark.parametrize("state", [{}, {"lisa": G()}, {"waiting": {"a": 1}, "body": {"a": "B-"}}])
def test_a_send_is_refused_with_a_message_and_writes_nothing(
    starved: Bench, state: dict[str, Any]
) -> None:
    starved.put(**state)
    before = starved.state()
    starve(starved)
    with pytest.raises(ServerUnavailable, match="out of memory and refuses writes"):
        starved.send(item("a", "+0"), item("n", "+0"))
    assert starved.state() == before


def test_draining_works(starved: Bench) -> None:
    bench = starved
    bench.put(waiting={"a": 1}, body=LIVE, lisa=G(retry={"b": 2, "c": 3}), audit=G())
    starve(bench)
    bench.store.ask("SCRIPT", "FLUSH")
    assert bench.call(Promote(TOPIC)).moved == 4
    assert len(bench.call(Pull(TOPIC, "lisa", "c1", 10, 700)).entries) == 3
    opened = [bench.opening(m) for m in "abc"]
    assert None not in bench.call(Open(TOPIC, "lisa", opened, 700)).envelopes
    assert bench.call(Ack(TOPIC, "lisa", [bench.settlement("a")])) == [Acked.ACKED]
    (failed,) = bench.call(Fail(TOPIC, "lisa", [Failure(*bench.receipt("b"), "no", 0)]))
    assert failed.outcome is Failed.RETRYING
    assert bench.call(Release(TOPIC, "lisa", [bench.receipt("c")])) == [True]


def test_open_alone_works(starved: Bench) -> None:
    bench = starved
    rows = [Row("a", 1, 1, "c1"), Row("gone", 2, 1, "c1")]
    bench.put(body=LIVE, lisa=G(ready=rows))
    starve(bench)
    opened = [bench.opening("a"), bench.opening("gone")]
    assert bench.call(Open(TOPIC, "lisa", opened[:1], 700)).envelopes[0] is not None
    assert bench.call(Open(TOPIC, "lisa", opened[1:])).envelopes == [None]


def test_open_while_paused_works(starved: Bench) -> None:
    starved.put(options={"paused": "1"}, body=LIVE, lisa=G(ready=[Row("a", 1, 1, "c1")]))
    starve(starved)
    assert starved.call(Open(TOPIC, "lisa", [starved.opening("a")])).envelopes == [None]
    assert starved.state()["lisa:ready"] == [Row("a", 1)[:4]]


def test_a_plain_open_works(starved: Bench) -> None:
    starved.put(body=LIVE, lisa=G(ready=[Row("a", 1, 1, "c1")]))
    starve(starved)
    assert starved.call(Open(TOPIC, "lisa", [starved.opening("a")])).envelopes[0] is not None


def test_every_other_transition_works(starved: Bench) -> None:
    bench = starved
    held = [Row("a", 1, 1, "c1"), Row("x", 1, 1, FOREIGN), Row("b", 2, 1, "c1", LONG)]
    bench.put(
        waiting={"w": 1, "v": FAR, "u": FAR},
        expiry={"w": 5},
        body={**LIVE, "w": "A-", "v": "A-", "u": "A-", "g": "A-", "h": "A-", "lost": "A-"},
        lisa=G(ready=held, garbage={"g": 1, "h": 1}, entries={"a": 0, "b": 2}),
    )
    starve(bench)
    assert bench.call(Reclaim(TOPIC, "lisa")).moved[0][0] == "b"
    assert bench.call(Extend(TOPIC, "lisa", "c1", [bench.receipt("a")], 700)) == [True]
    assert bench.call(Trim(TOPIC, "lisa")).removed == 1
    assert bench.call(Expire(TOPIC, ["w"])) == [Expired.EXPIRED]
    assert bench.call(Cancel(TOPIC, ["v"])) == [Cancelled.CANCELLED]
    assert bench.call(Reschedule(TOPIC, [("u", "1")])) == [Rescheduled.RESCHEDULED]
    assert bench.call(Purge(TOPIC, "lisa", ["g"])) == [True]
    assert bench.call(Requeue(TOPIC, "lisa", ["h"])) == [True]
    assert bench.call(Mend(TOPIC, ["lost"])) == [["no-place"]]
    assert bench.call(Forget(TOPIC, "lisa", ["c2"], 0)) == ["c2"]
    assert len(bench.call(Inspect(TOPIC, ["a"]))) == 1
    assert bench.call(Configure(TOPIC, {"paused": "0"})) == 1
    assert bench.call(Declare(TOPIC, "audit")) is True
    assert bench.call(Undeclare(TOPIC, "audit", drop=True)).gone
