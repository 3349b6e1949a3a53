"""How much of everything each mode measures."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

__all__ = ["FULL", "LONG", "QUICK", "Sizes"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Counts of messages unless the name says otherwise.

    repeats: how often each figure is taken.
    slow_repeats: the same, where one takes many seconds.
    life: the floor's messages; bulk, single, concurrent: sent to be timed.
    drain, burst: due at one instant.
    paced_seconds: how long messages fall due one by one.
    waiting: amounts before which promoting is measured, from small to large.
    side_by_side: how many managers and as many consumers.
    peer_repeats: how often a peer's figures are taken, if not less often than the others.
    peer_most: the most that a peer is given; peer_seconds: how long it should be busy with them.
    peer_start_seconds: how long a sender's process takes to start, at most, on a busy machine.
    """

    mode: str
    repeats: int
    slow_repeats: int
    life: int
    bulk: int
    single: int
    concurrent: int
    drain: int
    burst: int = 50_000
    paced_seconds: float
    memory: int = 50_000
    topics: int = 1_000
    idle_seconds: float
    waiting: tuple[int, ...]
    promoted: int
    side_by_side: tuple[int, ...]
    peer_repeats: int = 2
    peer_most: int = 100_000
    peer_seconds: float = 3.0
    peer_start_seconds: float = 4.0

    def scaled(self, scale: float) -> Sizes:
        """The same with other amounts: `lisa bench --scale 0.01`, which tests use."""
        changed: dict[str, Any] = {
            name: max(20, int(getattr(self, name) * scale))
            for name in (
                "life", "bulk", "single", "concurrent", "drain", "burst", "memory", "topics",
                "promoted", "peer_most",
            )
        }  # fmt: skip
        for name in ("paced_seconds", "idle_seconds", "peer_seconds"):
            changed[name] = max(0.2, getattr(self, name) * scale)
        changed["peer_start_seconds"] = max(2.0, self.peer_start_seconds * scale)
        changed["side_by_side"] = self.side_by_side[:2]
        changed["waiting"] = tuple(max(20, int(amount * scale)) for amount in self.waiting)
        return replace(self, **changed)


QUICK = Sizes(
    mode="quick", repeats=3, slow_repeats=1, life=20_000, bulk=30_000, single=1_500,
    concurrent=10_000, drain=30_000, paced_seconds=3.0, idle_seconds=4.0,
    waiting=(10_000, 300_000), promoted=5_000, side_by_side=(),
)  # fmt: skip

FULL = Sizes(
    mode="full", repeats=3, slow_repeats=3, life=50_000, bulk=100_000, single=5_000,
    concurrent=50_000, drain=100_000, paced_seconds=20.0, idle_seconds=20.0,
    waiting=(10_000, 1_000_000), promoted=20_000, side_by_side=(1, 2, 4),
)  # fmt: skip

LONG = replace(
    FULL,
    mode="long",
    paced_seconds=60.0,
    peer_repeats=3,
    peer_seconds=5.0,
    waiting=(10_000, 1_000_000, 10_000_000),
)
