"""What consumers do: take, open, then ack, retry, release or extend."""

from collections.abc import Sequence
from dataclasses import dataclass

from tests.model.topic import Entry, Group, Time, Topic
from tests.model.unknowns import Clock, Note


@dataclass(frozen=True)
class Receipt:
    """The proof of a delivery: the message and its stream entry."""

    group: str
    consumer: str
    entry: Entry
    fence: str
    """Token and mark of the message as it was handed out."""

    @property
    def id(self) -> str:
        return self.entry.id

    @property
    def pair(self) -> tuple[str, str]:
        """The ids of the message and its entry."""
        return self.id, str(self.entry.name)


def holds(group: Group, receipt: Receipt) -> bool:
    """Whether a receipt is still valid: each redelivery has a new entry."""
    return group.entry(receipt.id) is receipt.entry


def pull(
    topic: Topic, group: Group, clock: Clock, *, consumer: str, most: int, lease: int | None
) -> list[Entry]:
    """Ready -> in flight: the oldest undelivered entries."""
    if topic.is_paused:
        return []
    group.consumers.add(consumer)
    taken = group.unread[:most]
    for entry in taken:
        entry.holder, entry.since, group.given = consumer, clock.written, entry
        if lease is not None:
            group.leases[entry.id] = clock.now + lease
    return taken


def open_entries(
    topic: Topic, group: Group, entries: Sequence[Entry], lease: int | None, clock: Clock
) -> list[tuple[str, bool] | None]:
    """Open taken entries as (body, is past its ttl); None for entries without a message.

    If the topic was paused meanwhile, they are released as new entries.
    """
    kept = [one for one in entries if group.entry(one.id) is one]
    for entry in entries:
        if entry not in kept:
            group.drop(entry)
    topic.count("cleared", len(entries) - len(kept), group)
    past = {one.id for one in kept if one.id in topic.expiry and topic.expiry[one.id] <= clock.now}
    call, told = (group.name, entries[0].name), topic.stats["journaled"]
    for entry in kept if call not in topic.opened else ():
        is_first = entry.attempt == 1
        if topic.is_paused:
            topic.tell(clock, entry.id, "ready", group, entry.attempt, due=entry.due)
        elif entry.id not in past:
            late = clock.late_us(entry.due) if is_first else None
            topic.tell(clock, entry.id, "in_flight", group, entry.attempt, due=entry.due, late=late)
    if topic.stats["journaled"] > told:
        topic.opened.add(call)
    if topic.is_paused:
        for entry in kept:
            give_back(group, entry, clock)
        return [None] * len(entries)
    for entry in kept if lease is not None else ():
        group.leases[entry.id] = clock.now + (lease or 0)
    return [
        (topic.live[one.id].envelope, one.id in past) if one in kept else None for one in entries
    ]


def open_outside(
    topic: Topic, group: Group, entries: Sequence[Entry], opens: int, clock: Clock
) -> list[tuple[str, bool] | None]:
    """Open entries of messages that are outside their windows until `opens`."""
    if topic.is_paused:
        return open_entries(topic, group, entries, None, clock)
    past = {one.id for one in entries if topic.expiry.get(one.id, clock.now + 1) <= clock.now}
    away = [one for one in entries if group.entry(one.id) is one and one.id not in past]
    told = topic.stats["journaled"]
    rest = [one for one in entries if one not in away]
    opened = iter(open_entries(topic, group, rest, None, clock) if rest else [])
    for entry in away:
        put_off(topic, group, entry, clock, due=opens, reason=WINDOW)
    if topic.stats["journaled"] > told:
        topic.opened.add((group.name, entries[0].name))
    return [None if one in away else next(opened) for one in entries]


WINDOW = "outside its window"


def noted(group: Group, id_: str) -> Note:
    """What the group notes of a message in retry; of others, a note of nothing."""
    note = group.reasons.get(id_)
    return note if isinstance(note, Note) else Note("", 0, "", None)


def note(group: Group, entry: Entry, reason: str, times: int = 0) -> None:
    """Note why a delivery failed or was deferred, and when its first attempt was due."""
    first_due = noted(group, entry.id).first_due
    if first_due is None and not group.attempts.get(entry.id):
        first_due = entry.due
    deferred = entry.name if times else ""
    group.reasons[entry.id] = Note(reason, times, deferred, first_due)


def put_off(
    topic: Topic, group: Group, entry: Entry, clock: Clock, *, due: Time, reason: str
) -> None:
    """In flight -> retry, without an attempt."""
    id_ = entry.id
    group.drop(entry)
    group.leases.pop(id_, None)
    group.retry[id_] = due
    note(group, entry, reason, noted(group, id_).times + 1)
    topic.count("deferred", 1, group)
    topic.tell(clock, id_, "deferred", group, group.attempts.get(id_, 0), due=due, reason=reason)


def defer(
    topic: Topic,
    group: Group,
    receipts: Sequence[Receipt],
    clock: Clock,
    *,
    opens: int | None,
    delay: int | None,
) -> list[tuple[str, Time | None]]:
    """Wait for a delay, or until a window opens. Without both, the window is open: release."""
    answers: list[tuple[str, Time | None]] = []
    held = [holds(group, receipt) for receipt in receipts]
    before = {one.id: str(noted(group, one.id).entry) for one in receipts}
    for receipt, is_held in zip(receipts, held, strict=True):
        id_ = receipt.id
        if is_held and holds(group, receipt):
            due = opens if delay is None else clock.now_up + delay if delay else clock.now
            if due is None:
                release(topic, group, [receipt], clock)
                answers.append(("released", None))
            else:
                reason = "busy" if opens is None else WINDOW
                put_off(topic, group, receipt.entry, clock, due=due, reason=reason)
                answers.append(("deferred", due))
        elif not is_held and id_ in group.retry and before[id_] == receipt.pair[1]:
            answers.append(("deferred", group.retry[id_]))  # by an earlier call
        else:
            answers.append(("stale", None))
    return answers


def give_back(group: Group, entry: Entry, clock: Clock, *, is_suspect: bool = False) -> None:
    group.add(clock, entry.id, entry.due, is_suspect=is_suspect or entry.is_suspect)
    group.drop(entry)
    group.leases.pop(entry.id, None)


def ack(
    topic: Topic,
    group: Group,
    receipts: Sequence[Receipt],
    clock: Clock,
    *,
    lateness: str,
    state: str = "acked",
) -> list[str]:
    """In flight -> settled. The body is deleted with the last group that owed it.

    A late success settles the message in any state of this group. A late expiry (state expired)
    does not: a reschedule may have changed the due time.
    """
    answers: list[str] = []
    done: list[Receipt] = []
    for receipt in receipts:
        is_repeated = any(one.id == receipt.id for one in done)
        if holds(group, receipt):
            group.take_out(receipt.id)
            answers.append("acked")
        elif is_repeated and fits(topic, receipt):
            answers.append("repeated")
        else:
            answers.append(late_success(topic, group, receipt, state))
        if answers[-1] in ("acked", "late"):
            done.append(receipt)
    settled = 0
    for receipt in done:
        is_late = answers[receipts.index(receipt)] == "late"
        entry, owed = receipt.entry, topic.is_owed(receipt.id)
        end, reason = None if owed else 1, "after its lease had ended" if is_late else None
        told = {"due": entry.due, "end": end, "reason": reason}
        topic.tell(clock, receipt.id, state, group, entry.attempt, **told)
        if owed:
            topic.live[receipt.id].settle_partly()
        else:
            settled += 1
            topic.settle(
                clock, receipt.id, state, due=entry.due, attempts=entry.attempt, fence=receipt.fence
            )
    if state == "acked":
        topic.count("acked", len(done), group)
        for answer, letter in zip(answers, lateness, strict=True):
            topic.count(f"late:{letter}", answer == "acked" and letter != " ", group)
    else:
        topic.count(state, settled)
    topic.count("acked_late", answers.count("late"), group)
    topic.count("stale", answers.count("stale"), group)
    return answers


def fits(topic: Topic, receipt: Receipt) -> bool:
    """Whether the live message is the one of the receipt, not a later one with its id."""
    message = topic.live.get(receipt.id)
    return message is not None and message.token == receipt.fence[:8]


def late_success(topic: Topic, group: Group, receipt: Receipt, state: str) -> str:
    """The answer to an ack after its lease was lost."""
    if fits(topic, receipt):
        if state == "acked":
            if group.owes(receipt.id):
                group.take_out(receipt.id)
                return "late"
            if len(topic.groups) == 1 and receipt.id in topic.waiting:
                del topic.waiting[receipt.id]
                group.forget_failures(receipt.id)
                return "late"
        return "repeated" if topic.live[receipt.id].is_partly_settled else "stale"
    stone = topic.tombstones.get(receipt.id)
    is_known = receipt.id not in topic.live and stone is not None
    if is_known and stone and (stone.token, stone.state) == (receipt.fence[:8], state):
        return "repeated"
    return "stale"


def nth_delay(policy: str, n: int) -> int | None:
    """The pause before retry n; None after the last retry."""
    delays = [int(one) for one in policy.split(",") if one]
    return delays[n - 1] if n <= len(delays) else None


def fail(
    topic: Topic,
    group: Group,
    entry: Entry,
    clock: Clock,
    *,
    reason: str,
    delay: int | str | None = None,
) -> tuple[str, Time | None, int]:
    """Count a failed attempt: to retry, delayed from now, or to garbage after the last."""
    id_ = entry.id
    note(group, entry, reason)
    failed = group.attempts[id_] = group.attempts.get(id_, 0) + 1
    own = topic.policy.get(id_, "*").partition(";")[0]
    pause = nth_delay(topic.option("retry_delays") if own == "*" else own, failed)
    group.drop(entry)
    group.leases.pop(id_, None)
    if pause is None or delay == "discard":
        group.reasons[id_] = reason
        group.garbage[id_] = clock.now
        if len(topic.groups) == 1:
            topic.expiry.pop(id_, None)  # dead messages have no ttl
        topic.count("garbage", 1, group)
        topic.tell(clock, id_, "garbage", group, failed, reason=reason)
        return "dead", None, failed
    wait = pause if delay is None else int(delay)
    due = group.retry[id_] = clock.now_up + wait if wait else clock.now
    topic.count("retried", 1, group)
    topic.tell(clock, id_, "retry", group, failed, reason=reason, due=due)
    return "retrying", due, failed


def retry(
    topic: Topic,
    group: Group,
    failures: Sequence[tuple[Receipt, int | str | None]],
    clock: Clock,
    *,
    lateness: str,
) -> list[tuple[str, Time | None, int]]:
    """In flight -> retry or garbage. An invalid receipt changes nothing."""
    answers: list[tuple[str, Time | None, int]] = []
    for (receipt, delay), letter in zip(failures, lateness, strict=True):
        if not holds(group, receipt):
            answers.append(("stale", None, 0))
            topic.count("stale", 1, group)
            continue
        answers.append(fail(topic, group, receipt.entry, clock, reason="boom", delay=delay))
        topic.count(f"late:{letter}", letter != " ", group)
    return answers


def release(topic: Topic, group: Group, receipts: Sequence[Receipt], clock: Clock) -> list[bool]:
    """In flight -> ready, unhandled, as a new entry; no attempt is counted."""
    answers = []
    for receipt in receipts:
        answers.append(holds(group, receipt))
        if answers[-1]:
            entry = receipt.entry
            give_back(group, entry, clock)
            topic.count("released", 1, group)
            topic.tell(
                clock, entry.id, "ready", group, entry.attempt, due=entry.due, reason="released"
            )
    return answers


def extend(
    topic: Topic,
    group: Group,
    receipts: Sequence[Receipt],
    clock: Clock,
    *,
    consumer: str,
    lease: int | None,
    begun: int,
) -> list[bool]:
    """In flight, with a new lease, or begun (2: with the old lease): only for its holder."""
    answers = []
    for receipt in receipts:
        entry = receipt.entry
        answers.append(holds(group, receipt) and entry.holder == consumer)
        if answers[-1] and begun:
            entry.times = 2
        if answers[-1] and begun < 2:
            entry.since = clock.written
            group.leases.pop(entry.id, None)
            if lease is not None:
                group.leases[entry.id] = clock.now + lease
            topic.tell(clock, entry.id, "extended", group, entry.attempt)
    return answers
