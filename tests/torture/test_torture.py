"""The torture run itself, short; `make torture` runs it for any length."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.torture.__main__ import torture
from tests.torture.earlier import RELEASE, is_known
from tests.torture.options import parse

if TYPE_CHECKING:
    from pathlib import Path

    from tests.torture.checker import Verdicts


def run(out: Path, *options: str) -> Verdicts:
    said: list[str] = []
    verdicts = torture(parse([*options, "--out", str(out)]), said.append)
    assert verdicts.is_clean, said[-1]
    return verdicts


@pytest.mark.full
def test_three_quarters_of_a_minute_of_every_fault(tmp_path: Path) -> None:
    verdicts = run(tmp_path, "--minutes", "0.75", "--rate", "300", "--seed", "1", "--gateway")
    assert verdicts.counts["confirmed"] > 0.25 * 45 * 300
    assert verdicts.counts["handlings: ok"] > 0.25 * 45 * 300
    assert verdicts.counts["handlings held to account"] > 0
    assert verdicts.counts["handlings with a window"] > 0
    assert verdicts.counts["ticks"] > 45  # three schedules, two of them with a tick each second
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert set(report["faults"]) == set(report["options"]["kinds"]), report["skipped"]


@pytest.mark.full
@pytest.mark.skipif(not is_known(RELEASE), reason=f"no commit {RELEASE}: not a complete clone")
def test_a_rolling_restart_from_the_last_release(tmp_path: Path) -> None:
    verdicts = run(
        tmp_path,
        "--minutes",
        "0.5",
        "--rate",
        "300",
        "--seed",
        "1",
        "--gateway",
        "--earlier",
        RELEASE,
        "--faults",
        "roll,kill-consumer,kill-manager,cut",
    )
    assert verdicts.counts["confirmed"] > 0.25 * 30 * 300
    lines = (tmp_path / "stage.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    starts = [(one["role"], one["earlier"]) for one in events if one["event"] == "start"]
    first, last = dict(reversed(starts)), dict(starts)
    assert all(first.values())
    assert not any(last.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("persistence", "seed"),
    [
        ("always", "2"),
        ("everysec", "3"),
        ("snapshot", "4"),
    ],
)
def test_three_minutes(tmp_path: Path, persistence: str, seed: str) -> None:
    run(
        tmp_path,
        "--minutes",
        "3",
        "--rate",
        "500",
        "--seed",
        seed,
        "--gateway",
        "--persistence",
        persistence,
    )
