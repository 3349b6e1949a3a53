"""Models for topics: options, groups, counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType, defstruct

from lisa.core.model.option_types import (
    CountType,
    DurationType,
    FlagType,
    LateType,
    OptionType,
    PolicyType,
    RampType,
    WindowType,
)
from lisa.core.model.options import OPTIONS, Option
from lisa.gateway.api.models.base import Answer, DurationText, Limit, Name, Request

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
        [(name, _given(one), UNSET) for name, one in OPTIONS.items()],
        bases=(Request,),
    )
    _OptionsAnswer = defstruct(
        "_OptionsAnswer", [(name, _shown(one)) for name, one in OPTIONS.items()], bases=(Answer,)
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
        return [_with_unit(name, one) for one in value]
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
