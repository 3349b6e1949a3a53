"""One run of the harness: what every measure is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lisa.cli.bench.results import Results
from lisa.cli.bench.sizes import Sizes

__all__ = ["Run"]


@dataclass(frozen=True, slots=True)
class Run:
    """How much to measure, where results go, and how to say what is being done."""

    sizes: Sizes
    results: Results
    say: Callable[[str], None]

    def repeats(self, what: str, *, slow: bool = False, peer: bool = False) -> Iterator[int]:
        """Count the repeats, saying which is under way; slow: of what takes many seconds."""
        total = self.sizes.slow_repeats if slow else self.sizes.repeats
        if peer:
            total = min(total, self.sizes.peer_repeats)
        for number in range(total):
            self.say(f"{what}, {number + 1} of {total}")
            yield number
