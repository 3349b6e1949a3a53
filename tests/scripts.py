"""All versions of the scripts, for tests that must know or load them before roles call them."""

from collections.abc import Iterator
from functools import cache
from itertools import combinations

from lisa.core.transitions import loader
from lisa.core.transitions.loader import Script


@cache
def versions(name: str) -> tuple[Script, ...]:
    """One script for each combination of its features."""
    features = sorted(loader.features_of(name))
    some = (chosen for n in range(len(features) + 1) for chosen in combinations(features, n))
    return tuple(dict.fromkeys(loader.load(name, frozenset(chosen)) for chosen in some))


def all_versions() -> Iterator[Script]:
    """The versions of all scripts."""
    for name in loader.names():
        yield from versions(name)
