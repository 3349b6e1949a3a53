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
    "burst",
    "memory",
    "topics",
    "promoted",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Numbers of messages, unless noted otherwise.

    repeats: how often to take each figure.
    slow_repeats: how often to take figures that need many seconds.
    life: messages of the floor's life cycle; bulk, single, concurrent: timed sends.
    drain, burst: messages due at one instant; bodies: the same with larger bodies.
    paced_seconds: how long messages fall due at a constant rate.
    waiting: backlogs with which promotion is measured, in ascending order.
    light_rates: messages per second, with one manager and one consumer.
    side_by_side: numbers of managers, each with as many consumers.
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
    burst: int = 50_000
    paced_seconds: float = 20.0
    memory: int = 50_000
    topics: int = 1_000
    idle_seconds: float = 20.0
    waiting: tuple[int, ...] = (10_000, 1_000_000)
    promoted: int = 20_000
    light_rates: tuple[int, ...] = (100, 300, 1_000, 3_000)
    side_by_side: tuple[int, ...] = (1, 2, 4)

    def scaled(self, scale: float) -> Sizes:
        """Scale all amounts, as `lisa bench --scale 0.01` does in tests."""
        changed: dict[str, Any] = {
            name: max(20, int(getattr(self, name) * scale)) for name in _AMOUNTS
        }
        for name in ("paced_seconds", "idle_seconds"):
            changed[name] = max(0.2, getattr(self, name) * scale)
        changed["side_by_side"] = self.side_by_side[:2]
        changed["light_rates"] = (1_000,)
        changed["waiting"] = tuple(max(20, int(amount * scale)) for amount in self.waiting)
        return replace(self, **changed)


FULL = Sizes()

LONG = Sizes(mode="long", paced_seconds=60.0, waiting=(10_000, 1_000_000, 10_000_000))

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
    idle_seconds=4.0,
    waiting=(10_000, 300_000),
    promoted=5_000,
    light_rates=(1_000,),
    side_by_side=(),
)
