"""How many replicas have a write before it counts as done.

WAIT counts the replicas that have all that was written *on its connection*. A call that is repeated
after a lost reply writes nothing, on another connection, and a bare WAIT would then confirm what
nobody has (Redis 7.2 and Valkey count so; servers before them count all writes). So a write of no
consequence, a key that expires at once, goes between the script and WAIT: whoever has that one has
all before it. The three travel together, on one connection.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lisa.core.errors import ConfigError
from lisa.core.flow import Chain, Command, Flow

__all__ = ["Replicas", "TooFew", "confirmed", "lacks_command", "parse_durability", "replicas"]

_TEXT = re.compile(r"replicas\(\s*(\d+)\s*(?:,\s*fsync\s*(?:=\s*true)?\s*)?\)", re.IGNORECASE)
MOST_REPLICAS = 100


class TooFew(Exception):
    """So many replicas, `count`, had the write when the time was up."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.count = count


@dataclass(frozen=True, slots=True)
class Replicas:
    """Made by `replicas`."""

    count: int
    fsync: bool = False

    def __post_init__(self) -> None:
        whole = isinstance(self.count, int) and not isinstance(self.count, bool)
        if not whole or not 1 <= self.count <= MOST_REPLICAS:
            raise ConfigError(f"replicas takes a number from 1 to {MOST_REPLICAS}, "
                              f"not {self.count!r}")  # fmt: skip

    def __str__(self) -> str:
        return f"replicas({self.count}, fsync=True)" if self.fsync else f"replicas({self.count})"

    def command(self, within_ms: int) -> Command:
        """What asks the server to wait. Without a time it would wait for ever."""
        within_ms = max(1, within_ms)
        if self.fsync:
            return ("WAITAOF", 0, self.count, within_ms)
        return ("WAIT", self.count, within_ms)


def replicas(count: int, *, fsync: bool = False) -> Replicas:
    """A write counts once so many replicas have it; with `fsync` on their disks, too.

    The latter needs Redis 7.2 or Valkey, and replicas that keep an append-only file.
    Raises ConfigError.
    """
    return Replicas(count, fsync=fsync)


def parse_durability(value: object) -> Replicas | None:
    """What a configuration says: `replicas(1)`, `replicas(2, fsync)`, a mapping of the same, none.

    Raises ConfigError.
    """
    if value is None or isinstance(value, Replicas):
        return value
    if isinstance(value, Mapping) and "replicas" in value and not value.keys() - {
        "replicas", "fsync"
    }:  # fmt: skip
        return Replicas(value["replicas"], fsync=value.get("fsync") is True)
    if isinstance(value, str):
        if value.strip().lower() in ("", "none"):
            return None
        if found := _TEXT.fullmatch(value.strip()):
            return Replicas(int(found[1]), fsync="fsync" in value.lower())
    raise ConfigError(f"not a durability: {value!r}; write none, replicas(1) or replicas(1, fsync)")


def confirmed(call: Command, mark: str, wanted: Replicas, within_s: float) -> Flow[Any]:
    """The reply to a script call, once so many replicas have what it wrote.

    `mark` is a key on the same node, for the write of no consequence. Raises `TooFew` and the
    client's errors.
    """
    wait = wanted.command(int(within_s * 1000))
    reply, *rest = yield Chain(mark, (call, ("SET", mark, "", "PX", 1), wait))
    if isinstance(reply, Exception):
        raise reply
    if reply[0] != b"OK":
        return reply  # refused, or to be asked differently: nothing was written
    marked, waited = rest
    for one in (marked, waited):
        if isinstance(one, Exception):
            raise one
    count = waited[1] if wanted.fsync else waited
    if count < wanted.count:
        raise TooFew(count)
    return reply


def lacks_command(error: BaseException) -> bool:
    """Whether the server is too old for WAITAOF."""
    said = str(error).lower()
    return "unknown command" in said and "waitaof" in said
