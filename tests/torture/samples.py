"""Samples the memory of server and roles, and lengths, every few seconds; judges growth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tests.torture.ledger import Ledger
from tests.torture.stage import now_us

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.torture.case import Case
    from tests.torture.reading import Run
    from tests.torture.stage import Stage

KB = 1024
EVERY_S = 5.0

JUDGED_FROM_S = 600.0
"""In a shorter run the second half is not yet steady."""

GROWS_BY = 0.2
GROWS_MB, GROWS_KEYS = 16.0, 5_000.0
"""How much, and by what share of its mean, a series may rise in the second half of a run."""


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


class Flatness(NamedTuple):
    """One series over the second half of a run. `growth` is the rise of a fitted line, as a
    share of its mean."""

    least: float
    mean: float
    most: float
    growth: float


def read_samples(path: Path) -> list[dict[str, Any]]:
    """All samples, in order."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def under_load(run: Run) -> list[dict[str, Any]]:
    """The samples from the first message to the last."""
    instants = {one["event"]: one["at"] for one in run.events}
    if "load" not in instants or "sent" not in instants:
        return []
    return [one for one in run.samples if instants["load"] <= one["at"] <= instants["sent"]]


def growth(case: Case) -> None:
    """In a long run the server's memory and keys, and each role's memory, must not grow."""
    samples = under_load(case.run)
    if not samples or samples[-1]["at"] - samples[0]["at"] < JUDGED_FROM_S * 1e6:
        return
    for name, one in flatness(samples).items():
        if name != "keys" and not name.endswith("MB"):
            continue
        rises, most = one.growth * one.mean, GROWS_KEYS if name == "keys" else GROWS_MB
        if rises > GROWS_BY * one.mean + most:
            what = f"growth: {name} rose by {rises:,.1f} in the second half, to {one.most:,.1f}"
            case.verdicts.accuse("unexplained", 0, what)


def flatness(samples: list[dict[str, Any]]) -> dict[str, Flatness]:
    """The second half of each series."""
    half = samples[len(samples) // 2 :]
    series: dict[str, list[tuple[float, float]]] = {}
    for sample in half:
        for name, value in sample["found"].items():
            series.setdefault(name, []).append((sample["at"] / 1e6, value))
    found = {}
    for name, points in series.items():
        at, values = np.array(points).T
        mean = float(values.mean())
        rises = 0.0
        if len(points) > 2 and mean:
            slope = float(np.polyfit(at - at[0], values, 1)[0])
            rises = slope * float(at[-1] - at[0]) / mean
        found[name] = Flatness(float(values.min()), mean, float(values.max()), rises)
    return found
