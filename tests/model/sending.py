"""What producers do: send, cancel, reschedule."""

from collections.abc import Sequence
from dataclasses import dataclass

from tests.model.topic import Message, Time, Tombstone, Topic, earliest
from tests.model.unknowns import Clock

A_SECOND = 1_000
"""No late policy concerns messages less late than this."""


@dataclass(frozen=True)
class Outgoing:
    """One message of a call. `due` is epoch milliseconds, or '+' and a delay."""

    id: str
    due: str
    text: str = ""
    ttl: int | None = None
    policy: str | None = None


@dataclass(frozen=True)
class Send:
    """One call of a producer. With the same token it is a repeated call."""

    token: str
    mode: str
    messages: Sequence[Outgoing]
    are_ids_new: bool = False
    """The ids were made for this call: a known id means that the call is known."""


class Refused(Exception):
    """No message of the call was sent: `full` or `large`."""


def instant(due: str, clock: Clock) -> Time:
    """A delay counts from now, rounded up; no delay is due now."""
    if not due.startswith("+"):
        return int(due)
    return clock.now if due == "+0" else clock.now_up + int(due)


def live_count(topic: Topic) -> int:
    """The count that capacity limits: dead messages are excluded."""
    owed = [len([e for e in g.stream if e.is_ours]) + len(g.retry) for g in topic.groups]
    return len(topic.waiting) + max(owed, default=0)


def send(topic: Topic, call: Send, clock: Clock) -> list[str]:
    """New -> waiting, or straight to ready. Returns the outcome of each message."""
    ids = [one.id for one in call.messages]
    if any(len(one.text) > int(topic.option("max_body_bytes")) for one in call.messages):
        raise Refused("large")
    is_replay = call.are_ids_new and (
        ids[0] in topic.tombstones or any(one in topic.live for one in ids)
    )
    if topic.options.get("capacity"):
        new = 0 if is_replay else count_new(topic, call)
        if new and live_count(topic) + new > int(topic.options["capacity"]):
            raise Refused("full")
    if is_replay:
        return ["accepted"] * len(ids)
    outcomes, dues = accept(topic, call, clock)
    topic.count("duplicate", outcomes.count("duplicate"))
    if dues:
        place(topic, dues, outcomes, call, clock)
    return outcomes


def count_new(topic: Topic, call: Send) -> int:
    """How many ids the call would add. A recently settled id counts only when replaced."""
    new = 0
    for id_ in {one.id for one in call.messages} - topic.live.keys():
        stone = topic.tombstones.get(id_)
        new += stone is None or (
            call.mode in ("replace", "update", "keep_live") and stone.token != call.token
        )
    return new


MARKS = {"r": "replaced", "f": "replaced_in_flight", "b": "updated"}


def accept(topic: Topic, call: Send, clock: Clock) -> tuple[list[str], dict[int, Time]]:
    """The outcome of each message, and the due times of those to be placed, by number."""
    known: Message | Tombstone | None
    outcomes: list[str] = []
    dues: dict[int, Time] = {}
    last_of: dict[str, int] = {}  # an id may occur twice: the number of its last message so far
    replayed: set[str] = set()
    for number, one in enumerate(call.messages):
        known = topic.live.get(one.id)
        if known is None and not call.are_ids_new:
            known = topic.tombstones.get(one.id)
        if known is None:
            topic.live[one.id] = Message(call.token, one.text)
            outcomes.append("accepted")
            dues[number] = instant(one.due, clock)
        elif known.token == call.token and one.id not in last_of:  # same answer as the first time
            outcomes.append(MARKS.get(known.mark.lower(), "accepted"))
            replayed.add(one.id)
        elif call.mode == "reject":
            outcomes.append("rejected")
        elif call.mode == "keep" or (call.mode == "keep_live" and not has_ended(topic, one.id)):
            outcomes.append("duplicate")
        elif one.id in replayed:
            outcomes.append("updated" if call.mode == "update" else "replaced")
        else:  # a new life: nothing of the earlier one stays in any place
            last = last_of.get(one.id)
            kept = due_before(topic, one.id) if last is None else dues.get(last)
            due = kept if call.mode == "update" else None
            mark = begin_anew(topic, call, one, known, "r" if due is None else "b")
            outcomes.append(MARKS[mark])
            dues.pop(-1 if last is None else last, None)
            dues[number] = instant(one.due, clock) if due is None else due
        last_of[one.id] = number
    return outcomes, dues


def begin_anew(
    topic: Topic, call: Send, one: Outgoing, known: Message | Tombstone, mark: str
) -> str:
    """Replace a known message; returns the mark of the outcome."""
    if any((entry := group.entry(one.id)) and entry.holder for group in topic.groups):
        mark = "f"
    topic.tombstones.pop(one.id, None)
    for group in topic.groups:
        group.take_out(one.id)
    topic.policy.pop(one.id, None)
    topic.expiry.pop(one.id, None)
    is_same = known.token == call.token  # an id twice in one call
    topic.live[one.id] = Message(call.token, one.text, known.mark if is_same else mark)
    return mark


def due_before(topic: Topic, id_: str) -> Time | None:
    """When a live message is handed out next; None if a consumer holds it, or a group ended it."""
    if id_ not in topic.live or id_ in topic.waiting:
        return topic.waiting.get(id_)
    if topic.why_not_taken_back(id_, dead_counts=True):
        return None
    entries = [group.entry(id_) for group in topic.groups]
    found = [entry.due for entry in entries if entry]
    return min([*found, *(group.retry[id_] for group in topic.groups if id_ in group.retry)])


def has_ended(topic: Topic, id_: str) -> bool:
    """Whether a known id is settled, or in garbage and in no other place."""
    if id_ not in topic.live:
        return True
    if id_ in topic.waiting or any(
        group.entry(id_) or id_ in group.retry for group in topic.groups
    ):
        return False
    return any(id_ in group.garbage for group in topic.groups)


def place(
    topic: Topic, dues: dict[int, Time], outcomes: list[str], call: Send, clock: Clock
) -> None:
    """Put them into waiting; due messages skip to ready unless they would overtake others."""
    placed = list(dues)
    is_late = min(dues.values()) + A_SECOND <= clock.now and has_late_policy(topic, call)
    # Promote decides what happens to late messages.
    room = 0 if is_late else room_for(topic, list(dues.values()), clock)
    if room:
        placed = sorted(placed, key=lambda number: (dues[number], number))
    straight = [number for number in placed if dues[number] <= clock.now][:room]
    for number in placed:
        one, due = call.messages[number], dues[number]
        if number in straight:
            topic.waiting.pop(one.id, None)
            for group in topic.groups:
                group.add(clock, one.id, due)
        else:
            topic.waiting[one.id] = due
        if one.ttl is not None:
            topic.expiry[one.id] = due + one.ttl
        if one.policy is not None:
            keep_policy(topic, one.id, one.policy)
    topic.count("promoted", len(straight))
    topic.count("sent", len(dues))
    for number, due in dues.items():
        one = call.messages[number]
        body = Message(call.token, one.text).envelope
        state = "sent" if outcomes[number] == "accepted" else "replaced"
        more = {"expires": topic.expiry.get(one.id), "policy": topic.policy.get(one.id)}
        topic.tell(clock, one.id, state, None, 0, due=due, envelope=body, **more)
    for group in topic.groups:
        for number in straight:
            topic.tell(clock, call.messages[number].id, "ready", group, 1, due=dues[number])


def keep_policy(topic: Topic, id_: str, policy: str) -> None:
    topic.policy[id_] = policy
    if late_part(policy):
        topic.options["own_late"] = "1"


def has_late_policy(topic: Topic, call: Send) -> bool:
    return "late" in topic.options or any(late_part(one.policy or "") for one in call.messages)


def late_part(policy: str) -> str:
    return [*policy.split(";"), ""][1]


def room_for(topic: Topic, dues: Sequence[Time], clock: Clock) -> int:
    """How many due messages may go straight to ready."""
    due = sum(one <= clock.now for one in dues)
    heads = [earliest(topic.waiting)] + [earliest(group.retry) for group in topic.groups]
    is_overtaken = any(head is not None and head <= clock.now for head in heads)
    if not topic.groups or topic.is_paused or is_overtaken:
        return 0
    return max(0, min(due, *(group.room(topic) for group in topic.groups)))


def cancel(topic: Topic, ids: Sequence[str], clock: Clock) -> list[str]:
    """Waiting, ready, retry, garbage -> settled; otherwise nothing is changed."""
    answers: list[str] = []
    for id_ in ids:
        if id_ in ids[: len(answers)] and answers[ids.index(id_)] == "cancelled":
            answers.append("cancelled")
            continue
        if id_ not in topic.live:
            stone = topic.tombstones.get(id_)
            is_cancelled = stone is not None and stone.state == "cancelled"
            answers.append("cancelled" if is_cancelled else "done" if stone else "unknown")
            continue
        due = topic.waiting.get(id_)
        answers.append((due is None and topic.why_not_taken_back(id_)) or "cancelled")
        if answers[-1] == "cancelled":
            attempts = max((g.attempts.get(id_, 0) for g in topic.groups), default=0)
            topic.waiting.pop(id_, None)
            for group in topic.groups:
                group.take_out(id_)
            topic.settle(clock, id_, "cancelled", due=due, attempts=attempts)
            topic.count("cancelled")
            topic.tell(clock, id_, "cancelled", None, attempts, end=1)
    return answers


def reschedule(topic: Topic, items: Sequence[tuple[str, str]], clock: Clock) -> list[str]:
    """Waiting, ready, retry -> waiting with a new due time; a ttl moves with it."""
    answers = []
    for id_, spec in items:
        if id_ not in topic.live:
            answers.append("done" if id_ in topic.tombstones else "unknown")
            continue
        before = topic.waiting.get(id_)
        why_not = before is None and topic.why_not_taken_back(id_, dead_counts=True)
        answers.append(why_not or "rescheduled")
        if why_not:
            continue
        due = instant(spec, clock)
        was = before if before is not None else due_in_groups(topic, id_)
        if id_ in topic.expiry and (was is not None or due > clock.now):
            since = was if was is not None else clock.now
            topic.expiry[id_] = topic.expiry[id_] + (due - since)
        topic.waiting[id_] = due
        for group in topic.groups if before is None else ():
            entry = group.entry(id_)
            if entry:
                group.drop(entry)
            group.retry.pop(id_, None)
        topic.count("rescheduled")
        topic.tell(clock, id_, "rescheduled", None, 0, due=due, expires=topic.expiry.get(id_))
    return answers


def due_in_groups(topic: Topic, id_: str) -> Time | None:
    """The due time that a ready message carries; later attempts only know their own."""
    entries = [group.entry(id_) for group in topic.groups]
    return next((entry.due for entry in entries if entry and entry.attempt == 1), None)
