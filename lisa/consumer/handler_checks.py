"""Checks of what `Consumer.on` gets: the handler's signature and its options."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from lisa.core.model.callables import call_error, check_runs, function_name
from lisa.core.model.clock import parse_duration
from lisa.core.model.errors import ConfigError
from lisa.core.model.retry_policy import RetryPolicy

LARGEST_BATCH = 10_000


def check_signature(topic: str, handler: object, argument: str) -> None:
    """Raise ConfigError if a handler cannot be called with one argument, or is a generator."""
    if not callable(handler):
        raise ConfigError(f"the handler of topic {topic!r} is not callable: {handler!r}")
    if error := call_error(handler, argument):
        name = function_name(handler)
        raise ConfigError(
            f"topic {topic!r}: the handler {name} must take one positional argument, the "
            f"{argument}: {error}; define it as {name.rpartition('.')[2]}({argument}), and give "
            "other arguments defaults or bind them with functools.partial"
        )
    check_runs(handler)


def is_async_handler(function: Callable[..., Any]) -> bool:
    """Whether calling a handler returns a coroutine."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  checks for a coroutine function
    )


def checked_batch(topic: str, batch: int | None, within: object) -> int | None:
    """The size of a batch. Raises ConfigError if an option is invalid."""
    if batch is None:
        if within is not None:
            raise ConfigError(f"topic {topic!r}: within= needs batch=")
        return None
    if isinstance(batch, bool) or not isinstance(batch, int) or not 1 <= batch <= LARGEST_BATCH:
        raise ConfigError(f"topic {topic!r}: batch={batch!r} must be from 1 to {LARGEST_BATCH}")
    return batch


def checked_retry(topic: str, value: object) -> RetryPolicy:
    """The pauses between attempts. Raises ConfigError."""
    try:
        return RetryPolicy.parse(value)
    except ValueError as error:
        raise ConfigError(f"topic {topic!r}: retry: {error}") from None


def checked_concurrency(topic: str, value: int | None) -> int | None:
    """The most handlers at the same time. Raises ConfigError."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigError(f"topic {topic!r}: concurrency={value!r} must be a number from 1")
    return value


def checked_seconds(topic: str, name: str, value: timedelta | str | None) -> float | None:
    """A duration in seconds. Raises ConfigError."""
    if value is None:
        return None
    try:
        seconds = parse_duration(value).total_seconds()
    except ValueError as error:
        raise ConfigError(f"topic {topic!r}: {name}: {error}") from None
    if name == "timeout" and seconds == 0:
        raise ConfigError(f"topic {topic!r}: timeout must be above 0")
    return seconds
