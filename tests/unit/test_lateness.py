"""Percentiles of the lateness histogram."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lisa.core.model.lateness import (
    BOUNDS_MS,
    FORMER,
    LETTERS,
    bucket_counts,
    former,
    kept_ms,
    letter,
    narrowed,
    percentile,
)
from lisa.core.store.replies import summed

MINUTE_MS = 60_000


@given(
    st.lists(st.integers(0, 200_000_000_000), min_size=1, max_size=50),
    st.floats(0, 1, allow_nan=False),
)
def test_no_percentile_exceeds_a_highest_lateness_that_is_kept(
    lateness_us: list[int], fraction: float
) -> None:
    highest = max(map(kept_ms, lateness_us))
    found = percentile(Counter(map(letter, lateness_us)), fraction, highest or None)
    assert found is not None
    assert found <= (highest or 1_000)


def test_letters_keep_the_ranges_that_0_1_0_stored() -> None:
    assert LETTERS[:24] == "abcdefghijklmnopqrstuvwx"
    assert BOUNDS_MS[:24][-1] == MINUTE_MS
    assert len(LETTERS) == len(set(LETTERS)) == len(BOUNDS_MS) + 1
    assert not set(FORMER) & set(LETTERS)
    assert percentile({"y": 1}, 1) == 5 * MINUTE_MS
    assert percentile({"z": 2}, 0.5) == pytest.approx(32.5 * MINUTE_MS)
    assert bucket_counts({"y": 2, "z": 3, "A": 4})[25:] == [2, 0, 0, 0, 3, 0, 0, 0, 4]
    found = percentile({"z": 10, "B": 1}, 0.99, highest_ms=90_000)
    assert found is not None
    assert found > 5 * MINUTE_MS, "a highest lateness below an earlier count has no effect on it"
    assert percentile({"a": 1, "?": 9}, 0.5) == 0.125, "letters of later versions are ignored"
    assert percentile({"?": 9}, 0.5) is None


def test_a_former_letter_is_narrowed_by_the_time_since_due() -> None:
    assert former(letter(420_000_000)) == "z"
    assert narrowed("z", 421_000_000) == ("D", 421_000)
    assert narrowed("z", 9_000_000_000)[0] == "G", "at most the letter's bound"
    assert narrowed("z", 0)[0] == "D", "at least the letter's bound"
    assert narrowed("c", 421_000_000) == ("c", 0)
    assert narrowed("-", 5) == ("-", 0)


def test_shards_have_the_highest_lateness_of_any() -> None:
    assert summed([{"late_max@g": 5, "sent": 1}, {"late_max@g": 7, "sent": 1}]) == {
        "late_max@g": 7,
        "sent": 2,
    }
