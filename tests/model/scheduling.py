"""What managers and producers do with schedules: one comparison, then everything or nothing."""

from collections.abc import Sequence
from dataclasses import dataclass

from tests.model.sending import Refused, live_count
from tests.model.topic import Message, Topic
from tests.model.unknowns import Clock


@dataclass(frozen=True)
class Made:
    """A message to create. due: epoch ms; body: the envelope after version and token."""

    id: str
    due: int
    ttl: int | None = None
    policy: str | None = None


@dataclass(frozen=True)
class Change:
    """One call: see the fields of `lisa.core.transitions.schedule.Schedule`."""

    name: str
    fence: str
    record: str
    score: int | None
    token: str
    creates: Sequence[Made] = ()
    drops: Sequence[str] = ()
    earlier: Sequence[str] = ()
    overlap: str = "allow"
    held: str = ""
    held_score: int | None = None
    swaps: bool = False


def change(topic: Topic, call: Change, clock: Clock) -> tuple[str, str, str]:
    """Compare and set; returns what happened, the fence before it, and a letter per message."""
    found = topic.schedules.get(call.name, "").partition(" ")[0]
    if found != call.fence:
        return "changed", found, ""
    replaced: list[str] = []
    if call.creates and is_held(topic, call, replaced):
        write(topic, call.name, call.held, call.held_score)
        if "q" not in found:
            topic.count("overlapped")
        return "held", found, "n" * len(call.creates)
    if call.swaps and not topic.waiting.keys() >= set(call.drops):
        return "gone", found, ""
    capacity = topic.options.get("capacity")
    if capacity and call.creates:
        known = topic.live.keys() | topic.tombstones.keys()
        freed = len(topic.waiting.keys() & set(call.drops)) + len(replaced)
        grows = sum(one.id not in known for one in call.creates) - freed
        if grows > 0 and live_count(topic) + grows > int(capacity):
            raise Refused("full")
    drop(topic, call.drops, clock)
    for id_ in replaced:
        due = topic.waiting.pop(id_, None)
        for group in topic.groups:
            group.take_out(id_)
        topic.settle(clock, id_, "cancelled", due=due)
        topic.tell(clock, id_, "cancelled", None, 0, end=1)
    topic.count("cancelled", len(replaced))
    letters = ""
    for one in call.creates:
        letters += create(topic, one, call, clock)
    topic.count("sent", letters.count("a"))
    write(topic, call.name, call.record, call.score)
    return "done", found, letters


def is_held(topic: Topic, call: Change, replaced: list[str]) -> bool:
    """Whether earlier messages prevent new ones; adds those that new ones replace."""
    for id_ in call.earlier:
        state = None if call.overlap == "allow" else state_of(topic, id_)
        if (state == "running" and call.overlap == "skip") or (
            state and call.overlap == "queue_one"
        ):
            return True
        if state == "unstarted" and call.overlap == "replace_unstarted":
            replaced.append(id_)
    return False


def state_of(topic: Topic, id_: str) -> str | None:
    """Whether a live message is running or unstarted; None if it is neither."""
    if id_ not in topic.live:
        return None
    if id_ in topic.waiting:
        return "unstarted"
    state = None
    for group in topic.groups:
        entry = group.entry(id_)
        if entry is None and id_ not in group.retry:
            continue
        has_begun = topic.live[id_].is_partly_settled or id_ in group.attempts
        if has_begun or (entry is not None and entry.holder is not None):
            return "running"
        state = "unstarted"
    return state


def drop(topic: Topic, ids: Sequence[str], clock: Clock) -> None:
    """Remove waiting messages without a trace."""
    dropped = 0
    for id_ in ids:
        if topic.waiting.pop(id_, None) is None:
            continue
        for group in topic.groups:
            group.forget_failures(id_)
        del topic.live[id_]
        topic.policy.pop(id_, None)
        topic.expiry.pop(id_, None)
        topic.tell(clock, id_, "cancelled", None, 0, end=1)
        dropped += 1
    topic.count("cancelled", dropped)


def create(topic: Topic, one: Made, call: Change, clock: Clock) -> str:
    """New -> waiting, also if it is due. A known id is never created again."""
    if one.id in topic.live or one.id in topic.tombstones:
        return "d"
    message = topic.live[one.id] = Message(call.token, "")
    topic.waiting[one.id] = one.due
    if one.ttl is not None:
        topic.expiry[one.id] = one.due + one.ttl
    if one.policy is not None:
        topic.policy[one.id] = one.policy
    made = {"due": one.due, "envelope": message.envelope, "policy": one.policy}
    topic.tell(clock, one.id, "sent", None, 0, **made, expires=topic.expiry.get(one.id))
    return "a"


def write(topic: Topic, name: str, record: str, score: int | None) -> None:
    """Set the record and when to look next, or remove them."""
    topic.schedules.pop(name, None)
    topic.ticks.pop(name, None)
    if record:
        topic.schedules[name] = record
    if score is not None:
        topic.ticks[name] = score
