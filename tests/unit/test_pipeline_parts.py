"""Parts of the pipeline without Spark: tasks and refused rows."""

from pathlib import Path

import pytest

pytest.importorskip("pyspark")

import pyarrow as pa

from lisa.core.model.errors import LisaError
from lisa.core.model.keys import WINDOW_HEADER
from lisa.pipeline.source import files, outcome, rows
from lisa.pipeline.source.events import START, Mark
from lisa.pipeline.source.journal import JournalRange, bundled
from lisa.pipeline.source.outcome import Refused, TaskResult, write_unwritten


def test_ranges_of_journals_are_bundled_into_tasks() -> None:
    """A thousand small journals take as many tasks as there are cores, tiny ones a single task."""

    def sizes(*counts: int, cores: int) -> list[int]:
        given = [JournalRange(f"t{n}", START, Mark("9-9", one)) for n, one in enumerate(counts)]
        made = bundled(given, cores)
        read = sorted(one.journal for part in made for one in part.ranges)
        assert read == sorted(one.journal for one in given), "each is read by one task"
        return [len(part.ranges) for part in made]

    assert sizes(*[2] * 1000, cores=4) == [250] * 4
    assert max(sizes(9_000, 1, 20_000, 0, 7_000, 300, cores=3)) < 6
    assert sizes(1, 1, 1, cores=8) == [3]
    assert sizes(cores=8) == []


def refuse(directory: Path, machine: str | None, reason: str = "too long") -> TaskResult:
    result = TaskResult()
    made = Refused(str(directory), "refused-1", result, machine=machine)
    made.add(None, 0, "orders", "a", reason)
    made.close()
    return result


def test_refused_rows_reach_the_directory_also_from_other_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, bad = refuse(tmp_path, files.machine()), tmp_path / "bad"
    assert not here.unwritten
    assert '"too long"' in (tmp_path / "refused-1.jsonl").read_text("utf-8")
    away = refuse(bad, "another")
    assert not bad.exists(), "the driver writes them"
    write_unwritten([away])
    assert '"too long"' in (bad / "refused-1.jsonl").read_text("utf-8")
    assert away.files == [str(bad / "refused-1.jsonl")]
    monkeypatch.setattr(outcome, "RETURNED_BYTES", 100)
    with pytest.raises(LisaError, match="that all machines share"):
        refuse(tmp_path, "another", "x" * 100)
    for scheme in ("s3", "s3a", "s3n"):
        system, path = files.found(f"{scheme}://bucket/folder?region=eu-central-1")
        assert (system.type_name, path) == ("s3", "bucket/folder")


def test_a_row_whose_header_names_no_window_is_refused() -> None:
    kind = pa.map_(pa.string(), pa.string())
    windows = ["9-17; tz=Europe/Berlin", "nonsense"]
    headers = pa.array([[(WINDOW_HEADER, one)] for one in windows], kind)
    batch = pa.RecordBatch.from_arrays([pa.array(["a", "b"]), headers], ["body", "headers"])
    assert list(rows.read_rows(batch, json_text=False).refused) == [1]


def test_keys_that_occur_twice_are_refused_and_kinds_of_bodies_checked() -> None:
    pairs = pa.map_(pa.string(), pa.string())
    twice, once = [("a", "1"), ("a", "2")], [("a", "1")]
    columns = {
        "body": pa.array([twice, once, once], pairs),
        "headers": pa.array([once, twice, None], pairs),
    }
    made = rows.read_rows(pa.RecordBatch.from_pydict(columns), json_text=False)
    assert made.refused == {
        0: "body: a map has the same key twice",
        1: "headers: a header occurs twice",
    }
    assert made.tails[2] == b'j0000{"a":"1"}'
    columns = {
        "body": pa.array([*[b"1"] * 5, b"\xff"]),
        "kind": pa.array(["j", "s", "b", None, "x", "s"]),
    }
    made = rows.read_rows(pa.RecordBatch.from_pydict(columns), json_text=False)
    assert made.tails[:4] == [b"j00001", b"s00001", b"b00001", b"b00001"]
    assert list(made.refused) == [4, 5]
