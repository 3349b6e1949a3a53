"""Modules named on a command line or in a file, imported for the receivers that they connect."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import import_module

from lisa.core.errors import ConfigError

__all__ = ["import_handlers"]


def import_handlers(modules: Iterable[str]) -> None:
    """Import modules, those of the present directory among them.

    Raises ConfigError for what cannot be imported; what a module itself raises is let through.
    """
    sys.path.insert(0, "")  # a console script's path leaves the present directory out
    for module in modules:
        if not module or module.startswith("."):
            raise ConfigError(f"handlers: {module!r} is no module; write pkg.module")
        try:
            import_module(module)
        except ImportError as error:
            raise ConfigError(f"handlers: cannot import {module!r}: {error}") from None
