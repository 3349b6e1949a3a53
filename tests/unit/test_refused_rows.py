"""Refused rows reach the directory that the user named, also from other machines."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pyspark")

import pyarrow as pa

from lisa.core.model.errors import LisaError
from lisa.core.model.keys import WINDOW_HEADER
from lisa.pipeline.source import files, refused, rows
from lisa.pipeline.source.outcome import TaskResult, write_unwritten
from lisa.pipeline.source.refused import Refused


def refuse(directory: Path, machine: str | None, reason: str = "too long") -> TaskResult:
    result = TaskResult()
    made = Refused(str(directory), "refused-1", result, machine=machine)
    made.add(None, 0, "orders", "a", reason)
    made.close()
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


def test_a_row_whose_header_names_no_window_is_refused() -> None:
    kind = pa.map_(pa.string(), pa.string())
    windows = ["9-17; tz=Europe/Berlin", "nonsense"]
    headers = pa.array([[(WINDOW_HEADER, one)] for one in windows], kind)
    batch = pa.RecordBatch.from_arrays([pa.array(["a", "b"]), headers], ["body", "headers"])
    assert list(rows.read_rows(batch, json_text=False).refused) == [1]
