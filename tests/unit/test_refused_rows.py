"""Refused rows reach the directory that the user named, also from other machines."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from lisa.core.model.errors import LisaError
from lisa.pipeline.source import files, refused
from lisa.pipeline.source.outcome import TaskResult, write_unwritten
from lisa.pipeline.source.refused import Refused


def refuse(directory: Path, machine: str | None, reason: str = "too long") -> TaskResult:
    result = TaskResult()
    rows = Refused(str(directory), "refused-1", result, machine=machine)
    rows.add(None, 0, "orders", "a", reason)
    rows.close()
    return result


def test_on_the_drivers_machine_the_task_writes_the_file(tmp_path: Path) -> None:
    result = refuse(tmp_path, files.machine())
    assert not result.unwritten
    assert '"too long"' in (tmp_path / "refused-1.jsonl").read_text("utf-8")


def test_on_another_machine_the_driver_writes_the_file(tmp_path: Path) -> None:
    result = refuse(tmp_path / "bad", "another")
    assert not (tmp_path / "bad").exists()
    write_unwritten([result])
    assert '"too long"' in (tmp_path / "bad" / "refused-1.jsonl").read_text("utf-8")
    assert result.files == [str(tmp_path / "bad" / "refused-1.jsonl")]


def test_more_rows_than_a_task_returns_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refused, "RETURNED_BYTES", 100)
    with pytest.raises(LisaError, match="that all machines share"):
        refuse(tmp_path, "another", "x" * 100)


def test_s3a_and_s3_name_the_same_object() -> None:
    for scheme in ("s3", "s3a", "s3n"):
        system, path = files.found(f"{scheme}://bucket/folder?region=eu-central-1")
        assert (system.type_name, path) == ("s3", "bucket/folder")
