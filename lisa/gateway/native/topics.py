"""Topics: counts, options, pauses, groups."""

from __future__ import annotations

from dataclasses import fields
from datetime import timedelta
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.responses import Response

from lisa.admin import groups as admin_groups
from lisa.admin import topics as admin_topics
from lisa.admin.topics import GroupCounts
from lisa.admin.topics import TopicCounts as Counts
from lisa.core.clock import duration_ms
from lisa.core.errors import GroupRemoved
from lisa.core.keys import check_group
from lisa.core.options import TopicOptions
from lisa.core.retry_policy import RetryPolicy
from lisa.gateway.native.models import (
    DeclaredAnswer,
    GroupAnswer,
    GroupRequest,
    GroupsAnswer,
    NoFields,
    OptionsAnswer,
    OptionsRequest,
    PausedAnswer,
    RemovedAnswer,
    TopicAnswer,
    TopicCounts,
    TopicsAnswer,
    TopicsQuery,
)
from lisa.gateway.native.operations import Call, answer
from lisa.gateway.problems import Problem

__all__ = [
    "add_group",
    "counts_fields",
    "get",
    "get_options",
    "list_",
    "list_groups",
    "pause",
    "remove_group",
    "resume",
    "set_options",
]

COUNTERS = (
    "sent", "acked", "acked_late", "retried", "garbage", "requeued", "purged", "cancelled",
    "expired", "reclaimed", "released", "duplicate", "stale",
)  # fmt: skip

_UNITS_MS = (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1))


async def list_(call: Call[TopicsQuery, None]) -> Response:
    """The topics that the token sees, in order of name, with their counts."""
    query, store = call.query, call.hub.store
    names = [name for name in await store.drive(store.topics())
             if call.token.sees(name) and name > (query.cursor or "")]  # fmt: skip
    shown = names[: query.limit]
    found = await store.drive(admin_topics.counts(store, shown))
    topics = [TopicCounts(**counts_fields(one)) for one in found]
    return answer(
        TopicsAnswer(topics=topics, cursor=shown[-1] if len(names) > len(shown) else None)
    )


def counts_fields(counts: Counts) -> dict[str, Any]:
    """The fields of `TopicCounts`."""
    groups = [_group(one) for one in counts.groups]
    return {
        "topic": counts.topic, "paused": counts.paused, "waiting": counts.waiting,
        "ready": sum(one.ready for one in groups), "retry": sum(one.retry for one in groups),
        "in_flight": sum(one.in_flight for one in groups),
        "garbage": sum(one.garbage for one in groups),
        "next_due_ms": counts.next_due_ms, "groups": groups,
    }  # fmt: skip


def _group(one: GroupCounts) -> GroupAnswer:
    return msgspec.convert(one, GroupAnswer, from_attributes=True)


async def _known(call: Call[NoFields, Any]) -> Counts:
    store = call.hub.store
    if not await store.drive(admin_topics.exists(store, call.topic)):
        raise Problem(404, "unknown-topic", f"nothing is known of topic {call.topic!r}")
    return (await store.drive(admin_topics.counts(store, [call.topic])))[0]


async def get(call: Call[NoFields, None]) -> Response:
    """One topic: counts, counters and options."""
    counts = await _known(call)
    options = await call.hub.store.drive(call.hub.store.options(call.topic))
    counters = {name: counts.total(name) for name in COUNTERS}
    return answer(
        TopicAnswer(**counts_fields(counts), counters=counters, options=_options(options))
    )


async def get_options(call: Call[NoFields, None]) -> Response:
    """A topic's options; the defaults where nothing was set."""
    return await _answer_options(call)


async def set_options(call: Call[NoFields, OptionsRequest]) -> Response:
    """Set some options, and take some back."""
    store = call.hub.store
    given = {name: value for name in call.body.__struct_fields__
             if (value := getattr(call.body, name)) is not UNSET}  # fmt: skip
    values = {name: value for name, value in given.items() if value is not None}
    # Set first: this refuses what cannot be before anything is changed.
    if values:
        await store.drive(admin_topics.set_options(store, call.topic, values))
    if len(values) < len(given):
        unset = given.keys() - values.keys()
        await store.drive(admin_topics.unset_options(store, call.topic, unset))
    return await _answer_options(call)


async def _answer_options(call: Call[NoFields, Any]) -> Response:
    return answer(_options(await call.hub.store.drive(call.hub.store.options(call.topic))))


def _options(options: TopicOptions) -> OptionsAnswer:
    values = {one.name: _shown(getattr(options, one.name)) for one in fields(options)}
    return OptionsAnswer(**values)


def _shown(value: object) -> Any:
    if isinstance(value, timedelta):
        return _duration(duration_ms(value))
    if isinstance(value, RetryPolicy):
        jitter = f"~{value.jitter!r}" if value.jitter and value.delays_ms else ""
        return ",".join(map(_duration, value.delays_ms)) + jitter
    return "unlimited" if value is None else value


def _duration(ms: int) -> str:
    """A duration in the largest unit that holds it without a rest."""
    unit, length = next((unit, length) for unit, length in _UNITS_MS if ms % length == 0)
    return f"{ms // length}{unit}" if ms else "0s"


async def pause(call: Call[NoFields, None]) -> Response:
    """Stop promoting, reading and pulling; what is in flight finishes."""
    changed = await call.hub.store.drive(admin_topics.pause(call.hub.store, call.topic))
    return answer(PausedAnswer(paused=True, changed=changed))


async def resume(call: Call[NoFields, None]) -> Response:
    """Go on."""
    changed = await call.hub.store.drive(admin_topics.resume(call.hub.store, call.topic))
    return answer(PausedAnswer(paused=False, changed=changed))


async def list_groups(call: Call[NoFields, None]) -> Response:
    """The groups declared on a topic, with their counts."""
    counts = await _known(call)
    return answer(GroupsAnswer(groups=[_group(one) for one in counts.groups]))


async def add_group(call: Call[NoFields, GroupRequest]) -> Response:
    """Declare a group: it gets what is promoted from now on."""
    group = call.body.group
    is_new = await call.hub.store.drive(
        admin_groups.add(call.hub.store, call.topic, check_group(group))
    )
    return answer(DeclaredAnswer(group=group, new=is_new), 201 if is_new else 200)


async def remove_group(call: Call[NoFields, None]) -> Response:
    """Take a group away and settle what it owed."""
    group = check_group(call.path["group"])
    settled = await call.hub.store.drive(admin_groups.remove(call.hub.store, call.topic, group))
    if settled is None:
        raise GroupRemoved(f"group {group!r} is not declared on topic {call.topic!r}")
    return answer(RemovedAnswer(group=group, settled=settled))
