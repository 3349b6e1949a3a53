"""Types of settings: how a value of a file or a variable is read and checked."""

from collections.abc import Callable
from datetime import timedelta, tzinfo
from functools import partial
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, InstanceOf

from lisa.core.model.clock import parse_duration, parse_zone
from lisa.core.model.cron import read_schedule
from lisa.core.model.durability import Replicas, parse_durability
from lisa.core.model.errors import ConfigError
from lisa.core.model.late import LatePolicy
from lisa.core.model.options import LARGEST_BATCH, LARGEST_WINDOW, check_option
from lisa.core.model.retry_policy import RetryPolicy

T = TypeVar("T")

Duration = Annotated[timedelta, BeforeValidator(parse_duration)]
Millis = Annotated[timedelta, BeforeValidator(partial(parse_duration, bare_ms=True))]
Policy = Annotated[InstanceOf[RetryPolicy], BeforeValidator(RetryPolicy.parse)]
LateField = Annotated[InstanceOf[LatePolicy], BeforeValidator(LatePolicy.parse)]


def checked(read: Callable[[Any], T]) -> Callable[[Any], T]:
    """A validator that calls `read`; its ConfigError becomes an error of the setting."""

    def validate(value: Any) -> T:
        try:
            return read(value)
        except ConfigError as error:
            raise ValueError(str(error)) from None

    return validate


Zone = Annotated[InstanceOf[tzinfo], BeforeValidator(parse_zone)]
DurabilityField = Annotated[InstanceOf[Replicas] | None, BeforeValidator(checked(parse_durability))]
Batch = Annotated[int, Field(ge=1), AfterValidator(partial(min, LARGEST_BATCH))]
Window = Annotated[int, Field(ge=1), AfterValidator(partial(min, LARGEST_WINDOW))]


def listed(value: object) -> object:
    """Split a comma-separated text into a list; environment variables have no lists."""
    if isinstance(value, str):
        return [name for part in value.split(",") if (name := part.strip())]
    return value


def topic_option(name: str) -> AfterValidator:
    """A validator of a setting that is the topic option `name`; None means unset."""

    def check(value: Any) -> Any:
        if value is not None:
            check_option(name, value)
        return value

    return AfterValidator(check)


def _check_schedule(text: str) -> str:
    read_schedule(text)
    return text


Schedule = Annotated[str, AfterValidator(checked(_check_schedule))]
Names = Annotated[tuple[str, ...], BeforeValidator(listed)]
