"""Operations on topics: counts, options, pausing, groups.

All clients that watch a topic share one query of its counts per second.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType, convert, defstruct
from msgspec.structs import asdict
from starlette import types
from starlette.responses import StreamingResponse

from lisa.admin import groups as admin_groups
from lisa.admin import live
from lisa.admin import topics as admin_topics
from lisa.admin.topics import TopicState as Counts
from lisa.core.model.errors import GroupRemoved, LisaError
from lisa.core.model.keys import check_group
from lisa.core.model.options import (
    OPTIONS,
    ChoiceType,
    CountType,
    DurationType,
    FlagType,
    LateType,
    Option,
    OptionType,
    PolicyType,
    RampType,
    RateType,
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
    RateType: (str, str),
    ChoiceType: (str, str),
    WindowType: (str, str),
}
"""The types of an option's values in requests and in responses."""

log = logging.getLogger("lisa.gateway")

LOOK_EVERY_S = 1.0
HEARTBEAT_S = 10.0

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


class OptionsQuery(Request):
    """Whose options are meant."""

    group: Annotated[Name | None, Meta(description="The group whose options are meant.")] = None


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
    parked: int
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
    parked: int
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
        held += counts.parked
        raise invalid(
            f"to delete topic {call.topic!r} with {held} messages, repeat the request with "
            f"confirm={call.topic}"
        )
    done = await call.gateway.ask(admin_groups.delete, call.topic)
    await reload_targets(call.gateway, call.topic)
    return DeletedAnswer(topic=call.topic, cancelled=done.cancelled, purged=done.purged)


@operations.add("GET", f"{TOPIC}/options", "All options, including defaults.", problems=NO_TOPIC)
async def get_options(call: Call[OptionsQuery, None]) -> OptionsAnswer:
    """Get a topic's options.

    With `group`, those that apply to the group.
    """
    await require_topic(call.gateway, call.topic)
    return await _options(call, call.query.group)


@operations.add(
    "PATCH",
    f"{TOPIC}/options",
    "All options after the change.",
    scope=Scope.OPERATE,
    problems={404: "The topic has no such group."},
)
async def set_options(call: Call[OptionsQuery, OptionsRequest]) -> Reply[OptionsAnswer]:
    """Set a topic's options.

    With `group`, sets the group's own values of options of lanes, which replace those of the topic;
    null resets them.
    """
    group = call.query.group
    given = call.body.values()
    values = {name: value for name, value in given.items() if value is not None}
    # Set first, since this rejects invalid values before any change.
    if values:
        await call.gateway.ask(admin_topics.set_options, call.topic, values, group)
    notice = warning(call.topic, encode(values))
    if len(values) < len(given):
        unset = given.keys() - values.keys()
        await call.gateway.ask(admin_topics.unset_options, call.topic, unset, group)
    response = answer(await _options(call, group))
    if notice is not None:
        log.warning(notice)
        response.headers["Warning"] = f'299 lisa "{notice}"'
    return response


async def _options(call: Call[Any, Any], group: str | None = None) -> OptionsAnswer:
    options = await call.gateway.store.drive(call.gateway.store.options(call.topic, group))
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


@operations.add(
    "GET",
    f"{TOPIC}/events",
    "A stream that ends when the gateway stops.",
    media_type="text/event-stream",
    problems=NO_TOPIC,
)
async def watch_topic(call: Call[NoFields, None]) -> Reply[Activity]:
    """Watch a topic.

    Server-sent events named `counts` with an Activity as data: the first immediately, then at most
    one per second, when something changes.
    """
    await require_topic(call.gateway, call.topic)
    return _Stream(call.gateway, call.topic)


_feeds: dict[tuple[GatewayContext, str], _Feed] = {}


def _join(gateway: GatewayContext, topic: str) -> _Feed:
    """The feed of a topic, started for its first client."""
    feed = _feeds.get((gateway, topic))
    if feed is None or feed.task.done():
        feed = _feeds[gateway, topic] = _Feed(gateway, topic)
    feed.watchers += 1
    return feed


def _leave(feed: _Feed) -> None:
    """Remove one client; the feed ends with its last client."""
    feed.watchers -= 1
    if not feed.watchers:
        feed.task.cancel()
        if _feeds.get((feed.gateway, feed.topic)) is feed:
            del _feeds[feed.gateway, feed.topic]


class _Feed:
    """Reads one topic's counts; `event` is the latest event and `number` its sequence number."""

    def __init__(self, gateway: GatewayContext, topic: str) -> None:
        self.topic = topic
        self.watchers = 0
        self.number = 0
        self.event = b""
        self.gateway = gateway
        self._news = asyncio.Event()
        self.task = gateway.run_task(self._run(), f"the events of {topic}")
        self.task.add_done_callback(lambda _: self._news.set())

    async def news(self, after: int) -> None:
        """Wait for an event after number `after`, a heartbeat interval, or the end of the feed."""
        if self.number <= after and not self.task.done():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), HEARTBEAT_S)

    async def _run(self) -> None:
        before: live.TopicsSnapshot | None = None
        shown: dict[str, Any] = {}
        while not self.gateway.broker.is_closing:
            with suppress(LisaError):  # an unreachable server is tried again
                now = await self.gateway.ask(live.look, [self.topic])
                fields = _fields(before or now, now)
                before = now
                if fields != shown:
                    shown = fields
                    self._publish(Activity(**fields, at_ms=now.at_us // 1000))
            await asyncio.sleep(LOOK_EVERY_S)

    def _publish(self, activity: Activity) -> None:
        self.number += 1
        self.event = b"event: counts\ndata: " + msgspec.json.encode(activity) + b"\n\n"
        self._news.set()
        self._news = asyncio.Event()


def _fields(before: live.TopicsSnapshot, now: live.TopicsSnapshot) -> dict[str, Any]:
    ((topic, interval),) = live.activity(before, now).items()
    return {
        **asdict(convert(now.topics[topic], TopicCounts, from_attributes=True)),
        "in_per_s": round(interval.per_s("sent"), 1),
        "out_per_s": round(interval.per_s("acked"), 1),
        "retried_per_s": round(interval.per_s("retried"), 1),
        "garbage_per_s": round(interval.per_s("garbage"), 1),
        "lateness_p50_ms": interval.lateness_ms(0.5),
        "lateness_p99_ms": interval.lateness_ms(0.99),
    }


class _Stream(StreamingResponse, Reply[Activity]):
    """A streaming response; a slow client skips events instead of buffering them."""

    def __init__(self, gateway: GatewayContext, topic: str) -> None:
        super().__init__(self._events(), media_type="text/event-stream")
        self._gateway = gateway
        self._topic = topic
        self._feed: _Feed

    async def __call__(self, scope: types.Scope, receive: types.Receive, send: types.Send) -> None:
        """Send events until the client disconnects or the gateway stops."""
        with self._gateway.shares.waiting(self._gateway.shares.streams):
            self._feed = _join(self._gateway, self._topic)
            try:
                await super().__call__(scope, receive, send)
            finally:
                _leave(self._feed)

    async def _events(self) -> AsyncIterator[bytes]:
        yield b"retry: 2000\n\n"
        sent = 0
        while not self._feed.task.done():
            await self._feed.news(sent)
            if self._feed.number > sent:
                sent = self._feed.number
                yield self._feed.event
            else:
                yield b": still here\n\n"
