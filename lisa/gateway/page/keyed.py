"""The page of a key: its live messages, its recent events, and changes of all its messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from starlette.responses import Response

from lisa.admin import journal as journal_flows
from lisa.admin import story
from lisa.admin.journal import Journal
from lisa.admin.limits import limits_of, set_limits
from lisa.admin.story import StoryEvent
from lisa.core.model.clock import parse_duration
from lisa.core.model.errors import ConfigError, InvalidMessage
from lisa.core.model.keys import check_key, keyed_id
from lisa.core.model.lanes import KeyLimits
from lisa.core.redis.flow import Flow
from lisa.core.store.inspection import State
from lisa.core.store.keyed import KeyFlows, KeyOutcome, KeyPage
from lisa.core.store.store import Store
from lisa.core.transitions.change import Cancelled, Rescheduled
from lisa.gateway.api.types import decode_cursor, encode_cursor
from lisa.gateway.page.messages import EVENTS_PER_LOOK, POSITION, STORY_S
from lisa.gateway.page.snapshot import LOOK_S
from lisa.gateway.page.topic import require_topic
from lisa.gateway.page.visits import FINAL, Done, FormAction, PageRequest, Verb

PER_PAGE = 100
MOST_EVENTS = 100
"""Events that the page shows, of those that it has found."""


class _Recent(NamedTuple):
    """The newest events of a key, the newest first, and how much of the journal was searched."""

    journal: Journal
    events: Sequence[StoryEvent] = ()
    searched: int = 0
    back_to_ms: int | None = None
    cursor: str | None = None


async def show(visit: PageRequest) -> Response:
    """The page of a key."""
    line = await require_topic(visit)
    topic = line.topic
    key = check_key(visit.request.path_params.get("key") or visit.query.get("key", ""))
    cursor = decode_cursor(visit.query.get("cursor"))
    groups = tuple(group.name for group in line.counts.groups)
    page = await visit.ask(LOOK_S, _page, topic, key, cursor)
    snapshot = await visit.snapshots.current()
    # With further pages, the counts would be those of this page only.
    is_whole = page.cursor is None and cursor is None
    numbers = Counter(message.state for message in page.messages if is_whole)
    return visit.page(
        "key.html",
        topic=topic,
        name=key,
        messages=page.messages,
        total=page.total,
        states=[(state, numbers[state]) for state in State if numbers[state]],
        limits=await visit.ask(LOOK_S, _limits, topic, key, groups),
        groups=groups,
        several=any(len(message.groups) > 1 for message in page.messages),
        cursor=encode_cursor(page.cursor),
        recent=await _recent(visit, topic, key),
        now_ms=snapshot.at_ms,
    )


def _page(store: Store, topic: str, key: str, cursor: str | None) -> Flow[KeyPage]:
    return KeyFlows(store, topic, key, store.run).page(cursor, PER_PAGE)


def _limits(
    store: Store, topic: str, key: str, groups: Sequence[str]
) -> Flow[list[tuple[str | None, str]]]:
    """The limits that the key has in place of its topic's: for all groups, and for single ones."""
    found: list[tuple[str | None, str]] = []
    for group in (None, *groups):
        given = yield from limits_of(store, topic, key, group)
        parts = {"rate": given.rate, "concurrency": given.concurrency, "weight": given.weight}
        if text := ", ".join(f"{name} {value}" for name, value in parts.items() if value):
            found.append((group, text))
    return found


async def _recent(visit: PageRequest, topic: str, key: str) -> _Recent:
    ask, before = visit.snapshots.ask, visit.query.get("before")
    journal = await ask(STORY_S, journal_flows.journal, topic)
    if before is not None and not POSITION.fullmatch(before):
        raise ConfigError(f"before={before!r} is not a journal position; omit it")
    if not journal.events:
        return _Recent(journal)
    read = await ask(
        STORY_S, story.read_back, topic, keyed_id(key, ""), before, most=EVENTS_PER_LOOK
    )
    newest = read.events[: -MOST_EVENTS - 1 : -1]
    if len(newest) < len(read.events):  # continue after the last event that is shown
        oldest = newest[-1]
        return _Recent(journal, newest, read.looked, oldest.at_ms, _behind(before, oldest.entry))
    return _Recent(journal, newest, read.looked, read.back_to_ms, read.cursor)


def _behind(before: str | None, entry: str) -> str:
    """The position behind an entry, of the shard that `before` names."""
    shard, slash, _ = (before or "").rpartition("/")
    return f"{shard}{slash}{entry}"


async def _cancel(action: FormAction) -> Done:
    outcomes = await action.visit.gateway.sender.cancel_key(action.topic, action.message_key())
    return _done("cancel_key", outcomes)


async def _fire(action: FormAction) -> Done:
    outcomes = await action.visit.gateway.sender.fire_key(action.topic, action.message_key())
    return _done("fire_key", outcomes)


async def _reschedule(action: FormAction) -> Done:
    delay, shift = action.text("delay"), action.text("shift")
    if bool(delay) is bool(shift):
        raise InvalidMessage("give either a new due time or by how much waiting messages move")
    outcomes = await action.visit.gateway.sender.reschedule_key(
        action.topic,
        action.message_key(),
        delay=parse_duration(delay) if delay else None,
        shift=shift or None,
    )
    return _done("reschedule_key", outcomes)


async def _set_limits(action: FormAction) -> Done:
    given = KeyLimits.parse(
        action.text("rate") or None, _number(action, "concurrency"), _number(action, "weight")
    )
    if given == KeyLimits():
        raise InvalidMessage("give a rate, a concurrency or a weight; or remove the limits")
    return await _limit(action, given)


async def _remove_limits(action: FormAction) -> Done:
    return await _limit(action, KeyLimits())


async def _limit(action: FormAction, given: KeyLimits) -> Done:
    key, group = action.message_key(), action.text("group") or None
    await action.visit.gateway.ask(set_limits, action.topic, key, given, group)
    return Done(action.verb)


def _number(action: FormAction, name: str) -> int | str | None:
    written = action.text(name)
    return int(written) if written.isdecimal() else written or None


def _done(did: str, outcomes: Sequence[KeyOutcome]) -> Done:
    changed = (Cancelled.CANCELLED, Rescheduled.RESCHEDULED)
    return Done(did, sum(each.outcome in changed for each in outcomes), of=len(outcomes))


async def _asks(action: FormAction) -> tuple[str, int]:
    key = action.message_key()
    count = await action.visit.gateway.sender.count_key(action.topic, key)
    return f"{count:,} {'message' if count == 1 else 'messages'} of {key}", count


VERBS = {
    "cancel_key": Verb("cancelKey", _cancel, "Cancel", FINAL, _asks),
    "fire_key": Verb("fireKey", _fire),
    "reschedule_key": Verb("rescheduleKey", _reschedule),
    "set_limits": Verb("setLimits", _set_limits),
    "remove_limits": Verb("removeLimits", _remove_limits),
}
