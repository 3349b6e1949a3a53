"""Load the consumer that `lisa-consumer TARGET` runs: `pkg.module` or `pkg.module:name`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

from lisa.consumer.async_consumer import AsyncConsumer
from lisa.consumer.consumer import Consumer
from lisa.core.model.errors import ConfigError
from lisa.core.model.signals import everywhere

AnyConsumer = AsyncConsumer | Consumer


def load(target: str) -> AnyConsumer:
    """Import a target and return its consumer, not yet started.

    `pkg.module` must contain one consumer, or none but receivers of `message_received`, for which
    a new consumer is created. Also finds modules in the current directory. Raises ConfigError if
    the module or the consumer does not exist, and any error that the module itself raises.
    """
    module_name, colon, name = target.partition(":")
    if not module_name or module_name.startswith(".") or (colon and not name):
        raise ConfigError(f"target {target!r} must be pkg.module or pkg.module:name")
    module = _module(module_name)
    if colon:
        return _named(module, name)
    return _only(module)


def _module(name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists; one of its imports does not
        raise ConfigError(
            f"there is no module {name!r} in {here} or in the installed packages"
        ) from None


def _named(module: ModuleType, name: str) -> AnyConsumer:
    found: object = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        raise ConfigError(f"module {module.__name__} has no {name!r}")
    if not isinstance(found, AnyConsumer):
        raise ConfigError(
            f"{module.__name__}:{name} is a {type(found).__name__}, not a lisa.Consumer or "
            "lisa.AsyncConsumer"
        )
    return found


def _only(module: ModuleType) -> AnyConsumer:
    consumers = {
        id(value): (name, value)
        for name, value in vars(module).items()
        if isinstance(value, AnyConsumer)
    }
    if len(consumers) > 1:
        names = ", ".join(sorted(name for name, _ in consumers.values()))
        raise ConfigError(
            f"module {module.__name__} has several consumers ({names}); choose one with "
            f"{module.__name__}:NAME"
        )
    if consumers:
        ((_, consumer),) = consumers.values()
        return consumer
    if not everywhere.received.receivers:
        raise ConfigError(
            f"module {module.__name__} has neither a consumer nor a receiver of "
            "lisa.message_received"
        )
    return Consumer()
