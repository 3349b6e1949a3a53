"""Samples the memory of server and roles, and lengths, every few seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from tests.torture.ledger import Ledger
from tests.torture.stage import now_us

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.torture.stage import Stage

KB = 1024
EVERY_S = 5.0


class Sampler:
    """Writes `samples.jsonl`."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._ledger = Ledger(stage.out / "samples.jsonl")

    def step(self) -> None:
        """Take one sample. Raises redis.RedisError."""
        stage = self._stage
        memory = stage.client.info("memory")
        found: dict[str, float] = {
            "server used MB": int(memory["used_memory"]) / KB**2,
            "server rss MB": int(memory["used_memory_rss"]) / KB**2,
        }
        for name, role in stage.roles.items():
            if role.now is not None and role.now.poll() is None:
                found[f"{name} rss MB"] = _rss_kb(role.now.pid) / KB
        found |= self._lengths()
        self._ledger.write([json.dumps({"at": now_us(), "found": found})])

    def _lengths(self) -> dict[str, float]:
        stage = self._stage
        standing = stage.standing()
        pipe, names = stage.client.pipeline(transaction=False), []
        for place in _places(stage):
            pipe.xlen(place)
            names.append(place)
        streams = sum(int(n) for n in pipe.execute())
        return {
            "ready streams": streams,
            "waiting": standing["waiting"],
            "retry": standing["retry"],
            "garbage": standing["garbage"],
            "keys": int(stage.client.dbsize()),
        }


def _places(stage: Stage) -> Iterable[str]:
    from tests.torture.world import TOPICS

    for topic in TOPICS:
        for group in topic.groups:
            yield stage.store.keys.topic(topic.name).group(group).ready


def _rss_kb(pid: int) -> float:
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return 0.0
    return next(
        (float(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:")), 0.0
    )
