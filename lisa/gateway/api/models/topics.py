"""Models for topics: options, groups, counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType, defstruct

from lisa.core.model.option_types import CountType, DurationType, FlagType, PolicyType
from lisa.core.model.options import OPTIONS, Option
from lisa.gateway.api.models.base import Answer, Limit, Name, Request

_TEXT_OR_LIST = list[str] | str
_GIVEN = {DurationType: str, PolicyType: _TEXT_OR_LIST, CountType: int | str, FlagType: bool}
_SHOWN = {DurationType: str, PolicyType: str, CountType: int, FlagType: bool}


def _given(option: Option) -> Any:
    kind = _GIVEN[type(option.kind)] | UnsetType | None
    return Annotated[kind, Meta(description=option.text)]


def _shown(option: Option) -> Any:
    kind = _SHOWN[type(option.kind)]
    return kind | Literal["unlimited"] if option.default is None else kind


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

    Durations are text with a unit; retry delays are text such as `0,0,2m`; `capacity` may be
    `unlimited`.
    """


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
