"""What managers do: promote, reclaim, expire (also by late policies), forget, trim."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tests.model.delivering import fail, give_back, noted
from tests.model.topic import STEPS, Entry, Group, Time, Topic, earliest, in_order
from tests.model.unknowns import Clock, LateReason

FOREVER = 10**15
SUSPECT = "ack timeout during its handler"


class Promoted(NamedTuple):
    """What a call did, and when to call again."""

    moved: int = 0
    full: tuple[str, ...] = ()
    next_due: Time | None = None
    is_paused: bool = False
    is_cut_short: bool = False
    expired: tuple[str, ...] = ()


class Reclaimed(NamedTuple):
    """One window's result; `cursor` is its last entry, None at the end."""

    cursor: Entry | None
    cleared: int
    returned: int
    moved: list[tuple[str, Time, tuple[str, Time | None, int]]]


def promote(topic: Topic, limit: int, clock: Clock) -> Promoted:
    """Waiting, retry -> ready, when due, in due order; messages past their ttl are not moved."""
    if topic.is_paused or not topic.groups:
        return Promoted(is_paused=topic.is_paused)
    most = max(1, min(limit, STEPS) // len(topic.groups))
    expired: list[str] = []
    cuts = []

    def due_of(zset: dict[str, Time], *, cuts_short: bool = True) -> list[tuple[str, Time]]:
        due = [item for item in in_order(zset) if item[1] <= clock.now][:most]
        cuts.append(cuts_short and len(due) == most)
        past = [
            id_
            for id_, _ in due
            if (id_ in topic.expiry and topic.expiry[id_] <= clock.now)
            or (zset is topic.waiting and late_action(topic, id_, clock))
        ]
        expired.extend(id_ for id_ in past if id_ not in expired)
        return [item for item in due if item[0] not in past]

    waiting = due_of(topic.waiting)
    moved, full, heads = 0, list[str](), list[Time | None]()
    leaving: set[str] = set()
    several = len(topic.groups) > 1
    for group in topic.groups:
        has_room = not several or group.room(topic) > 0
        retry = due_of(group.retry, cuts_short=has_room)
        takes, is_full = promote_into(topic, group, waiting, retry, clock, most=most)
        moved += len(takes)
        full += [group.name] if is_full else []
        head = earliest(group.retry)
        waits_for_room = several and is_full and head is not None and head <= clock.now
        heads.append(None if waits_for_room else head)
        leaving |= {id_ for id_, _ in waiting if id_ in takes or len(topic.groups) > 1}
    for id_ in leaving:
        del topic.waiting[id_]
    topic.count("promoted", len(leaving))
    heads.append(earliest(topic.waiting))
    next_due = min((head for head in heads if head is not None), default=None)
    return Promoted(moved, tuple(full), next_due, False, any(cuts), tuple(expired))


def promote_into(
    topic: Topic,
    group: Group,
    waiting: list[tuple[str, Time]],
    retry: list[tuple[str, Time]],
    clock: Clock,
    *,
    most: int,
) -> tuple[list[str], bool]:
    """Which messages one group takes, and whether it is full.

    If other groups take a message but this one is full, the message becomes this group's retry at
    its due time, with no attempt counted: a slow group does not delay the others.
    """
    # Of equal due times, waiting messages go first. (The sort is stable.)
    wanted = sorted(waiting + retry, key=lambda item: item[1])
    room = group.room(topic) if wanted else 0
    takes = wanted[: max(0, min(room, most))]
    held = [item for item in waiting if item not in takes] if len(topic.groups) > 1 else []
    for id_, due in takes:
        is_suspect = id_ in group.retry and noted(group, id_).reason == SUSPECT
        group.add(clock, id_, due, is_suspect=is_suspect)
        group.retry.pop(id_, None)
        attempt = group.attempts.get(id_, 0) + 1
        topic.tell(clock, id_, "ready", group, attempt, due=due)
    for id_, due in held:
        group.retry[id_] = due
        attempt = group.attempts.get(id_, 0)
        topic.tell(clock, id_, "retry", group, attempt, due=due, reason="group is full")
    return [id_ for id_, _ in takes], room < min(len(wanted), most)


def reclaim(
    topic: Topic, group: Group, after: Entry | None, window: int, clock: Clock
) -> Reclaimed:
    """In flight for too long -> retry or garbage: a window of pending entries `after` an entry.

    A delivery with its own lease is reclaimed when that ends (before the first window). Pending
    entries without a message are cleared and do not block the window. A handler process's delivery
    whose handler may not have begun returns to ready as a suspect.
    """
    overdue, back = list[Entry](), list[Entry]()
    if after is None:
        overdue += own_leases_ended(group, window, clock)
    seen = [one for one in group.pending if after is None or one.number > after.number][:window]
    cleared = 0
    for entry in seen:
        if clock.now < entry.since + int(topic.option("ack_timeout")):
            continue
        if not entry.is_ours:
            group.drop(entry)
            cleared += 1
        elif entry.id not in group.leases:
            (overdue if may_have_begun(entry) else back).append(entry)
    for entry in back:
        give_back(group, entry, clock, is_suspect=True)
        attempt = entry.attempt
        topic.tell(clock, entry.id, "ready", group, attempt, due=entry.due, reason="suspect")
    moved = []
    for one in overdue:
        is_again = one.is_suspect and one.times > 1 and one.id not in group.leases
        reason = SUSPECT if is_again else "ack timeout"
        moved.append((one.id, one.due, fail(topic, group, one, clock, reason=reason)))
    topic.count("released", len(back), group)
    topic.count("reclaimed", len(moved) + len(back), group)
    topic.count("cleared", cleared, group)
    return Reclaimed(seen[-1] if len(seen) == window else None, cleared, len(back), moved)


def own_leases_ended(group: Group, most: int, clock: Clock) -> list[Entry]:
    found = []
    for id_, ends in in_order(group.leases)[:most]:
        if ends <= clock.now:
            entry = group.entry(id_)
            if entry and entry.holder:
                found.append(entry)
            else:
                del group.leases[id_]
    return found


def may_have_begun(entry: Entry) -> bool:
    """Whether a handler has begun, or a holder that tells nothing had the message in its hands."""
    return entry.times > 1 or not (entry.holder or "").endswith("-h")


def late_action(topic: Topic, id_: str, clock: Clock) -> str:
    """What a late policy does with a message that was never promoted; empty if it has none."""
    own = [*topic.policy.get(id_, "").split(";"), ""][1]
    after, _, action = (own or topic.option("late")).partition(",")
    due = topic.waiting.get(id_)
    if not after or action == "run" or due is None or due + int(after) >= clock.now:
        return ""
    if action == "collapse" and "@" not in id_:
        return ""
    return "" if any(id_ in group.attempts for group in topic.groups) else action


def end_late(topic: Topic, id_: str, newer: Sequence[str], clock: Clock) -> str:
    """Waiting, and too late -> settled, or garbage."""
    action = late_action(topic, id_, clock)
    if not action or not topic.groups:
        return "not_due"
    due = topic.waiting[id_]
    if action == "garbage":
        del topic.waiting[id_]
        topic.expiry.pop(id_, None)
        for group in topic.groups:
            reason = LateReason(clock.now - due)
            group.garbage[id_] = clock.now
            group.reasons[id_] = reason
            topic.count("garbage", 1, group)
            topic.tell(clock, id_, "garbage", group, 0, reason=reason)
        return "garbage"
    if action == "collapse" and all(topic.waiting.get(n, FOREVER) > clock.now for n in newer):
        retry, _, *lane = [*topic.policy.get(id_, "*").split(";"), ""]
        topic.policy[id_] = ";".join((retry, "0,run", *filter(None, lane)))
        topic.options["own_late"] = "1"
        return "kept"
    del topic.waiting[id_]
    topic.settle(clock, id_, "skipped", due=due)
    topic.count("skipped")
    topic.tell(clock, id_, "skipped", None, 0, end=1)
    return "skipped"


def expire(
    topic: Topic, ids: Sequence[str], newer: Mapping[str, Sequence[str]], clock: Clock
) -> list[str]:
    """Waiting, ready, retry past its ttl -> settled. In-flight messages finish."""
    answers = []
    for id_ in ids:
        ends = topic.expiry.get(id_)
        if ends is not None and id_ not in topic.live:
            del topic.expiry[id_]
            answers.append("orphan")
        elif id_ not in topic.live:
            answers.append("not_due")
        elif ends is None or ends > clock.now:
            answers.append(end_late(topic, id_, newer.get(id_, ()), clock))
        else:
            answers.append(expire_one(topic, id_, clock))
    return answers


def expire_one(topic: Topic, id_: str, clock: Clock) -> str:
    attempts = max((group.attempts.get(id_, 0) for group in topic.groups), default=0)
    due = topic.waiting.pop(id_, None)
    is_held = is_dead = False
    dropped = []
    for group in topic.groups:
        entry = group.entry(id_)
        if due is not None:
            group.forget_failures(id_)
        elif entry and entry.holder:
            is_held = True
        elif id_ in group.garbage:
            is_dead = True
        elif group.take_out(id_):
            dropped.append(group)
    if is_dead and not is_held:
        del topic.expiry[id_]
    if is_dead or is_held:
        for group in dropped:
            topic.tell(clock, id_, "expired", group, attempts)
        return "in_flight" if is_held else "not_due"
    topic.settle(clock, id_, "expired", due=due, attempts=attempts)
    topic.count("expired")
    topic.tell(clock, id_, "expired", None, attempts, end=1)
    return "expired"


def forget(topic: Topic, group: Group, consumers: Sequence[str]) -> list[str]:
    """Delete unused consumer names, never one that holds a message."""
    holders = {entry.holder for entry in group.pending}
    gone = [name for name in consumers if name not in holders]
    for name in gone:
        group.consumers.discard(name)
        topic.alive.pop(name, None)
    return gone


def trim(topic: Topic, group: Group) -> int:
    """Delete foreign entries: delivered, not pending, no message. Never by length."""
    unread = group.unread
    foreign = [
        one for one in group.stream if not one.is_ours and one not in unread and not one.holder
    ]
    for entry in foreign:
        group.drop(entry)
    topic.count("trimmed", len(foreign), group)
    return len(foreign)
