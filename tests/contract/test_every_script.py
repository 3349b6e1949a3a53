"""What holds for the calls of every script: repeated, at maxmemory, and with a journal."""

from collections.abc import Iterator

import pytest

from lisa.core.model.errors import ServerUnavailable
from lisa.core.transitions import loader
from lisa.core.transitions.base import Transition
from lisa.core.transitions.delivery import Open, Pull
from lisa.core.transitions.lease import Extend
from lisa.core.transitions.schedule import Schedule
from tests.contract.bench import TOPIC, Bench
from tests.contract.samples import CASES, LIVE, SAMPLES, comparable
from tests.contract.state import LONG, G, Row, envelope

JOURNAL = pytest.mark.parametrize("journal", ["", "1"], ids=["plain", "journaled"])
EVERYWHERE = pytest.mark.parametrize("bench", ["valkey", "plain", "redis", "fake"], indirect=True)
NO_LIMIT = pytest.mark.not_on_fakeredis("it has no maxmemory")


def takes_memory(call: Transition[object]) -> bool:
    """Whether a call adds messages. The others help to drain the server."""
    if isinstance(call, Schedule):
        return len(call.creates) > len([*call.drops, *call.earlier])
    return call.script in ("coalesce", "enqueue", "restore")


def prepared(bench: Bench, name: str, journal: str) -> Transition[object]:
    """Write the case's state; returns its call."""
    state, make, _ = CASES[name]
    options = {**state.get("options", {}), **({"journal": journal} if journal else {})}
    bench.put(**{**state, "options": options})
    return make(bench)


def test_no_script_is_left_out() -> None:
    assert sorted(SAMPLES) == loader.names()
    assert {name.split()[0].rstrip(",") for name in CASES} == set(SAMPLES)


@JOURNAL
@pytest.mark.parametrize("name", CASES)
@EVERYWHERE
def test_a_repeated_call_has_no_further_effect(bench: Bench, name: str, journal: str) -> None:
    """As after a lost reply. Most scripts also return the first answer again."""
    call = prepared(bench, name, journal)
    check_repeat(bench, call, bench.call(call))


def check_repeat(bench: Bench, call: Transition[object], first: object) -> None:
    once = comparable(bench)
    second = bench.call(call)
    assert comparable(bench) == once
    if SAMPLES[call.script].repeats_its_answer:
        assert second == first


@pytest.mark.parametrize("name", CASES)
def test_events(bench: Bench, name: str) -> None:
    """With a journal, each transition appends one event per message in the same step."""
    bench.call(prepared(bench, name, "1"))
    state, expected = bench.state(), CASES[name].events(bench.now)
    assert state.get("events", []) == expected
    assert state.get("stats", {}).get("journaled", 0) == len(expected)


@pytest.fixture
def starved(bench: Bench) -> Iterator[Bench]:
    """A bench whose server has its memory limit restored at the end."""
    yield bench
    bench.store.ask("CONFIG", "SET", "maxmemory", 0)


@NO_LIMIT
@JOURNAL
@pytest.mark.parametrize("name", CASES)
def test_a_call_at_maxmemory(starved: Bench, name: str, journal: str) -> None:
    """Only new messages are refused; even loading a script and the journal must not prevent others.

    Repeated with enough memory, a complete call changes nothing.
    """
    call = prepared(starved, name, journal)
    before = starved.state()
    starved.store.ask("CONFIG", "SET", "maxmemory", 1)
    starved.store.ask("SCRIPT", "FLUSH")
    if takes_memory(call):
        with pytest.raises(ServerUnavailable, match="out of memory and refuses writes"):
            starved.call(call)
        assert starved.state() == before
        return
    first = starved.call(call)
    starved.store.ask("CONFIG", "SET", "maxmemory", 0)
    check_repeat(starved, call, first)


@NO_LIMIT
def test_leases_at_maxmemory(starved: Bench) -> None:
    starved.put(body=LIVE, lisa=G(ready=[Row("a", 1)]))
    starved.store.ask("CONFIG", "SET", "maxmemory", 1)
    (entry,) = starved.call(Pull(TOPIC, "lisa", "c1", 10, LONG)).entries
    assert starved.call(Extend(TOPIC, "lisa", "c1", [starved.receipt("a")], 2 * LONG)) == [True]
    assert starved.call(Open(TOPIC, "lisa", [entry], 3 * LONG)).envelopes == [envelope("A-")]
    starved.check(
        body=LIVE,
        lisa=G(ready=[Row("a", 1, 1, "c1")], leases={"a": starved.now + 3 * LONG}),
    )
