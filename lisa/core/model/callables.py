"""Names and signatures of functions that user code passes to Lisa."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from lisa.core.model.errors import ConfigError


def function_name(function: Callable[..., Any]) -> str:
    """A function's name for log lines and errors, such as `shop.handlers.cancel_unpaid`."""
    while isinstance(function, functools.partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return ".".join(filter(None, (named.__module__, named.__qualname__)))


def check_runs(function: Callable[..., Any]) -> None:
    """Raise ConfigError if a call of a function does not run its code, as that of a generator."""
    for code in (function, getattr(function, "__call__", None)):  # noqa: B004  an object's own code
        if inspect.isgeneratorfunction(code) or inspect.isasyncgenfunction(code):
            raise ConfigError(
                f"{function_name(function)} contains yield: a call would return a generator and "
                "not run its code; remove the yield"
            )


def call_error(function: Callable[..., Any], *args: object, **kwargs: object) -> str | None:
    """Why a function cannot be called with these arguments; None if it can, or if unknown."""
    try:
        # The wrapper's own signature: a decorator may pass further arguments to what it wraps.
        signature = inspect.signature(function, follow_wrapped=False)
    except (ValueError, TypeError, NameError):  # a builtin, or annotations that do not exist
        return None
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return None
