"""What a manager is told: its topics, their groups and options, and when its services run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Self

from lisa.core import options as topic_options
from lisa.core.errors import ConfigError
from lisa.core.keys import check_group, check_topic
from lisa.core.transitions.promote import LARGEST_BATCH
from lisa.core.transitions.reclaim import LARGEST_WINDOW

if TYPE_CHECKING:
    from lisa.core.settings import ManagerSettings

__all__ = ["DEFAULT_GROUP", "Plan", "Schedules", "TopicPlan"]

DEFAULT_GROUP = "lisa"


@dataclass(frozen=True, kw_only=True, slots=True)
class TopicPlan:
    """One topic: the groups to declare, and its options as they are stored.

    Options of None declare nothing; an empty mapping takes back what was declared earlier.
    """

    groups: tuple[str, ...] = ()
    options: Mapping[str, str] | None = None
    batch: int = LARGEST_BATCH


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedules:
    """When the services run at the latest: cron expressions, or intervals."""

    move: str | timedelta = "0/1 * * * * ?"
    clean: str | timedelta = "0 */1 * * * ?"
    process_pending: str | timedelta = "0/5 * * * * ?"
    sweep: str | timedelta = "0/30 * * * * ?"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All of it. `window` is how many pending entries one reclaim call looks at."""

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
    ) -> Self:
        """From a manager's arguments. Raises ConfigError, InvalidMessage."""
        plans: dict[str, TopicPlan] = {}
        if isinstance(topics, str):
            raise ConfigError(f"topics={topics!r} is one text; write [{topics!r}]")
        given = topics if isinstance(topics, Mapping) else dict.fromkeys(topics)
        for topic in [*given, *groups]:
            plans[check_topic(topic)] = _topic_plan(given.get(topic), groups.get(topic, ()))
        check_group(default_group)
        return cls(topics=plans, default_group=default_group, schedules=schedules)

    @classmethod
    def from_settings(cls, settings: ManagerSettings) -> Self:
        """From a configuration."""
        options, batches = settings.topic_options(), settings.moving_sizes()
        server = settings.manager_server
        return cls(
            topics={
                topic: TopicPlan(
                    groups=groups,
                    options=topic_options.encode(options.get(topic, {})),
                    batch=batches.get(topic, LARGEST_BATCH),
                )
                for topic, groups in settings.topics().items()
            },
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
        """The groups to declare for consumers that wait for one."""
        plan = self.topics.get(topic)
        return plan.groups if plan and plan.groups else (self.default_group,)

    def batch(self, topic: str) -> int:
        """How many messages one promote call may move."""
        plan = self.topics.get(topic)
        return plan.batch if plan else LARGEST_BATCH


def _topic_plan(given: Mapping[str, object] | None, groups: Iterable[str]) -> TopicPlan:
    """`given` may name `group` or `groups` among the options."""
    if isinstance(groups, str):
        raise ConfigError(f"groups of a topic are a list of names, not {groups!r}")
    names: list[object] = list(groups)
    if given is None:
        return TopicPlan(groups=_checked(names))
    options = dict(given)
    named = options.pop("groups", ())
    single = options.pop("group", None)
    several = named if isinstance(named, (list, tuple, set, frozenset)) else [named]
    names += [*several, *([single] if single is not None else [])]
    encoded = topic_options.encode(options)
    if "paused" in encoded:
        raise ConfigError("paused is set on the topic (`lisa topic pause`), never declared")
    return TopicPlan(groups=_checked(names), options=encoded)


def _checked(names: Iterable[object]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(check_group(name) for name in names))  # type: ignore[arg-type]
