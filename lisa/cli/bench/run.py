"""One run of the benchmark, passed to every measure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lisa.cli.bench.results import Results
from lisa.cli.bench.sizes import Sizes


@dataclass(frozen=True, slots=True)
class Run:
    """The sizes, the results, and a callback `say` for the current step."""

    sizes: Sizes
    results: Results
    say: Callable[[str], None]

    def repeats(self, what: str, *, slow: bool = False, most: int | None = None) -> Iterator[int]:
        """Count the repeats and report each one; at most `most`.

        slow: for measurements that take many seconds.
        """
        total = self.sizes.slow_repeats if slow else self.sizes.repeats
        if most is not None:
            total = min(total, most)
        for number in range(total):
            self.say(f"{what}, {number + 1} of {total}")
            yield number
