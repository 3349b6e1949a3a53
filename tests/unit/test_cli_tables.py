"""Tables: columns are dropped by priority, words stay whole, rows are not collected."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lisa.cli.output import text_table
from lisa.cli.top import COLUMNS, DROPPED

ID = "0Q8FgswKTpnqrTLKpzLwn0"
TOP = [
    "orders",
    *["1,234"] * 5,
    "12.3",
    "12.3",
    "0.0",
    "0.82",
    "4.28",
    "in 29m 58s",
    "2030-01-01 00:00:00",
]


def shown(width: int | None) -> str:
    return "\n".join(text_table(COLUMNS, [TOP], width, DROPPED))


def test_a_wide_terminal_and_a_pipe_show_every_column() -> None:
    for width in (None, 200):
        head, rule, row = shown(width).splitlines()
        assert head.split("  ")[0] == "topic"
        assert all(name.strip() in head for name in COLUMNS)
        assert set(rule) == {"-", " "}
        assert "in 29m 58s" in row


def test_80_columns_show_what_matters_most_on_one_line_per_topic() -> None:
    head, _, row = shown(80).splitlines()
    assert max(len(head), len(row)) <= 80
    expected = "topic waiting ready in flight garbage in/s out/s p99 ms next due"
    assert " ".join(head.split()) == expected
    assert len(head) > 70
    assert row.split()[:3] == ["orders", "1,234", "1,234"]


def test_a_narrow_column_takes_the_room_that_a_wide_one_leaves() -> None:
    rows = [("x" * 30, "y" * 30, 1)]
    lines = text_table(["topic", "groups", "retry "], rows, 40, ["retry", "groups"])
    assert next(lines).split() == ["topic", "retry"]


@pytest.mark.parametrize("width", range(20, 120, 3))
def test_no_width_breaks_a_word_or_cuts_an_id(width: int) -> None:
    reason = "ValueError: the payment provider returned an unexpected-status-code 503"
    rows = [(ID, "shop", 10, reason)]
    text = "\n".join(text_table(["id", "group", "attempts ", "reason"], rows, width, ["group"]))
    assert ID in text
    assert {"ValueError:", "unexpected-status-code", "attempts"} <= set(text.split())
    if width >= 65:
        assert max(map(len, text.splitlines())) <= width


def test_numbers_are_aligned_right_and_wide_characters_count_twice() -> None:
    lines = list(text_table(["topic", "n "], [("量子", 1), ("orders", 1_000)]))
    assert lines == ["topic      n", "------  ----", "量子       1", "orders  1000"]


def test_rows_are_shown_while_the_others_are_still_read() -> None:
    read = 0

    def rows() -> Iterator[tuple[str, int]]:
        nonlocal read
        for read in range(1, 10_001):
            yield ("a" * (read // 1000 + 1), read)

    lines = text_table(["id", "n "], rows(), 80)
    for number, line in enumerate(lines, -1):
        if number > 0:
            assert line.split()[1] == str(number)
            assert read <= max(200, number)
    assert read == 10_000


def test_lines_for_a_pipe_are_never_wrapped() -> None:
    rows = [("short",)] * 300 + [("some words " * 50,)]
    assert len(list(text_table(["reason"], rows))) == 303


def test_cells_cannot_steer_the_terminal_and_may_have_lines() -> None:
    lines = list(text_table(["", ""], [("body", "a\nb\x1b[2J"), ("id", None)]))
    assert lines == ["body  a", "      b\\x1b[2J", "id"]
