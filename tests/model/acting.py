"""Roles as flows that record what they did, for `interleaving`.

They make the same calls in the same order as the real roles: a manager promotes, expires messages
past their ttl, and reclaims; a consumer takes one message, opens it, and settles it; a remover is
the removal itself, call by call.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from lisa.core.model.envelope import decode_envelope, encode_envelope, fence_of
from lisa.core.model.errors import GroupRemoved, RemovalUnfinished
from lisa.core.model.sharding import Shard, Topic
from lisa.core.model.stream import Entry
from lisa.core.redis.flow import Flow, Step
from lisa.core.store import group_removal
from lisa.core.store.store import Store
from lisa.core.transitions.ack import NO_LATENESS, Ack, Acked, Settlement
from lisa.core.transitions.base import Transition
from lisa.core.transitions.change import Cancel, Reschedule
from lisa.core.transitions.delivery import Open, Pull
from lisa.core.transitions.enqueue import OnDuplicate
from lisa.core.transitions.garbage import Purge, Requeue
from lisa.core.transitions.groups import Declare, Undeclare
from lisa.core.transitions.lease import Extend, Reclaim, Release
from lisa.core.transitions.promote import Promote
from lisa.core.transitions.retry import Deferral, Fail, Failed, Failure, Postpone
from lisa.core.transitions.topic import LimitKeys
from lisa.core.transitions.upkeep import Expire
from tests.model.interleaving import TOPIC, Event, answered, makes_roles
from tests.rows import Burst, Item, coalesce, enqueue

T = TypeVar("T")

PAST, FAR = "1000", "4000000000000"
SEED = 1
ALL = "*"
"""In place of an id: the event concerns a group, and so every message."""


@makes_roles
def sender(
    store: Store,
    story: list[Event],
    ids: Sequence[str] = "a",
    *,
    letter: str = "A",
    due: str = PAST,
    ttl_ms: int | None = None,
    policy: str | None = None,
    mode: OnDuplicate = OnDuplicate.KEEP,
    times: int = 1,
) -> Flow[None]:
    """Sends; repeatedly if its reply was lost. `letter` eight times is the send token."""
    body = encode_envelope(letter * 8, "")
    call = enqueue(TOPIC, letter * 8, [Item(one, due, body, ttl_ms, policy) for one in ids], mode)
    for _ in range(times):
        outcomes = yield from store.run(call)
        story.extend(
            ("sent", one, letter, said, due) for one, said in zip(ids, outcomes, strict=True)
        )


@makes_roles
def coalescer(
    store: Store, story: list[Event], letter: str = "A", key: str = "k", times: int = 1
) -> Flow[None]:
    """Sends by `latest`; repeatedly if its reply was lost, which returns the same outcome."""
    body = encode_envelope(letter * 8, "")
    call = coalesce(TOPIC, letter * 8, [Burst(key, f"l{PAST}", body)], call_id=letter)
    ((id_, said),) = yield from store.run(call)
    story.append(("sent", id_, letter, said, PAST))
    for _ in range(1, times):
        assert (yield from store.run(call)) == [(id_, said)]


@makes_roles
def limiter(store: Store, _: list[Event], limits: str, key: str = "k") -> Flow[None]:
    """Sets the limits of a key."""
    yield from store.run(LimitKeys(TOPIC, "set", {key: limits}))


@makes_roles
def manager(store: Store, story: list[Event], group: str = "lisa") -> Flow[None]:
    """Promotes, expires, reclaims."""
    promoted = yield from store.run(Promote(TOPIC))
    if promoted.expired:
        ended = yield from store.run(Expire(TOPIC, promoted.expired))
        story.extend(
            (said.value, one)
            for one, said in zip(promoted.expired, ended, strict=True)
            if said in ("expired", "skipped")
        )
    yield from reclaim(store, story, group)


@makes_roles
def sweeper(store: Store, story: list[Event], id_: str = "a") -> Flow[None]:
    """Expires a message that it found in the list of ttls."""
    (said,) = yield from store.run(Expire(TOPIC, [id_]))
    if said in ("expired", "skipped"):
        story.append((said.value, id_))


def reclaim(store: Store, story: list[Event], group: str) -> Flow[None]:
    try:
        reclaimed = yield from store.run(Reclaim(TOPIC, group, seed=SEED))
    except GroupRemoved:
        return
    story.extend(
        ("dead", moved.id, group)
        for moved in reclaimed.moved
        if moved.retried.outcome is Failed.DEAD
    )


@makes_roles
def consumer(
    store: Store,
    story: list[Event],
    name: str,
    group: str = "lisa",
    *,
    then: str = "ack",
    most: int = 1,
) -> Flow[None]:
    """Takes a message and settles it: ack, ack twice, extend and ack, or as `settle` says."""
    try:
        pulled = yield from store.run(Pull(TOPIC, group, name, most))
        if not pulled.entries:
            return
        opened = yield from store.run(Open(TOPIC, group, pulled.entries))
        given = [
            (entry, data, "past its ttl" if is_past else then)
            for entry, data, is_past in zip(
                pulled.entries, opened.envelopes, opened.past_ttl, strict=True
            )
            if data is not None
        ]
        for entry, data, what in given:
            if what == then:
                story.append(("handed", entry.id, decode_envelope(data).token[0], group))
        for entry, data, what in given:
            yield from settle(store, story, entry, data, group=group, then=what, name=name)
    except GroupRemoved:
        return


def settle(
    store: Store, story: list[Event], entry: Entry, data: bytes, *, group: str, then: str, name: str
) -> Flow[None]:
    """What a consumer does with one message delivered to it."""
    fence = fence_of(data)
    who = (entry.id, fence[0], group)
    receipt = (entry.id, entry.entry)
    one = Settlement(*receipt, fence, entry.due_ms, entry.attempt, NO_LATENESS)
    if then == "past its ttl":
        (said,) = yield from store.run(Ack(TOPIC, group, [one], "expired"))
        if said is Acked.ACKED:
            story.append(("expired", entry.id, name))
        return
    if then == "retry":
        (failed,) = yield from store.run(Fail(TOPIC, group, [Failure(*receipt, "no")], seed=SEED))
        if failed.outcome is Failed.DEAD:
            story.append(("dead", entry.id, group))
        return
    if then in ("defer", "wait for its window"):
        busy, outside = Deferral(*receipt, 0, "busy"), Deferral(*receipt, int(FAR), "", int(PAST))
        yield from store.run(Postpone(TOPIC, group, [busy if then == "defer" else outside]))
        return
    if then == "release":
        yield from store.run(Release(TOPIC, group, [receipt]))
        return
    if then == "extend":
        (kept,) = yield from store.run(Extend(TOPIC, group, name, [receipt]))
        story.append(("kept" if kept else "lost", entry.id, group, name))
    for _ in range(2 if then == "ack twice" else 1):
        (said,) = yield from store.run(Ack(TOPIC, group, [one]))
        if said in (Acked.ACKED, Acked.LATE):
            story.append(("settled", *who))


@makes_roles
def canceller(
    store: Store, story: list[Event], ids: Sequence[str] = "a", times: int = 1
) -> Flow[None]:
    """Cancels; repeatedly if its reply was lost."""
    for _ in range(times):
        said = yield from store.run(Cancel(TOPIC, list(ids)))
        story.extend((str(answer), one) for one, answer in zip(ids, said, strict=True))


@makes_roles
def rescheduler(store: Store, story: list[Event], due: str, id_: str = "a") -> Flow[None]:
    (said,) = yield from store.run(Reschedule(TOPIC, [(id_, due)]))
    story.append((str(said), id_, due))


@makes_roles
def requeuer(store: Store, story: list[Event], group: str = "lisa", id_: str = "a") -> Flow[None]:
    (done,) = yield from store.run(Requeue(TOPIC, group, [id_]))
    if done:
        story.append(("requeued", id_, group))


@makes_roles
def purger(store: Store, story: list[Event], group: str = "lisa", id_: str = "a") -> Flow[None]:
    (done,) = yield from store.run(Purge(TOPIC, group, [id_]))
    if done:
        story.append(("purged", id_, group))


@makes_roles
def remover(store: Store, story: list[Event], group: str = "lisa") -> Flow[None]:
    """Removes a group."""
    with telling(store, story):
        yield from group_removal.remove(store, Topic(TOPIC), group)


@makes_roles
def finisher(store: Store, story: list[Event], group: str = "lisa") -> Flow[None]:
    """A manager's sweep that considers a removal interrupted."""
    with telling(store, story):
        yield from group_removal.finish(store, Shard(TOPIC), group)


@makes_roles
def declarer(
    store: Store, story: list[Event], group: str = "lisa", *, finishes: bool = False
) -> Flow[None]:
    """Declares a group, as its consumers do. finishes: as `lisa topic group add` does."""
    if finishes:
        yield from finisher(group)(store, story)
    try:
        is_new = yield from store.run(Declare(TOPIC, group))
    except RemovalUnfinished:
        return
    if is_new:
        story.append(("declared", ALL, group))


@contextmanager
def telling(store: Store, story: list[Event]) -> Iterator[None]:
    """Records what happens to the groups that a store removes in the block.

    Only a removal's first call, which may repeat itself, is recorded as undeclaring its group: if
    other calls do so as well, the story contradicts the state.
    """
    run = store.run

    def run_and_tell(call: Transition[T], *more: Any) -> Flow[T]:
        if not isinstance(call, Undeclare):
            return (yield from run(call, *more))

        def answer(step: Step) -> Flow[Any]:
            reply = yield step
            if not call.begun:
                story.append(("undeclared", ALL, call.group))
            return reply

        said: Any = yield from answered(run(call, *more), answer)
        assert said.settled in (0, len(call.ids)), "it is not told which of them were settled"
        story.extend(("removed", id_, call.group) for id_ in call.ids if said.settled)
        return said  # type: ignore[no-any-return]

    store.run = run_and_tell  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        store.run = run  # type: ignore[method-assign]
