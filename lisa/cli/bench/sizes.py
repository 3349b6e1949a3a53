"""The amounts that each mode measures."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

_AMOUNTS = (
    "life",
    "bulk",
    "single",
    "concurrent",
    "drain",
    "bodies",
    "memory",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Numbers of messages, unless noted otherwise.

    repeats: how often to take each figure.
    slow_repeats: how often to take figures that need many seconds.
    life: messages of the floor's life cycle; bulk, single, concurrent: timed sends.
    drain: messages due at one instant; bodies: the same with larger bodies.
    paced_seconds: how long messages fall due at a constant rate.
    light_rates: messages per second, with one manager and one consumer.
    """

    mode: str = "full"
    repeats: int = 3
    slow_repeats: int = 3
    life: int = 50_000
    bulk: int = 100_000
    single: int = 5_000
    concurrent: int = 50_000
    drain: int = 100_000
    bodies: int = 10_000
    paced_seconds: float = 20.0
    memory: int = 50_000
    light_rates: tuple[int, ...] = (100, 300, 1_000, 3_000)

    def scaled(self, scale: float) -> Sizes:
        """Scale all amounts, as `lisa bench --scale 0.01` does in tests."""
        if scale == 1.0:
            return self
        changed: dict[str, Any] = {
            name: max(20, int(getattr(self, name) * scale)) for name in _AMOUNTS
        }
        changed["paced_seconds"] = max(0.2, self.paced_seconds * scale)
        changed["light_rates"] = (1_000,)
        return replace(self, **changed)


FULL = Sizes()

QUICK = Sizes(
    mode="quick",
    slow_repeats=1,
    life=20_000,
    bulk=30_000,
    single=1_500,
    concurrent=10_000,
    drain=30_000,
    bodies=4_000,
    paced_seconds=3.0,
    light_rates=(1_000,),
)
