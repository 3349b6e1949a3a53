"""Operations on topics: counts, options, pausing, groups."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType, convert, defstruct
from msgspec.structs import asdict

from lisa.admin import groups as admin_groups
from lisa.admin import topics as admin_topics
from lisa.admin.topics import TopicState as Counts
from lisa.core.model.errors import GroupRemoved
from lisa.core.model.keys import check_group
from lisa.core.model.options import (
    OPTIONS,
    CountType,
    DurationType,
    FlagType,
    LateType,
    Option,
    OptionType,
    PolicyType,
    RampType,
    WindowType,
    encode,
    warning,
)
from lisa.gateway.access import Scope
from lisa.gateway.api.operations import NO_GROUP, NO_TOPIC, TOPIC, Call, Operations, Reply, answer
from lisa.gateway.api.types import Answer, DurationText, Limit, Name, NoFields, Request, invalid
from lisa.gateway.context import GatewayContext
from lisa.gateway.problems import ErrorResponse
from lisa.gateway.push import reload_targets

_GIVEN_AND_SHOWN: dict[type[OptionType], tuple[Any, Any]] = {
    DurationType: (int | DurationText, str),
    PolicyType: (list[int | str] | str, str),
    CountType: (int | str, int),
    FlagType: (bool, bool),
    LateType: (dict[str, str] | str, str),
    RampType: (str, str),
    WindowType: (str, str),
}
"""The types of an option's values in requests and in responses."""

log = logging.getLogger("lisa.gateway")

COUNTERS = (
    "sent",
    "acked",
    "acked_late",
    "retried",
    "garbage",
    "requeued",
    "purged",
    "cancelled",
    "expired",
    "skipped",
    "reclaimed",
    "released",
    "duplicate",
    "stale",
)


def _given(option: Option) -> Any:
    given, _ = _GIVEN_AND_SHOWN[type(option.kind)]
    return Annotated[given | UnsetType | None, Meta(description=option.text)]


def _shown(option: Option) -> Any:
    _, shown = _GIVEN_AND_SHOWN[type(option.kind)]
    return shown | Literal["unlimited"] if option.default is None and shown is int else shown


if TYPE_CHECKING:
    _OptionsRequest = Request
    _OptionsAnswer = Answer
else:
    _OptionsRequest = defstruct(
        "_OptionsRequest",
        [(name, _given(option), UNSET) for name, option in OPTIONS.items()],
        bases=(Request,),
    )
    _OptionsAnswer = defstruct(
        "_OptionsAnswer",
        [(name, _shown(option)) for name, option in OPTIONS.items()],
        bases=(Answer,),
    )


class OptionsRequest(_OptionsRequest):
    """Options to set. Null resets an option to its configured value, or else to its default.

    A duration without a unit is in milliseconds.

    Retry delays are a list of durations, or text such as `0,0,2m`; `capacity` may be `unlimited`.
    """

    def values(self) -> dict[str, object]:
        """The given options in the form that `admin.topics` takes; None for null."""
        given = {name: getattr(self, name) for name in self.__struct_fields__}
        return {
            name: None if value is None else _with_unit(name, value)
            for name, value in given.items()
            if value is not UNSET
        }


def _with_unit(name: str, value: Any) -> object:
    if isinstance(value, list):
        return [_with_unit(name, item) for item in value]
    is_duration = isinstance(OPTIONS[name].kind, (DurationType, PolicyType))
    return f"{value}ms" if is_duration and isinstance(value, int) else value


class OptionsAnswer(_OptionsAnswer):
    """All options, in the format accepted for setting them."""


class PausedAnswer(Answer):
    """Whether the topic is paused, and whether this call changed that."""

    paused: bool
    changed: bool


class GroupAnswer(Answer):
    """The counts of one group."""

    name: str
    ready: int
    in_flight: int
    retry: int
    garbage: int
    next_retry_ms: int | None


class GroupsAnswer(Answer):
    """A topic's groups."""

    groups: list[GroupAnswer]


class GroupRequest(Request):
    """A group to declare."""

    group: Name


class DeclaredAnswer(Answer):
    """The group is declared; `new` is false if it existed before."""

    group: str
    new: bool


class RemovedAnswer(Answer):
    """The group was removed; `settled` messages were settled with it."""

    group: str
    settled: int


class TopicCounts(Answer):
    """A topic's counts, summed over its groups."""

    topic: str
    paused: bool
    waiting: int
    ready: int
    in_flight: int
    retry: int
    garbage: int
    next_due_ms: int | None
    groups: list[GroupAnswer]


class TopicAnswer(TopicCounts):
    """A topic's counts and options, and its counters since creation, by name."""

    counters: dict[str, int]
    options: OptionsAnswer


class DeleteQuery(Request):
    """Confirms that a topic is to be deleted."""

    confirm: Annotated[
        Name | None, Meta(description="The name of the topic, once more. Required.")
    ] = None


class DeletedAnswer(Answer):
    """The topic is deleted, and with it its waiting messages and those that groups still owed."""

    topic: str
    cancelled: int
    purged: int


class TopicsQuery(Request):
    """Paging of the topic list."""

    cursor: Annotated[str, Meta(max_length=256)] | None = None
    limit: Limit = 100


class TopicsAnswer(Answer):
    """A page of topics sorted by name; `cursor` is null on the last page."""

    topics: list[TopicCounts]
    cursor: str | None


class Activity(TopicCounts):
    """One event of a topic's stream: counts, and rates since the previous read."""

    at_ms: int
    in_per_s: float
    out_per_s: float
    retried_per_s: float
    garbage_per_s: float
    lateness_p50_ms: float | None
    lateness_p99_ms: float | None


operations = Operations("Topics")


@operations.add("GET", "/v1/topics", "A page of the topics that the token allows.")
async def list_topics(call: Call[TopicsQuery, None]) -> TopicsAnswer:
    """List topics."""
    query, store = call.query, call.gateway.store
    names = [
        name
        for name in await store.drive(store.topics())
        if call.token.sees(name) and name > (query.cursor or "")
    ]
    shown = names[: query.limit]
    found = await call.gateway.ask(admin_topics.counts, shown)
    topics = convert(found, list[TopicCounts], from_attributes=True)
    return TopicsAnswer(topics=topics, cursor=shown[-1] if len(names) > len(shown) else None)


async def require_topic(gateway: GatewayContext, topic: str) -> None:
    """Raise ErrorResponse (404) for an unknown topic. Operations that find nothing call this."""
    if not await gateway.ask(admin_topics.exists, topic):
        raise ErrorResponse(404, "unknown-topic", f"topic {topic!r} is unknown")


async def _known(call: Call[Any, Any]) -> Counts:
    await require_topic(call.gateway, call.topic)
    return (await call.gateway.ask(admin_topics.counts, [call.topic]))[0]


@operations.add("GET", TOPIC, "The topic's counts, counters and options.", problems=NO_TOPIC)
async def get_topic(call: Call[NoFields, None]) -> TopicAnswer:
    """Get a topic."""
    counts = await _known(call)
    return TopicAnswer(
        **asdict(convert(counts, TopicCounts, from_attributes=True)),
        counters={name: counts.total(name) for name in COUNTERS},
        options=await _options(call),
    )


@operations.add(
    "DELETE",
    TOPIC,
    "The topic is deleted.",
    scope=Scope.OPERATE,
    problems={
        **NO_TOPIC,
        409: "The topic has running consumers, unread journal events or several shards, or got "
        "messages meanwhile. Messages and groups may be gone already; repeat the request.",
    },
)
async def delete_topic(call: Call[DeleteQuery, None]) -> DeletedAnswer:
    """Delete a topic.

    Deletes its messages, groups, options, counters and journal. Stop its producers and consumers
    first. A topic in a manager's configuration comes back without messages. Topic lists show the
    topic for about a minute.
    """
    counts = await _known(call)
    if call.query.confirm != call.topic:
        held = counts.waiting + counts.ready + counts.in_flight + counts.retry + counts.garbage
        raise invalid(
            f"to delete topic {call.topic!r} with {held} messages, repeat the request with "
            f"confirm={call.topic}"
        )
    done = await call.gateway.ask(admin_groups.delete, call.topic)
    await reload_targets(call.gateway, call.topic)
    return DeletedAnswer(topic=call.topic, cancelled=done.cancelled, purged=done.purged)


@operations.add("GET", f"{TOPIC}/options", "All options, including defaults.", problems=NO_TOPIC)
async def get_options(call: Call[NoFields, None]) -> OptionsAnswer:
    """Get a topic's options."""
    await require_topic(call.gateway, call.topic)
    return await _options(call)


@operations.add("PATCH", f"{TOPIC}/options", "All options after the change.", scope=Scope.OPERATE)
async def set_options(call: Call[NoFields, OptionsRequest]) -> Reply[OptionsAnswer]:
    """Set a topic's options."""
    given = call.body.values()
    values = {name: value for name, value in given.items() if value is not None}
    # Set first, since this rejects invalid values before any change.
    if values:
        await call.gateway.ask(admin_topics.set_options, call.topic, values)
    notice = warning(call.topic, encode(values))
    if len(values) < len(given):
        unset = given.keys() - values.keys()
        await call.gateway.ask(admin_topics.unset_options, call.topic, unset)
    response = answer(await _options(call))
    if notice is not None:
        log.warning(notice)
        response.headers["Warning"] = f'299 lisa "{notice}"'
    return response


async def _options(call: Call[NoFields, Any]) -> OptionsAnswer:
    options = await call.gateway.store.drive(call.gateway.store.options(call.topic))
    values = {name: option.kind.plain(getattr(options, name)) for name, option in OPTIONS.items()}
    return OptionsAnswer(**values)


@operations.add(
    "POST", f"{TOPIC}/pause", "The topic is paused.", scope=Scope.OPERATE, problems=NO_TOPIC
)
async def pause_topic(call: Call[NoFields, None]) -> PausedAnswer:
    """Pause a topic.

    Stops promotion and delivery. Messages in flight can still be settled.
    """
    await require_topic(call.gateway, call.topic)
    changed = await call.gateway.ask(admin_topics.pause, call.topic)
    return PausedAnswer(paused=True, changed=changed)


@operations.add(
    "POST", f"{TOPIC}/resume", "The topic is not paused.", scope=Scope.OPERATE, problems=NO_TOPIC
)
async def resume_topic(call: Call[NoFields, None]) -> PausedAnswer:
    """Resume a topic."""
    await require_topic(call.gateway, call.topic)
    changed = await call.gateway.ask(admin_topics.resume, call.topic)
    return PausedAnswer(paused=False, changed=changed)


@operations.add("GET", f"{TOPIC}/groups", "The groups and their counts.", problems=NO_TOPIC)
async def list_groups(call: Call[NoFields, None]) -> GroupsAnswer:
    """List a topic's groups."""
    return convert(await _known(call), GroupsAnswer, from_attributes=True)


@operations.add(
    "POST",
    f"{TOPIC}/groups",
    {201: "The group is new.", 200: "The group existed before."},
    scope=Scope.OPERATE,
)
async def add_group(call: Call[NoFields, GroupRequest]) -> Reply[DeclaredAnswer]:
    """Declare a group.

    The group receives messages promoted from now on.
    """
    group = call.body.group
    is_new = await call.gateway.ask(admin_groups.add, call.topic, check_group(group))
    return answer(DeclaredAnswer(group=group, new=is_new), 201 if is_new else 200)


@operations.add(
    "DELETE",
    f"{TOPIC}/groups/{{group}}",
    "The group is removed.",
    scope=Scope.OPERATE,
    problems=NO_GROUP,
)
async def remove_group(call: Call[NoFields, None]) -> RemovedAnswer:
    """Remove a group.

    Settles the group's outstanding messages; other groups are unaffected.
    """
    group = check_group(call.path["group"])
    settled = await call.gateway.ask(admin_groups.remove, call.topic, group)
    if settled is None:
        await require_topic(call.gateway, call.topic)
        raise GroupRemoved(f"group {group!r} is not declared on topic {call.topic!r}")
    return RemovedAnswer(group=group, settled=settled)
