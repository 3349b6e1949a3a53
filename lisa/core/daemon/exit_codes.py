"""The exit codes of daemons. Service managers restart a daemon unless it ended with 0 or 2."""

from __future__ import annotations

from lisa.core.model.errors import ConfigError, InvalidMessage, LisaError, ServerUnavailable

EXIT_CONFIG = 2
"""A restart would fail again: a child that ends with it stops its siblings."""


def exit_code(error: LisaError) -> int:
    """2 for an error that a restart does not fix, 3 for an unavailable server, 1 for others."""
    if isinstance(error, ServerUnavailable):
        return 3
    return EXIT_CONFIG if isinstance(error, (ConfigError, InvalidMessage)) else 1
