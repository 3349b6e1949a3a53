"""Counts the events of the ledgers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from lisa.cli.demo.ledger import DemoEvent


@dataclass
class DemoTally:
    """Message ids by outcome, and the lateness of first deliveries in microseconds."""

    sent: set[str] = field(default_factory=set)
    cancelled: set[str] = field(default_factory=set)
    rescheduled: set[str] = field(default_factory=set)
    handled: Counter[str] = field(default_factory=Counter)
    dead: set[str] = field(default_factory=set)
    retries: int = 0
    lateness_us: list[int] = field(default_factory=list)
    all_sent: bool = False

    def add(self, events: Iterable[DemoEvent]) -> None:
        """Count events of any ledger."""
        for kind, message_id, number in events:
            if kind == "opened":
                self.lateness_us.append(number)
            elif kind == "handled":
                self.handled[message_id] += 1
            elif kind == "retrying":
                self.retries += 1
            elif kind == "end":
                self.all_sent = True
            elif kind in ("sent", "cancelled", "rescheduled", "dead"):
                getattr(self, kind).add(message_id)

    @property
    def settled(self) -> int:
        """Number of messages that were handled, cancelled or died."""
        return len(self.sent & (self.handled.keys() | self.dead | self.cancelled))

    @property
    def finished(self) -> bool:
        """Whether all messages are sent and settled."""
        return self.all_sent and self.settled == len(self.sent)

    def percentile_ms(self, fraction: float) -> float:
        """A percentile of the lateness in milliseconds; 0 if nothing was handled."""
        ordered = sorted(self.lateness_us)
        if not ordered:
            return 0.0
        return max(0, ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]) / 1000

    def figures(self) -> dict[str, int | float]:
        """The results by name; lateness in milliseconds."""
        return {
            "sent": len(self.sent),
            "handled": len(self.handled),
            "cancelled": len(self.cancelled),
            "rescheduled": len(self.rescheduled),
            "retried": self.retries,
            "garbage": len(self.dead),
            "lateness_p50_ms": self.percentile_ms(0.5),
            "lateness_p99_ms": self.percentile_ms(0.99),
            "lateness_max_ms": self.percentile_ms(1.0),
            "early": sum(late < 0 for late in self.lateness_us),
            "lost": len(self.sent) - self.settled,
            "handled_twice": sum(times > 1 for times in self.handled.values()),
            "handled_after_cancel": len(self.cancelled & self.handled.keys()),
        }
