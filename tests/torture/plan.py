"""The faults of a run, drawn from a seed: the same seed and options give the same plan."""

from __future__ import annotations

import random
from fnmatch import fnmatch
from typing import TYPE_CHECKING, NamedTuple

from tests.torture.world import ACK_S, TOPICS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FIRST_S = 4.0
LAST_S = 3.0


class Cast(NamedTuple):
    """The names of the running roles."""

    managers: Sequence[str]
    consumers: Sequence[str]
    producers: Sequence[str]
    gateways: Sequence[str] = ()
    pullers: Sequence[str] = ()

    @property
    def doors(self) -> Sequence[str]:
        """The proxy's doors in use, and `*` for all doors."""
        return ("manager", "consumer", "producer", *["gateway"] * bool(self.gateways), "*")


class Fault(NamedTuple):
    """One fault, `at_s` after the load began, for `seconds`."""

    at_s: float
    kind: str
    target: str
    seconds: float
    amount: int = 0


class Kind(NamedTuple):
    """How one kind of fault is drawn. `alone`: the next fault waits for its end."""

    targets: Callable[[Cast], Sequence[str]]
    shortest_s: float = 0.0
    longest_s: float = 0.0
    amounts: Sequence[int] = (0,)
    alone: bool = False


def _server(_cast: Cast) -> Sequence[str]:
    return ("server",)


def _places(_cast: Cast) -> Sequence[str]:
    return [f"{topic.name}/{group}" for topic in TOPICS for group in topic.groups]


def _doors(cast: Cast) -> Sequence[str]:
    return cast.doors


KINDS: dict[str, Kind] = {
    "kill-manager": Kind(lambda cast: cast.managers, 0.1, 3),
    "kill-consumer": Kind(lambda cast: cast.consumers, 0.1, 3),
    "kill-producer": Kind(lambda cast: cast.producers, 0.1, 3),
    "kill-gateway": Kind(lambda cast: [*cast.gateways, *cast.pullers], 0.1, 3),
    "stop-manager": Kind(lambda cast: cast.managers, 0.2 * ACK_S, 0.9 * ACK_S),
    "stop-consumer": Kind(lambda cast: cast.consumers, 0.2 * ACK_S, 0.9 * ACK_S),
    "stop-producer": Kind(lambda cast: cast.producers, 0.2 * ACK_S, 0.9 * ACK_S),
    "stop-gateway": Kind(lambda cast: [*cast.gateways, *cast.pullers], 0.2 * ACK_S, 3 * ACK_S),
    "freeze-manager": Kind(lambda cast: cast.managers, 1.2 * ACK_S, 3 * ACK_S),
    "freeze-consumer": Kind(lambda cast: cast.consumers, 1.2 * ACK_S, 3 * ACK_S),
    "freeze-producer": Kind(lambda cast: cast.producers, 1.2 * ACK_S, 3 * ACK_S),
    "clock": Kind(
        lambda cast: [*cast.consumers, *cast.producers, *cast.managers], 5, 15, (-3600, 3600)
    ),
    "server-kill": Kind(_server, 0.05, ACK_S, alone=True),
    "server-stop": Kind(_server, 0.2, 0.8 * ACK_S, alone=True),
    "script-flush": Kind(_server),
    "out-of-memory": Kind(_server, 0.5, ACK_S, alone=True),
    "cut": Kind(_doors, 0, 2),
    "delay": Kind(_doors, 1, 5, (20, 100, 400)),
    "refuse": Kind(_doors, 0.5, ACK_S),
    "hang": Kind(_doors, 0.5, 2.5 * ACK_S),
    "lose-replies": Kind(_doors, 0.5, 3),
    "trim": Kind(_places, 0.3, 2, (5, 20, 100)),
    "delete-bodies": Kind(lambda _: [topic.name for topic in TOPICS], 0.3, 2, (1, 3, 10)),
    "delete-consumer": Kind(_places, 0.3, 2),
    "destroy-group": Kind(_places),
    "roll": Kind(_server, alone=True),
}
"""Every kind of fault. `roll` restarts all roles, one after the other, from an earlier build."""


def choose(said: str, *, earlier: bool, gateway: bool) -> list[str]:
    """The kinds that `all`, `none`, or a list such as `kill-*,cut` selects. Raises ValueError."""
    possible = [
        kind
        for kind in KINDS
        if (earlier or kind != "roll") and (gateway or not kind.endswith("-gateway"))
    ]
    if said in ("all", "none"):
        return possible if said == "all" else []
    chosen = []
    for pattern in said.split(","):
        found = [kind for kind in possible if fnmatch(kind, pattern)]
        if not found:
            raise ValueError(f"no fault is called {pattern!r}; there are {', '.join(possible)}")
        chosen += found
    return list(dict.fromkeys(chosen))


def draw(
    seed: int, seconds: float, every_s: float, cast: Cast, kinds: Sequence[str]
) -> list[Fault]:
    """Faults in order of time, `every_s` apart on average; each kind once before any recurs."""
    chance = random.Random(seed)
    faults: list[Fault] = []
    at_s = FIRST_S
    deck: list[str] = []
    rolled = False
    while kinds and at_s < seconds - LAST_S:
        if not deck:
            deck = [kind for kind in kinds if kind != "roll" or not rolled]
            chance.shuffle(deck)
            if not deck:
                break
        name = deck.pop()
        rolled = rolled or name == "roll"
        kind = KINDS[name]
        lasts_s = round(chance.uniform(kind.shortest_s, kind.longest_s), 2)
        faults.append(
            Fault(
                round(at_s, 2),
                name,
                chance.choice(kind.targets(cast)),
                lasts_s,
                chance.choice(kind.amounts),
            )
        )
        at_s += every_s * chance.uniform(0.5, 1.5) + (lasts_s if kind.alone else 0)
    return faults
