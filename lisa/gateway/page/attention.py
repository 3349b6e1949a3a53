"""Problems that need an operator's attention, worst first.

The conditions are those of the alerts, without the time for which an alert's condition must last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import inf

from lisa.admin.roles import RolePresence, outbox_troubles
from lisa.core.delivery.pace import DEGRADED_AFTER
from lisa.core.store.presence import BUSY_MS, ConsumerPresence, PushPresence
from lisa.core.store.server_checks import CheckResult
from lisa.gateway.page.rendering import brief, count, link, stamp
from lisa.gateway.page.snapshot import GARBAGE_MS, Line, Snapshot

DUE_FOR_MS = 1_000
"""Messages that have been due for less are not reported: a promotion or delivery takes a moment."""

OLD_MS = 60_000
"""The oldest due message of a topic may be this late."""

FAILING_MS = 10_000
"""How long every push to a target must have failed to be reported, unless it is degraded."""

MUCH_GARBAGE = 15
"""Messages that a topic may move to garbage within `GARBAGE_MS`."""


REFUSES = "Refuses writes"
NO_HEARTBEAT = "No heartbeat"
MAY_RUN = "may be running: no heartbeat can be written while the server refuses writes"


class Rank(IntEnum):
    """Kinds of problems, causes before what follows from them, the worst first."""

    SERVER_FAILS = 0
    NO_MANAGER = 1
    RELAY = 2
    NO_CONSUMER = 3
    BUSY = 4
    DEGRADED = 5
    OLD = 6
    GARBAGE = 7
    PAUSED = 8
    MANAGER_GONE = 9
    FOLLOWS = 10
    SERVER_WARNS = 11
    NONE = 12


@dataclass(frozen=True, slots=True)
class AttentionItem:
    """One line of the list; `where` is its topic or role, and `weight` orders equal ranks."""

    rank: Rank
    where: str
    title: str
    detail: str
    href: str
    weight: float = 0
    topic: str | None = None

    @property
    def is_bad(self) -> bool:
        """Whether messages are delayed or lost; other problems are warnings."""
        return self.rank <= Rank.OLD


def problems(snapshot: Snapshot, lines: Sequence[Line]) -> list[AttentionItem]:
    """The problems of these topics, the managers and the server, the worst first."""
    found = [
        *_managers(snapshot, lines),
        *_relays(snapshot),
        *_server(snapshot),
        *_consumers(snapshot, lines),
    ]
    for line in lines:
        found += _of_topic(snapshot, line)
    return sorted(found, key=lambda item: (item.rank, -item.weight, item.where))


def of_topic(snapshot: Snapshot, line: Line) -> list[AttentionItem]:
    """The problems of one topic and the managers, the worst first."""
    found = [
        *_server(snapshot, is_topics=True),
        *_managers(snapshot, [line]),
        *_of_topic(snapshot, line),
        *_consumers(snapshot, [line]),
    ]
    return sorted(found, key=lambda item: item.rank)


def of_managers(snapshot: Snapshot) -> list[AttentionItem]:
    """Why no manager is alive, and problems of relays."""
    return [
        *_server(snapshot, is_topics=True),
        *_managers(snapshot, list(snapshot.lines.values())),
        *_relays(snapshot),
    ]


def of_schedules(snapshot: Snapshot, lines: Sequence[Line]) -> list[AttentionItem]:
    """Why ticks of these topics are late: the server refuses writes, or no manager runs."""
    if not any(line.late for line in lines):
        return []
    return [*_server(snapshot, is_topics=True), *_managers(snapshot, lines)]


def worst(found: Iterable[AttentionItem]) -> dict[str, Rank]:
    """The worst rank of each topic that has a problem."""
    ranks: dict[str, Rank] = {}
    for item in found:
        if item.topic is not None:
            ranks[item.topic] = min(item.rank, ranks.get(item.topic, item.rank))
    return ranks


def _of_topic(snapshot: Snapshot, line: Line) -> Iterator[AttentionItem]:
    topic, late_ms = line.topic, line.late_ms(snapshot.at_ms)
    due_for_ms = line.due_for_ms(snapshot.at_ms)

    def item(rank: Rank, title: str, detail: str) -> AttentionItem:
        return AttentionItem(rank, topic, title, detail, link("topics", topic), due_for_ms, topic)

    if late_ms >= DUE_FOR_MS:
        lacking = None if line.counts.paused else _groups_without_consumer(line)
        backlog = _backlog(line, lacking)
        detail = f"{backlog}, the oldest for {brief(due_for_ms)}"
        if line.counts.paused:
            yield item(Rank.PAUSED, "Paused", detail)
        elif lacking is not None and snapshot.may_run(topic):
            yield item(Rank.FOLLOWS, NO_HEARTBEAT, f"{detail}; consumers {MAY_RUN}")
        elif lacking is not None:
            of = f" in {'group' if len(lacking) == 1 else 'groups'} {', '.join(lacking)}"
            title = f"No consumer{of if len(line.counts.groups) > 1 else ''}"
            yield item(Rank.NO_CONSUMER, title, detail)
        elif late_ms >= OLD_MS:
            detail = f"{backlog}, and the oldest is not delivered yet"
            yield item(Rank.OLD, f"Due for {brief(due_for_ms)}", detail)
    if line.late is not None and not snapshot.may_run():
        n, tick = line.late.schedules, stamp(line.late.since_ms)
        title, detail = "Schedule", f"its tick at {tick} has created no message yet"
        if n > 1:
            title = "Schedules"
            detail = f"{count(n)} have ticks without a message, the oldest at {tick}"
        tick_ms = snapshot.at_ms - line.late.since_ms
        href = link("topics", topic, "schedules")
        title = f"{title} late by {brief(tick_ms)}"
        yield AttentionItem(Rank.OLD, topic, title, detail, href, tick_ms, topic)
    if line.new_garbage > MUCH_GARBAGE:
        detail = f"{count(line.new_garbage)} messages died within {brief(GARBAGE_MS)}"
        href = link("topics", topic, "garbage")
        yield AttentionItem(
            Rank.GARBAGE, topic, "Garbage grows", detail, href, line.new_garbage, topic
        )


def _consumers(snapshot: Snapshot, lines: Sequence[Line]) -> Iterator[AttentionItem]:
    late = {line.topic: line.late_ms(snapshot.at_ms) for line in lines}
    seen = [
        consumer
        for consumer in snapshot.consumers
        if consumer.alive and consumer.record.topic in late
    ]
    for consumer in seen:
        record, topic = consumer.record, consumer.record.topic
        href = link("consumers", topic=topic, name=record.name)
        if record.state == "degraded" and not record.pushes:
            detail = (
                f"{record.name} takes one message at a time, because {DEGRADED_AFTER} in a row "
                f"failed{_since(snapshot, record.failing_ms)}{_why(record.error)}"
            )
            yield AttentionItem(Rank.DEGRADED, topic, "Degraded consumer", detail, href, 0, topic)
        busy_ms = record.busy_ms + consumer.silent_ms if record.busy_ms else 0
        if busy_ms >= BUSY_MS and late[topic] >= DUE_FOR_MS:
            title = f"All handlers busy for {brief(busy_ms)}"
            detail = f"the {record.concurrency} handlers of {record.name} work on the same messages"
            if record.concurrency == 1:
                detail = f"the only handler of {record.name} works on the same message"
            if not record.running:
                detail += " of other topics" if record.concurrency > 1 else " of another topic"
            yield AttentionItem(Rank.BUSY, topic, title, detail, href, busy_ms, topic)
    for topic, push in _failing_pushes(seen):
        yield _failing_push(snapshot, topic, push)


def _failing_pushes(
    roles: Iterable[RolePresence[ConsumerPresence]],
) -> list[tuple[str, PushPresence]]:
    """The pushes that fail, with their topics; several gateways may have records of one."""
    found: dict[tuple[str, str, str], PushPresence] = {}
    for topic, push in ((role.record.topic, push) for role in roles for push in role.record.pushes):
        known = found.get((topic, push.group, push.host))
        is_failing = push.failing_ms >= FAILING_MS or push.state == "degraded"
        if is_failing and (known is None or known.failing_ms < push.failing_ms):
            found[topic, push.group, push.host] = push
    return [(topic, push) for (topic, _, _), push in found.items()]


def _failing_push(snapshot: Snapshot, topic: str, push: PushPresence) -> AttentionItem:
    title = {"degraded": "Degraded push", "waiting": "Push waits"}.get(push.state, "Failing push")
    what = f"the last {count(push.failed)} pushes to {push.host} failed"
    if push.state == "waiting":
        what = f"{push.host} asked to wait"
    elif push.failed == 1:
        what = f"the last push to {push.host} failed"
    detail = f"{what}{_since(snapshot, push.failing_ms)}{_why(push.error)}"
    href = link("topics", topic) + "#pushes"
    return AttentionItem(Rank.DEGRADED, topic, title, detail, href, push.failing_ms, topic)


def _since(snapshot: Snapshot, ms: int) -> str:
    return f", since {stamp(snapshot.at_ms - ms)}" if ms else ""


def _why(error: str) -> str:
    return f". Last error: {error}" if error else ""


def _groups_without_consumer(line: Line) -> list[str] | None:
    """The groups with due messages and without a consumer; None if there are none.

    Due messages of a topic without a group wait for the first consumer.
    """
    if not line.counts.groups:
        return []
    is_waiting = line.waits_since_ms is not None
    names = [
        group.name
        for group in line.counts.groups
        if not line.alive.get(group.name) and (group.ready or is_waiting)
    ]
    return names or None


def _backlog(line: Line, groups: Sequence[str] | None) -> str:
    due = line.waiting_due + sum(
        group.ready for group in line.counts.groups if not groups or group.name in groups
    )
    if not due:
        return "retries are due"
    return f"{count(due)} {'message is' if due == 1 else 'messages are'} due"


def _managers(snapshot: Snapshot, lines: Sequence[Line]) -> Iterator[AttentionItem]:
    if any(manager.alive for manager in snapshot.managers) or not lines:
        return
    late_ms = snapshot.overdue_ms(lines)
    if snapshot.may_run():
        late = f"; due messages are overdue by {brief(late_ms)}" if late_ms is not None else ""
        detail = f"managers {MAY_RUN}{late}"
        yield AttentionItem(Rank.FOLLOWS, "Managers", NO_HEARTBEAT, detail, "/managers", inf)
    elif late_ms is not None:
        detail = (
            "due messages are not promoted, and schedules create none: overdue by "
            f"{brief(late_ms)}. Start lisa-manager"
        )
        yield AttentionItem(Rank.NO_MANAGER, "Managers", "No manager", detail, "/managers")
    else:
        detail = "messages will not become ready when due. Start lisa-manager"
        yield AttentionItem(Rank.MANAGER_GONE, "Managers", "No manager", detail, "/managers")


def _relays(snapshot: Snapshot) -> Iterator[AttentionItem]:
    for one in outbox_troubles(snapshot.relays):
        rank = Rank.RELAY if one.is_late else Rank.GARBAGE
        yield AttentionItem(rank, one.table, one.title, one.detail, "/managers")


def _server(snapshot: Snapshot, *, is_topics: bool = False) -> Iterator[AttentionItem]:
    """The problems of the server; `is_topics`: only the one that stops topics."""
    refusal = snapshot.refusal
    if refusal is not None:
        detail = (
            f"it {refusal.cause}: {refusal.cure}. Sends fail with status 503, and managers and "
            "consumers cannot write their heartbeats"
        )
        yield AttentionItem(Rank.SERVER_FAILS, "Server", REFUSES, detail, "/managers", inf)
    for check in snapshot.server.problems[0 if refusal is None else 1 :]:
        if is_topics:
            return
        is_failing = check.verdict is CheckResult.FAIL
        rank = Rank.SERVER_FAILS if is_failing else Rank.SERVER_WARNS
        yield AttentionItem(rank, "Server", check.name.capitalize(), check.found, "/managers")
