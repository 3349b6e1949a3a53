"""Every order in which the calls of a few roles can follow each other, for small cases."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pytest

from lisa.core.model.keys import COALESCED_IDS, Keys, keyed_id
from lisa.core.redis.address import Address
from lisa.core.redis.connection import Connection
from lisa.core.store.store import SyncStore
from lisa.core.transitions.base import LANES
from lisa.core.transitions.enqueue import OnDuplicate
from lisa.core.transitions.groups import Declare
from lisa.core.transitions.loader import NONE
from lisa.core.transitions.topic import Configure
from lisa.embedded import EmbeddedServer
from tests.model.acting import (
    FAR,
    canceller,
    coalescer,
    consumer,
    declarer,
    finisher,
    limiter,
    manager,
    purger,
    remover,
    requeuer,
    rescheduler,
    sender,
    sweeper,
)
from tests.model.interleaving import TOPIC, Event, Explorer, Role, levels
from tests.model.judging import Judge
from tests.servers import flush

AT_ONCE = ",".join(["0"] * 10)


A_SEND = sender()


@dataclass(frozen=True)
class Case:
    """Roles that run together, after a message was sent if `sent` and went through `before`."""

    roles: tuple[Role, ...]
    ids: Sequence[str] = "a"
    groups: tuple[str, ...] = ("lisa",)
    lanes: Mapping[str, str] | None = None
    """The options of lanes, if the topic has lanes."""
    sent: Role | None = A_SEND
    before: tuple[Role, ...] = ()
    retry_delays: str = AT_ONCE


REPLACER = sender(letter="B", mode=OnDuplicate.REPLACE, times=2)
REPLACER_FOR_LATER = sender(letter="B", due=FAR, mode=OnDuplicate.REPLACE)
UPDATER = sender(letter="B", due=FAR, mode=OnDuplicate.UPDATE, times=2)
FAILED_AND_PUT_OFF = (consumer("c1", then="retry"), rescheduler(FAR))
CONSUMERS = (consumer("c1"), consumer("c2"))
TEAM = (manager(), manager(), *CONSUMERS)
G_AND_H = (consumer("c1", "g"), consumer("c2", "h"))
G_AND_H_FAILS = (consumer("c1", "g"), consumer("c2", "h", then="retry"))


def team(then: str) -> tuple[Role, ...]:
    """Two managers and two consumers, of which one does this with its delivery."""
    return (manager(), manager(), consumer("c1", then=then), consumer("c2"))


ONE, OTHER = keyed_id("k", "a"), keyed_id("k", "b")
BOTH = (ONE, OTHER)
ORDER = {"order": "continue"}
FIRST, SECOND = (keyed_id("k", own) for own in COALESCED_IDS)


def of_a_key(*roles: Role, lanes: Mapping[str, str], **options: Any) -> Case:
    """Roles on a topic with lanes, in which two messages of a key were sent."""
    return Case(roles, ids=BOTH, sent=sender(BOTH), lanes=lanes, **options)


def coalescing(*roles: Role, **options: Any) -> Case:
    """Roles that send for a key by `latest`, and others."""
    return Case(roles, ids=(FIRST, SECOND), lanes={}, **{"sent": coalescer(), **options})


CASES = {
    "a send whose reply was lost": Case((sender(times=2), *TEAM), sent=None),
    "a cancel": Case((*TEAM, canceller())),
    "a cancel of what is being sent": Case(
        (sender(times=2), canceller(times=2), manager(), *CONSUMERS), sent=None
    ),
    "a due time put off": Case((*TEAM, rescheduler(FAR))),
    "a due time brought forward": Case(
        (manager(), consumer("c1"), rescheduler("+0"), canceller()), sent=sender(due=FAR)
    ),
    "another message of the same id": Case((manager(), *CONSUMERS, REPLACER)),
    "an update with the same id": Case((manager(), *CONSUMERS, UPDATER)),
    "a message given back": Case(
        (manager(), consumer("c1", then="release"), consumer("c2"), canceller())
    ),
    "a message outside its window": Case((*team("wait for its window"), rescheduler("+0"))),
    "a deferred message": Case(
        (manager(), consumer("c1", then="defer"), consumer("c2"), canceller())
    ),
    "a failing handler": Case((*team("retry"), canceller())),
    "a slow handler": Case(team("extend")),
    "an ack whose reply was lost": Case((*team("ack twice"), canceller())),
    "a ttl": Case((manager(), sweeper(), *CONSUMERS, canceller()), sent=sender(ttl_ms=0)),
    "a late policy": Case(
        (manager(), sweeper(), consumer("c1"), rescheduler("+0"), canceller()),
        sent=sender(policy="*;3600000,skip"),
    ),
    "a late policy that buries": Case(
        (manager(), sweeper(), consumer("c1"), requeuer(), purger(), canceller()),
        sent=sender(policy="*;3600000,garbage"),
    ),
    "a ttl, put off": Case(
        (manager(), manager(), consumer("c1"), rescheduler(FAR)), sent=sender(ttl_ms=0)
    ),
    "garbage": Case((manager(), *CONSUMERS, requeuer(), purger(), canceller()), retry_delays=""),
    "garbage of two groups": Case(
        (manager("g"), *G_AND_H_FAILS, purger("g"), purger("h"), requeuer("h")),
        groups=("g", "h"),
        retry_delays="",
    ),
    "two groups": Case((manager("g"), manager("h"), *G_AND_H, canceller()), groups=("g", "h")),
    "two groups, another message of the same id": Case(
        (manager("g"), *G_AND_H, REPLACER), groups=("g", "h")
    ),
    "two messages": Case((manager(), *CONSUMERS, canceller("ab")), ids="ab", sent=sender("ab")),
    "a group removed": Case((manager(), consumer("c1"), remover())),
    "one of two groups removed": Case((*G_AND_H, remover("g")), groups=("g", "h")),
    "a group removed by two": Case((remover(), remover())),
    "a group removed and declared again": Case((consumer("c1"), remover(), declarer())),
    "a group removed and declared again, a message replaced": Case(
        (remover(), declarer(), REPLACER_FOR_LATER)
    ),
    "a group removed and declared again, a message cancelled": Case(
        (remover(), declarer(), canceller()), before=FAILED_AND_PUT_OFF
    ),
    "a group removed and added again": Case((consumer("c1"), remover(), declarer(finishes=True))),
    "a group removed by two, and declared again": Case(
        (consumer("c1"), remover(), finisher(), declarer())
    ),
    "one of two groups removed and declared again": Case(
        (consumer("c1", "h"), remover("g"), declarer("g"), REPLACER_FOR_LATER), groups=("g", "h")
    ),
}
CASES |= {
    "two of a key in order": of_a_key(manager(), *CONSUMERS, canceller(BOTH), lanes=ORDER),
    "a failing one in order": of_a_key(*team("retry"), lanes=ORDER),
    "a deferred one in order": of_a_key(*team("defer"), canceller((ONE,)), lanes=ORDER),
    "one in order, put off": of_a_key(
        manager(), *CONSUMERS, rescheduler(FAR, ONE), lanes=ORDER
    ),
    "one in order that dies": of_a_key(
        *team("retry"), requeuer(id_=ONE), lanes=ORDER, retry_delays=""
    ),
    "one slot for a key": of_a_key(*team("ack twice"), lanes={"key_concurrency": "1"}),
    "one slot for a key, then two": of_a_key(
        manager(), *CONSUMERS, limiter("concurrency=2"), lanes={"key_concurrency": "1"}
    ),
    "one slot, and another message of the same id": of_a_key(
        manager(), *CONSUMERS, sender((ONE,), letter="B", mode=OnDuplicate.REPLACE),
        lanes={"concurrency": "1"},
    ),
    "two groups, each with its order": of_a_key(
        manager("g"), *G_AND_H, canceller((ONE,)), groups=("g", "h"), lanes=ORDER
    ),
    "sends that coalesce": coalescing(manager(), *CONSUMERS, coalescer("B", times=2)),
    "the first sends that coalesce": coalescing(
        coalescer(times=2), coalescer("B"), manager(), consumer("c1"), sent=None
    ),
    "three coalescing sends, one of which fails": coalescing(
        manager(), consumer("c1", then="retry"), coalescer("B"), coalescer("C")
    ),
    "sends that coalesce, and a cancel": coalescing(
        manager(), consumer("c1"), coalescer("B"), canceller((FIRST, SECOND))
    ),
    "three coalescing sends, one of which is deferred": coalescing(
        manager(), consumer("c1", then="defer"), consumer("c2"), coalescer("B"), coalescer("C")
    ),
    "sends that coalesce in two groups": coalescing(
        manager("g"), *G_AND_H, coalescer("B"), groups=("g", "h")
    ),
}  # fmt: skip
SHORT = {
    "one in order, put off",
    "the first sends that coalesce",
    "a due time brought forward",
    "a group removed and declared again",
    "a group removed and declared again, a message cancelled",
    "a group removed and declared again, a message replaced",
    "a late policy",
    "a message given back",
    "a slow handler",
    "another message of the same id",
}
LONG = {
    "a deferred one in order",
    "one in order that dies",
    "one slot for a key",
    "a cancel of what is being sent",
    "a group removed and added again",
    "a group removed by two, and declared again",
    "garbage of two groups",
    "one of two groups removed and declared again",
    "two groups",
}


@pytest.mark.parametrize("name", levels(CASES, short=SHORT, long=LONG))
def test_every_interleaving(valkey_server: EmbeddedServer, name: str) -> None:
    case = CASES[name]
    store = SyncStore(Connection(Address(flush(valkey_server.url))), Keys())
    history: list[Event] = []
    with closing(store):
        store.drive(store.register([TOPIC]))
        store.call(Configure(TOPIC, {"ack_timeout": "0", "retry_delays": case.retry_delays}))
        for group in case.groups:
            store.call(Declare(TOPIC, group))
        if case.lanes is not None:
            store.call(Configure(TOPIC, {"lanes": "1", **case.lanes}))
        for role in (*filter(None, [case.sent]), *case.before):
            store.drive(role(store, history))
        judge = Judge(store, case.groups, case.lanes)
        features = NONE if case.lanes is None else frozenset({LANES})
        told = (judge, judge.witness, tuple(history), features)
        assert Explorer(store.connection, case.roles, case.ids, case.groups, *told).explore() > 1
