"""All measures by name."""

from __future__ import annotations

from collections.abc import Callable

from lisa.cli.bench.measures import (
    backlog,
    bulk_send,
    burst,
    concurrent_send,
    drain,
    help_page,
    idle,
    lateness,
    memory,
    side_by_side,
    single_send,
)
from lisa.cli.bench.run import Run

__all__ = ["MODULES"]

MODULES: dict[str, Callable[[Run], None]] = {
    module.NAME: module.measure
    for module in (
        bulk_send, single_send, concurrent_send, drain, lateness, burst, memory, idle, backlog,
        side_by_side, help_page,
    )
}  # fmt: skip
"""In the order in which they run: `lateness` and `burst` use what `drain` found."""
