"""The section `schedules` of the manager: recurring messages."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from lisa.core.model.keys import check_topic
from lisa.core.model.recurring.define import ScheduleOptions, define
from lisa.core.model.recurring.definition import ScheduleDefinition, check_name
from lisa.core.settings.fields import Duration, LateField, Policy
from lisa.core.settings.sections import Section


class ScheduleSettings(Section):
    """One recurring message. A manager changes only what a manager's file wrote last."""

    name: Annotated[str, AfterValidator(check_name)] = Field(description="The schedule's name.")
    topic: Annotated[str, AfterValidator(check_topic)] = Field(description="The topic.")
    body: Any = Field(default=None, description="The body: any value. Unset: null.")
    cron: str | None = Field(
        default=None, description="Cron pattern, as in `0 9 * * 1-5` or `@daily`."
    )
    every: Duration | None = Field(default=None, description="Interval, at least 1s.")
    tz: str | None = Field(default=None, description="Time zone of the pattern. Unset: UTC.")
    dst: Literal["vixie", "skip"] = Field(
        default="vixie",
        description="When a time that a change of the clock skips fires: right after, or never.",
    )
    start: Any = Field(  # `define` reads it; pydantic takes 2027 for seconds since 1970
        default=None, description="No tick before this time, such as `2026-12-24T09:00`."
    )
    until: Any = Field(default=None, description="No tick after this time.")
    count: int | None = Field(default=None, description="Maximum number of occurrences.")
    jitter: Duration | None = Field(
        default=None, description="Each occurrence is due later by up to this."
    )
    catch_up: str = Field(
        default="one",
        description="Ticks missed while no manager ran: `none`, `one`, `all` or `all(max=20)`.",
    )
    max_late: Duration | None = Field(
        default=None, description="No tick is caught up later; at least 1s."
    )
    overlap: Literal["allow", "skip", "queue_one", "replace_unstarted"] = Field(
        default="allow", description="A tick while an earlier occurrence is unfinished."
    )
    template: bool = Field(
        default=False, description="Fill `${tick}`, `${previous}`, `${count}` into the body."
    )
    headers: dict[str, str] = Field(default_factory=dict, description="Of each occurrence.")
    ttl: Duration | None = Field(default=None, description="Of each occurrence.")
    retry: Policy | None = Field(default=None, description="Retry policy of each occurrence.")
    late: LateField | None = Field(default=None, description="Late policy of each occurrence.")

    @model_validator(mode="after")
    def _can_be_defined(self) -> Self:
        self.definition()
        return self

    def definition(self) -> ScheduleDefinition:
        """The checked definition. Raises InvalidMessage, a ValueError."""
        given = {name: getattr(self, name) for name in ScheduleOptions.__annotations__}
        return define(self.body, ScheduleOptions(**given))  # type: ignore[typeddict-item]
