"""Distribution of journal ranges over tasks."""

from __future__ import annotations

import pytest

pytest.importorskip("pyspark")

from lisa.pipeline.source.journal_offsets import JournalRange, bundled
from lisa.pipeline.source.marks import START, Mark


def ranges(*counts: int) -> list[JournalRange]:
    return [JournalRange(f"t{n}", START, Mark("9-9", count)) for n, count in enumerate(counts)]


def test_a_thousand_small_journals_take_as_many_tasks_as_there_are_cores() -> None:
    made = bundled(ranges(*[2] * 1000), 4)
    assert [len(one.ranges) for one in made] == [250] * 4


def test_every_range_is_read_by_one_task() -> None:
    given = ranges(9_000, 1, 20_000, 0, 7_000, 300)
    made = bundled(given, 3)
    assert sorted(one.journal for part in made for one in part.ranges) == [
        one.journal for one in given
    ]
    assert max(len(part.ranges) for part in made) < len(given)


def test_a_task_that_is_not_worth_starting_is_not_planned() -> None:
    assert len(bundled(ranges(1, 1, 1), 8)) == 1
    assert bundled([], 8) == []
