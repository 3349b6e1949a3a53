"""What operators do: groups, options, garbage."""

from collections.abc import Mapping, Sequence

from tests.model.sending import Refused
from tests.model.topic import Group, Time, Topic
from tests.model.unknowns import Clock


def declare(topic: Topic, name: str, clock: Clock) -> bool:
    """Declare a group, which gets what is promoted from now on; returns whether it is new."""
    group = topic.all_groups.setdefault(name, Group(name))
    if name in topic.declared:
        return False
    if removing(name) in topic.options and owes(group):
        raise Refused("removal unfinished")
    if topic.options.pop(removing(name), None) is not None:
        group.attempts, group.reasons, group.leases = {}, {}, {}
    topic.declared[name] = clock.now
    return True


def removing(name: str) -> str:
    """The option that marks a group as being removed."""
    return f"removing:{name}"


def owes(group: Group) -> bool:
    """Whether the group has a message in any of its places."""
    return bool(group.retry or group.garbage) or any(entry.is_ours for entry in group.stream)


def undeclare(
    topic: Topic, name: str, ids: Sequence[str], clock: Clock, *, drop: bool, begun: bool
) -> tuple[int, bool]:
    """Stop promoting to a group and remove these ids from it; returns whether it is gone.

    A message that no group owes any longer is purged. A removal may have been undone meanwhile.
    """
    if begun and removing(name) not in topic.options:
        return 0, True
    assert not (name in topic.declared and removing(name) in topic.options), "only a foreign hand"
    topic.options[removing(name)] = clock.now
    topic.declared.pop(name, None)
    group = topic.all_groups.get(name, Group(name))
    settled = 0
    for id_ in ids:
        attempts = group.attempts.get(id_, 0)
        was_owed = group.take_out(id_)
        ends = id_ in topic.live and id_ not in topic.waiting and not topic.is_owed(id_)
        if ends:
            topic.settle(clock, id_, "purged", attempts=attempts)
            settled += 1
        if was_owed or ends:
            end = 1 if ends else None
            topic.tell(clock, id_, "purged", group, attempts, reason="group removed", end=end)
    topic.count("purged", settled, group)
    is_gone = drop and not owes(group)
    if is_gone:
        topic.all_groups.pop(name, None)
        topic.options.pop(removing(name))
    return settled, is_gone


def configure(topic: Topic, values: Mapping[str, str | None], *, declared: bool) -> int:
    """Write options. A declaration changes only what a declaration last wrote, never `paused`."""
    changes = 0
    for name, value in values.items():
        was_declared = f"declared:{name}"
        is_set = topic.options.get(name)
        is_its_own = is_set is None or is_set == topic.options.get(was_declared)
        if declared and name == "paused":
            continue
        if declared:
            write(topic, was_declared, value)
        if not declared or is_its_own:
            write(topic, name, value)
            changes += is_set != value
            if name == "paused" and (is_set or "0") != (value or "0"):
                topic.count("pauses" if value == "1" else "resumes")
    return changes


def write(topic: Topic, name: str, value: str | None) -> None:
    if value is None:
        topic.options.pop(name, None)
    else:
        topic.options[name] = value


def requeue(topic: Topic, group: Group, ids: Sequence[str], clock: Clock) -> list[bool]:
    """Garbage -> that group's retry, due now, failures reset, without a ttl."""
    answers = []
    for id_ in ids:
        answers.append(id_ in group.garbage)
        if answers[-1]:
            del group.garbage[id_]
            group.retry[id_] = clock.now
            group.forget_failures(id_)
            topic.expiry.pop(id_, None)
            topic.count("requeued", 1, group)
            topic.tell(clock, id_, "requeued", group, 0, due=clock.now)
    return answers


def purge(topic: Topic, group: Group, ids: Sequence[str], clock: Clock) -> list[bool]:
    """Garbage -> settled. The body is deleted with the last group that owed it."""
    answers = []
    for id_ in ids:
        answers.append(id_ in group.garbage)
        if not answers[-1]:
            continue
        del group.garbage[id_]
        attempts, owed = group.attempts.get(id_, 0), topic.is_owed(id_)
        group.forget_failures(id_)
        topic.count("purged", 1, group)
        end = None if owed else 1
        topic.tell(clock, id_, "purged", group, attempts, end=end)
        if owed:
            topic.live[id_].settle_partly()
        else:
            topic.settle(clock, id_, "purged", attempts=attempts)
    return answers


def look_up(topic: Topic, id_: str) -> tuple[str, Time | None, int] | None:
    """State, due time and attempts of a message as its sender sees it; None if unknown."""
    if id_ in topic.waiting:
        return "waiting", topic.waiting[id_], 0
    found: dict[str, tuple[str, Time | None, int]] = {}
    for group in topic.groups:
        failed, entry = group.attempts.get(id_, 0), group.entry(id_)
        if entry:
            state = "in_flight" if entry.holder else "ready"
            found.setdefault(state, (state, entry.due, failed + bool(entry.holder)))
        elif id_ in group.retry:
            found.setdefault("retry", ("retry", group.retry[id_], failed))
        elif id_ in group.garbage:
            found.setdefault("garbage", ("garbage", group.garbage[id_], failed))
    for state in ("in_flight", "ready", "retry", "garbage"):
        if state in found:
            return found[state]
    stone = topic.tombstones.get(id_)
    return (stone.state, stone.due, stone.attempts) if stone else None
