"""A manager's configuration: topics with their groups and options, and service schedules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

from lisa.core.model import options as topic_options
from lisa.core.model.errors import ConfigError, InvalidMessage
from lisa.core.model.keys import DEFAULT_GROUP, check_group, check_topic
from lisa.core.model.lanes import KeyLimits, limits_field, shown_limits_field
from lisa.core.model.options import LARGEST_BATCH, LARGEST_WINDOW, OF_GROUP

if TYPE_CHECKING:
    from lisa.core.model.recurring.definition import ScheduleDefinition
    from lisa.core.settings import ManagerSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class TopicPlan:
    """The groups and the encoded options to declare for one topic.

    key_limits: encoded limits of single keys, by `limits_field`. `options=None` leaves the topic's
    options alone; an empty mapping removes options that an earlier configuration declared. `batch`
    is the most messages that one promote call moves. `schedules` are recurring messages by name.
    """

    groups: tuple[str, ...] = ()
    options: Mapping[str, str] | None = None
    key_limits: Mapping[str, str] = field(default_factory=dict)
    batch: int = LARGEST_BATCH
    schedules: Mapping[str, ScheduleDefinition] = field(default_factory=dict)

    def scheduling(self, name: str, definition: ScheduleDefinition) -> TopicPlan:
        """The same plan with one more schedule."""
        return replace(self, schedules={**self.schedules, name: definition})


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedules:
    """Maximum interval between runs of each service: a cron expression or a timedelta."""

    move: str | timedelta = "0/1 * * * * ?"
    clean: str | timedelta = "0 */1 * * * ?"
    process_pending: str | timedelta = "0/5 * * * * ?"
    sweep: str | timedelta = "0/30 * * * * ?"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A manager's whole configuration.

    `window` is the number of pending entries that one reclaim call reads.
    """

    topics: Mapping[str, TopicPlan] = field(default_factory=dict)
    default_group: str = DEFAULT_GROUP
    window: int = LARGEST_WINDOW
    schedules: Schedules = field(default_factory=Schedules)

    @classmethod
    def of(
        cls,
        topics: Mapping[str, Mapping[str, object]] | Iterable[str],
        groups: Mapping[str, Iterable[str]],
        *,
        default_group: str,
        schedules: Schedules,
        recurring: Iterable[Mapping[str, Any]] = (),
    ) -> Self:
        """A plan from the arguments of `Manager`; `recurring` is its `schedules`.

        Raises ConfigError if an option is invalid, and InvalidMessage if a name or a schedule is.
        """
        plans: dict[str, TopicPlan] = {}
        if isinstance(topics, str):
            raise ConfigError(f"topics={topics!r} is a string; pass a list: [{topics!r}]")
        given = topics if isinstance(topics, Mapping) else dict.fromkeys(topics)
        for topic in [*given, *groups]:
            plans[check_topic(topic)] = _topic_plan(given.get(topic), groups.get(topic, ()))
        default_group = check_group(default_group)
        for schedule in recurring:
            _add_schedule(plans, schedule)
        return cls(topics=plans, default_group=default_group, schedules=schedules)

    @classmethod
    def from_settings(cls, settings: ManagerSettings) -> Self:
        """A plan from a configuration file."""
        options, batches = settings.topic_options(), settings.moving_sizes()
        limits = settings.key_limits()
        server = settings.manager_server
        topics = {
            topic: TopicPlan(
                groups=groups,
                options=topic_options.encode(options.get(topic, {})),
                key_limits={key: given.encode() for key, given in limits[topic].items()},
                batch=batches.get(topic, LARGEST_BATCH),
            )
            for topic, groups in settings.topics().items()
        }
        for schedule in settings.schedules:
            topics[schedule.topic] = topics.get(schedule.topic, TopicPlan()).scheduling(
                schedule.name, schedule.definition()
            )
        return cls(
            topics=topics,
            default_group=settings.default_group,
            window=server.count,
            schedules=Schedules(
                move=server.crontab_move_to_ready_queue,
                clean=server.crontab_clean_stream,
                process_pending=server.crontab_process_pending_message,
                sweep=server.crontab_sweep,
            ),
        )

    def groups_for(self, topic: str) -> tuple[str, ...]:
        """The groups to declare when consumers wait for a group on the topic."""
        plan = self.topics.get(topic)
        return plan.groups if plan and plan.groups else (self.default_group,)


def _topic_plan(given: Mapping[str, object] | None, groups: Iterable[str]) -> TopicPlan:
    """A topic's plan; the options `group` and `groups` in `given` name groups."""
    if isinstance(groups, str):
        raise ConfigError(f"the groups of a topic must be a list of names, not {groups!r}")
    names: list[object] = list(groups)
    if given is None:
        return TopicPlan(groups=_checked(names))
    options = dict(given)
    named = options.pop("groups", ())
    single = options.pop("group", None)
    several = named if isinstance(named, (list, tuple, set, frozenset)) else [named]
    names += [*several, *([single] if single is not None else [])]
    limits = _key_limits(options)
    encoded = topic_options.encode(options)
    if "paused" in encoded:
        raise ConfigError("paused cannot be declared; use `lisa topic pause`")
    return TopicPlan(groups=_checked(names), options=encoded, key_limits=limits)


def _key_limits(options: dict[str, object]) -> dict[str, str]:
    """Take `key_limits` and `key_limits@group` out of the options. Raises ConfigError."""
    found: dict[str, str] = {}
    for name in [*options]:
        option, _, group = name.partition(OF_GROUP)
        if option.replace("-", "_") == "key_limits":
            given = options.pop(name)
            if not isinstance(given, Mapping):
                raise ConfigError(f"{name} must be a mapping of keys to limits, not {given!r}")
            try:
                limits = {limits_field(key, group): KeyLimits.of(given[key]) for key in given}
            except InvalidMessage as error:
                raise ConfigError(f"{name}: {error}") from None
            found |= {field: limit.encode() for field, limit in limits.items()}
    return found


def _add_schedule(plans: dict[str, TopicPlan], given: Mapping[str, Any]) -> None:
    """Add a schedule from the arguments of `Producer.schedule`. Raises LisaError, TypeError."""
    from lisa.core.model.recurring.definition import (
        check_name,
        define,  # late: few managers declare schedules
    )

    options = dict(given)
    if missing := {"name", "topic"} - options.keys():
        raise ConfigError(f"a schedule needs a {max(missing)}: {dict(given)!r}")
    name, topic = check_name(options.pop("name")), check_topic(options.pop("topic"))
    plan = plans.get(topic, TopicPlan())
    if name in plan.schedules:
        raise ConfigError(f"schedule {name!r} of topic {topic!r} is listed twice")
    plans[topic] = plan.scheduling(name, define(options.pop("body", None), options))  # type: ignore[arg-type]


def _checked(names: Iterable[object]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(check_group(name) for name in names))  # type: ignore[arg-type]


def differences(old: Plan, new: Plan) -> list[str]:
    """The differences between two plans in their topics and the default group, as text."""
    changes: list[str] = []
    if old.default_group != new.default_group:
        changes.append(f"default-group {old.default_group} -> {new.default_group}")
    for topic in sorted({*old.topics, *new.topics}):
        if topic not in new.topics:
            changes.append(f"topic {topic}: no longer configured; its messages and keys stay")
            continue
        if topic not in old.topics:
            changes.append(f"topic {topic}: new")
        found = _topic_differences(old.topics.get(topic, TopicPlan()), new.topics[topic])
        changes += [f"topic {topic}: {difference}" for difference in found]
    return changes


def _topic_differences(old: TopicPlan, new: TopicPlan) -> Iterator[str]:
    was, now = old.options or {}, new.options or {}
    for name in sorted({*was, *now}):
        if was.get(name) != now.get(name):
            yield f"{name} {was.get(name, 'default')} -> {now.get(name, 'default')}"
    for key in sorted({*old.key_limits, *new.key_limits}):
        if old.key_limits.get(key) != new.key_limits.get(key):
            yield f"limits of {shown_limits_field(key)} changed"
    for name in new.groups:
        if name not in old.groups:
            yield f"group {name} added"
    for name in old.groups:
        if name not in new.groups:
            yield f"group {name} no longer configured; use `lisa topic group remove` to remove it"
    yield from _schedule_differences(old.schedules, new.schedules)
    if old.batch != new.batch:
        yield f"moving-size {old.batch} -> {new.batch}"


def _schedule_differences(
    old: Mapping[str, ScheduleDefinition], new: Mapping[str, ScheduleDefinition]
) -> Iterator[str]:
    for name in sorted({*old, *new}):
        if name not in new:
            yield f"schedule {name} no longer configured"
        elif name not in old:
            yield f"schedule {name} added"
        elif old[name] != new[name]:
            yield f"schedule {name} changed"
