"""Checks, loads and chains middleware; see `lisa.Middleware`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any, TypeVar

from lisa.core.model.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])

Link = Callable[[Any], Any]
"""One link of a chain: takes a send call, a message or a batch."""

SEND = ("send", "send_async")
HANDLE = ("handle", "handle_async", "handle_batch", "handle_batch_async")
SETTLED = ("settled",)


class BaseMiddleware:
    """The type of middleware within Lisa. Users derive from `lisa.Middleware`."""

    def is_idle(self) -> bool:
        """Whether each method would only call the next step now, so that sends may skip it."""
        return False


def passes_on(method: F) -> F:
    """Mark a base-class method that only calls the next step, so that chains leave it out."""
    method.__dict__["passes_on"] = True
    return method


def checked(middleware: Iterable[BaseMiddleware]) -> tuple[BaseMiddleware, ...]:
    """The middleware. Raises ConfigError for other objects and for wrong (`async`) methods."""
    found: tuple[Any, ...] = tuple(middleware)
    for layer in found:
        if isinstance(layer, type):
            raise ConfigError(f"the middleware {_name(layer)} is a class; give an object of it")
        if not isinstance(layer, BaseMiddleware):
            raise ConfigError(f"{layer!r} is not middleware; subclass lisa.Middleware")
        for method in (*SEND, *HANDLE):
            needs_async = method.endswith("_async")
            if inspect.iscoroutinefunction(getattr(layer, method)) != needs_async:
                verb = "must be" if needs_async else "must not be"
                raise ConfigError(f"{method} of the middleware {_name(layer)} {verb} `async def`")
    return found


def load(paths: Iterable[str]) -> list[BaseMiddleware]:
    """Import middleware by its `pkg.module:name`; a class is instantiated without arguments.

    Raises ConfigError if a path is malformed or cannot be imported.
    """
    found = []
    for path in paths:
        module, _, name = path.partition(":")
        if not module or not name or module.startswith("."):
            raise ConfigError(f"middleware {path!r} must be pkg.module:name")
        try:
            loaded = getattr(import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"middleware {path!r} cannot be imported: {error}") from None
        found.append(loaded() if isinstance(loaded, type) else loaded)
    return found


def methods(
    middleware: Sequence[BaseMiddleware], forms: Sequence[str], wanted: str, user: str
) -> list[Callable[..., Any]]:
    """The method `wanted`, one of `forms`, of each middleware that has it, outermost first.

    Raises ConfigError if one has only other forms. `user` says in the error what needs the method.
    """
    found = []
    for layer in middleware:
        own = [form for form in forms if _is_own(layer, form)]
        if wanted in own:
            found.append(getattr(layer, wanted))
        elif own:
            raise ConfigError(
                f"{user} needs the method {wanted} of the middleware {_name(layer)}, which has "
                f"only {', '.join(own)}"
            )
    return found


def all_idle(methods: Sequence[Callable[..., Any]]) -> Callable[[], bool]:
    """A function that says whether the middleware of all these methods is idle."""
    checks = [method.__self__.is_idle for method in methods]  # type: ignore[attr-defined]
    if any(check.__func__ is BaseMiddleware.is_idle for check in checks):
        return lambda: False
    return checks[0] if len(checks) == 1 else lambda: all(check() for check in checks)


def chain(methods: Sequence[Callable[..., Any]], innermost: Link) -> Link:
    """A function that calls the first method, which calls the next one, and so on."""
    for method in reversed(methods):
        innermost = _link(method, innermost)
    return innermost


def _link(method: Callable[..., Any], call_next: Link) -> Link:
    return lambda value: method(value, call_next)


def _is_own(layer: object, method: str) -> bool:
    return not hasattr(getattr(layer, method), "passes_on")


def _name(layer: object) -> str:
    kind = layer if isinstance(layer, type) else type(layer)
    return f"{kind.__module__}.{kind.__qualname__}"
