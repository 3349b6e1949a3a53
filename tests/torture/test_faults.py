"""What a fault records: what was done, and what could not be."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import redis

from tests.servers import ROOT
from tests.torture import foreign
from tests.torture.faults import FINDS_TRIES, begin
from tests.torture.ledger import SHIFT, Ledger
from tests.torture.plan import Fault

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from tests.torture.stage import Stage


class Notes:
    """A fake stage on which nothing runs."""

    is_up = True

    def __init__(self) -> None:
        self.noted: dict[str, Any] = {}
        self.roles = {"consumer-1": SimpleNamespace(now=None, shift_s=0, is_wanted=True)}

    def note(self, _event: str, **fields: Any) -> None:
        self.noted = fields


def done(kind: str, target: str = "consumer-1") -> dict[str, Any]:
    """What a fault recorded, without its pauses."""
    stage = Notes()
    list(begin(cast("Stage", stage), Fault(0.0, kind, target, 0.1, 3600)))
    return stage.noted


@pytest.mark.parametrize("kind", ["kill-consumer", "stop-consumer", "freeze-consumer", "clock"])
def test_faults_of_stopped_processes_are_skipped(kind: str) -> None:
    assert done(kind)["skipped"] == "it does not run"


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any] | Exception | None]:
    """What another program finds, one result after the other; then nothing."""
    finds: list[dict[str, Any] | Exception | None] = []

    def trim(_stage: Stage, fault: Fault) -> dict[str, Any] | None:
        found = finds.pop(0) if finds else None
        if isinstance(found, Exception):
            raise found
        return found and found | {"at": fault.target}

    def repaired(_stage: Stage, topics: list[str]) -> Generator[float, None, foreign.Repaired]:
        yield 0.1
        kinds = {topic: {"entry-lost": 1} for topic in topics}
        return foreign.Repaired(1, kinds, {topic: ["entry-lost lisa 1-0"] for topic in topics})

    monkeypatch.setattr(foreign, "trim", trim)
    monkeypatch.setattr(foreign, "longest", lambda *_: "hard/lisa")
    monkeypatch.setattr(foreign, "repair", repaired)
    return finds


def test_foreign_damage_waits_for_messages(
    hand: list[dict[str, Any] | Exception | None],
) -> None:
    hand += [None, redis.ConnectionError("away"), {"messages": [7]}]
    noted = done("trim", "two/west")
    assert noted["messages"] == [7]
    assert noted["at"] == noted["target"] == "two/west"
    assert noted["repaired"] == {"two": {"entry-lost": 1}}
    assert "skipped" not in noted


def test_foreign_damage_moves_to_a_place_with_messages(
    hand: list[dict[str, Any] | Exception | None],
) -> None:
    hand += [*[None] * (FINDS_TRIES - 1), {"messages": [7]}]
    noted = done("trim", "two/west")
    assert noted["at"] == noted["target"] == "hard/lisa"


@pytest.mark.usefixtures("hand")
def test_foreign_damage_is_skipped_without_messages() -> None:
    assert done("trim", "two/west")["skipped"] == "there was nothing to take"


def test_a_full_disk_is_not_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(tmp_path / "ledger")
    monkeypatch.setattr(os, "write", lambda _file, data: len(data) - 1)
    with pytest.raises(AssertionError, match="only 2 of 3 bytes"):
        ledger.write(["it"])


CLOCKS = """
import time, datetime as module
right = module.datetime.now()
from tests.torture.ledger import shift_clock
shift_clock()
from datetime import UTC, datetime
said = [datetime.now(UTC).timestamp(), datetime.now().timestamp(), datetime.today().timestamp(),
        datetime.utcnow().replace(tzinfo=UTC).timestamp(), time.time(), time.time_ns() / 1e9]
assert isinstance(right, datetime)
assert isinstance(datetime.now(), datetime)
print([round((one - right.timestamp()) / 60) for one in said])
"""


@pytest.mark.parametrize("shift_s", [-3600, 0, 3600])
def test_every_clock_of_a_process_is_off(shift_s: int) -> None:
    env = {**os.environ, SHIFT: str(shift_s)}
    said = subprocess.run(
        [sys.executable, "-c", CLOCKS],
        cwd=ROOT,
        env=env,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert said.stdout.strip() == str([shift_s // 60] * 6)
