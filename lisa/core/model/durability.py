"""Durability: how many replicas must have a write before it counts as done."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from lisa.core.model.errors import ConfigError

_TEXT = re.compile(r"replicas\(\s*([0-9]+)\s*(?:,\s*fsync\s*(?:=\s*true)?\s*)?\)", re.IGNORECASE)
MOST_REPLICAS = 100


@dataclass(frozen=True, slots=True)
class Replicas:
    """A durability requirement, created by `replicas`."""

    count: int
    fsync: bool = False

    def __post_init__(self) -> None:
        whole = isinstance(self.count, int) and not isinstance(self.count, bool)
        if not whole or not 1 <= self.count <= MOST_REPLICAS:
            raise ConfigError(
                f"replicas takes a number from 1 to {MOST_REPLICAS}, not {self.count!r}"
            )

    def __str__(self) -> str:
        return f"replicas({self.count}, fsync=True)" if self.fsync else f"replicas({self.count})"


def replicas(count: int, *, fsync: bool = False) -> Replicas:
    """A write counts once `count` replicas have it; with `fsync`, once it is on their disks.

    `fsync` needs Redis 7.2 or Valkey, and replicas with an append-only file. Raises ConfigError.
    """
    return Replicas(count, fsync=fsync)


def parse_durability(value: object) -> Replicas | None:
    """Read a durability from settings: `replicas(1)`, `replicas(2, fsync)`, a mapping, or none.

    Raises ConfigError.
    """
    if value is None or isinstance(value, Replicas):
        return value
    if (
        isinstance(value, Mapping)
        and "replicas" in value
        and not value.keys() - {"replicas", "fsync"}
    ):
        return Replicas(value["replicas"], fsync=value.get("fsync") is True)
    if isinstance(value, str):
        if value.strip().lower() in ("", "none"):
            return None
        if found := _TEXT.fullmatch(value.strip()):
            return Replicas(int(found[1]), fsync="fsync" in value.lower())
    raise ConfigError(f"not a durability: {value!r}; write none, replicas(1) or replicas(1, fsync)")
