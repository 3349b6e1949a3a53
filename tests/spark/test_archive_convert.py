"""Archives in files of the layout of earlier versions: read, and converted in place."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as sf

from lisa.core.model.errors import ConfigError
from lisa.pipeline.archive import open_archive
from lisa.pipeline.archive.conversion import convert
from lisa.pipeline.archive.fold import fold_lives
from lisa.pipeline.archive.lives import LIFE_SCHEMA_FIELDS, lives, with_gone
from lisa.pipeline.archive.old_layout import OldArchive
from lisa.pipeline.archive.reading import day_of, with_log_columns
from lisa.pipeline.archive.writing import FileWriter
from tests.spark.stories import Stories
from tests.spark.test_archive_files import check, entries
from tests.spark.test_archive_fold import expected, frame, told

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from click.testing import Result
    from pyspark.sql import DataFrame, SparkSession

    from tests.spark.stories import Event


def write_old(spark: SparkSession, where: Path, first: list[Event], later: list[Event]) -> None:
    """An archive as version 0.1 wrote it: some events folded, later ones not; some files merged.

    One day and topic, so that the files' own lists stay short.
    """
    (where / "_lisa").mkdir(parents=True)

    def files(rows: DataFrame, root: str) -> dict[str, int]:
        before = set(where.rglob("*.parquet"))
        writer = rows.write.mode("append").partitionBy("day", "topic")
        writer.parquet(str(where / root))
        new = set(where.rglob("*.parquet")) - before
        return {str(one.relative_to(where)): one.stat().st_size for one in new}

    tagged = with_gone(lives(frame(spark, first)))
    ended = fold_lives(tagged.where("gone").drop("gone"))
    ended = ended.withColumn("day", day_of(sf.col("settled_at")))
    merged = files(with_log_columns(frame(spark, first)), "_lisa/compacted/message_log")
    merged |= files(ended, "messages")
    unfolded = files(with_log_columns(frame(spark, later)), "message_log")
    live = tagged.where("not gone").drop("gone", *LIFE_SCHEMA_FIELDS)
    live = live.withColumn("number", sf.lit(0).cast("long"))
    live.write.parquet(str(where / "_lisa" / "live" / "00000007-aa"))
    live_files = (where / "_lisa" / "live").rglob("*.parquet")
    gone = "message_log/day=2026-09-21/topic=orders/gone.parquet"
    last = later[-1]
    offset = (f"{last['at']}-{last['seq']}", last["number"])
    manifest = {
        "version": 8,
        "at_ms": 1_790_000_000_000,
        "queries": {"q": 1},
        "offsets": {"orders": offset},
        "topics": {"orders": ({"journal": "1"}, ("lisa",))},
        "gaps": [],
        "unfolded": unfolded,
        "live": [str(one.relative_to(where)) for one in live_files],
        "live_events": live.count(),
        "swaps": [],
        "dropped": [],
        "base": 5,
        "added": unfolded,
        "removed": [gone],
    }
    (where / "_lisa" / "files-00000005.json").write_text(json.dumps(merged | {gone: 1}))
    (where / "_lisa" / "00000007.json").write_text("{}")
    (where / "_lisa" / "00000008.json").write_text(json.dumps(manifest))


def test_an_old_archive_is_read_and_converted(
    spark: SparkSession, tmp_path: Path, pipeline: Callable[..., Result]
) -> None:
    where, journal = tmp_path / "archive", Stories("orders")
    first, later, new = journal.extend(60), journal.extend(30), journal.extend(20)
    write_old(spark, where, first, later)
    old = open_archive(spark, str(where))
    assert isinstance(old, OldArchive)
    assert len(entries(old.log())) == len(first + later)
    assert told(old.messages()) == expected(first + later)
    with pytest.raises(ConfigError, match=f"convert it once: lisa pipeline convert {where}"):
        FileWriter(spark, str(where))
    (where / "_lisa" / "checkpoint").mkdir()

    done = pipeline("convert", str(where), "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.output.splitlines()[-1])["events"] == len(first + later)
    check(spark, str(where), first + later)
    assert open_archive(spark, str(where)).topics()["orders"].groups == ("lisa",)
    assert not [one for one in where.rglob("*") if "topic=" in str(one)]
    names = {one.name for one in (where / "_lisa").iterdir()}
    assert names == {"checkpoint", "live", "staging", "state"}
    again = pipeline("convert", str(where))
    assert "has the present layout already" in again.output
    writer = FileWriter(spark, str(where))
    assert writer.write(frame(spark, later), 1, "q")[0] == 0  # the last batch before the conversion
    writer.write(frame(spark, new), 2, "q")
    check(spark, str(where), first + later + new)


@pytest.mark.parametrize("step", ["fold", "remove"])
def test_an_interrupted_conversion_is_repeated(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    where, journal = tmp_path / "archive", Stories("orders")
    first, later = journal.extend(30), journal.extend(10)
    write_old(spark, where, first, later)

    def dies(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        name = "remove" if step == "remove" else "FileWriter.fold"
        patched.setattr(f"lisa.pipeline.archive.conversion.{name}", dies)
        with pytest.raises(KeyboardInterrupt):
            convert(spark, str(where))
    check(spark, str(where), first + later)
    assert convert(spark, str(where)) == len(first + later)
    check(spark, str(where), first + later)
    assert convert(spark, str(where)) == 0


def test_there_is_nothing_to_convert(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no archive in"):
        convert(spark, str(tmp_path))
