"""Imports the handler modules given on the command line or in a configuration file."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import import_module

from lisa.core.model.errors import ConfigError


def import_handlers(modules: Iterable[str]) -> None:
    """Import modules; the search path begins with the current directory.

    Raises ConfigError if an import fails. Other exceptions raised by a module propagate.
    """
    sys.path.insert(0, "")  # console scripts do not have the current directory on their path
    for module in modules:
        if not module or module.startswith("."):
            raise ConfigError(f"handlers: {module!r} is not a module name; write pkg.module")
        try:
            import_module(module)
        except ImportError as error:
            raise ConfigError(f"handlers: cannot import {module!r}: {error}") from None
