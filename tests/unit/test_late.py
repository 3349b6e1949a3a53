"""Late policies and ramps as users write them, and percentiles of lateness."""

from collections import Counter
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lisa import InvalidMessage, LateAction, LatePolicy, Ramp
from lisa.core.model.late import late_text, message_policy, split_policy
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
TEN_MINUTES = LatePolicy(timedelta(minutes=10), LateAction.SKIP)

# Policies


def test_a_late_policy_has_several_forms_and_is_shown_as_it_is_written() -> None:
    for value in (
        TEN_MINUTES,
        {"after": "10m", "then": "skip"},
        {"after": timedelta(minutes=10), "then": LateAction.SKIP},
        "  skip  after 600s ",
    ):
        assert LatePolicy.parse(value) == TEN_MINUTES
    for text in ("skip after 1h30m", "skip after 90500ms", "garbage after 10d", "run"):
        policy = LatePolicy.parse(text)
        assert str(policy) == text
        assert LatePolicy.decode(policy.encode()) == policy
        assert late_text(policy.encode()) == text


REFUSED: list[tuple[object, str]] = [
    (5, "not a late policy: 5"),
    ("", "not a late policy"),
    ("drop after 5m", "then is one of run, skip, garbage, collapse, not 'drop'"),
    ("skip", "skip needs after, as in 'skip after 10m'"),
    ({"then": "skip", "before": "5m"}, "not a late policy"),
    ({"after": "5m"}, "then is one of"),
    ("skip after 10", "unit"),
    ("skip after 500ms", "after is 1s to"),
]
NO_RAMPS = ["200", "0/s", "200/d", "200/s first", 200, "2000000/s", "\u0665/s"]


def test_other_late_policies_and_ramps_are_refused() -> None:
    for value, why in REFUSED:
        with pytest.raises(InvalidMessage, match=why):
            LatePolicy.parse(value)
    for no_ramp in NO_RAMPS:
        with pytest.raises(InvalidMessage, match="ramp"):
            Ramp.parse(no_ramp)


STORED: dict[str | None, tuple[str | None, str | None, str | None]] = {
    # retry and late policy of a message, and its cost and slack, by the text that stores all
    None: (None, None, None),
    "0,5~0.2": ("0,5~0.2", None, None),
    "": ("", None, None),
    "*;0,run": (None, "0,run", None),
    ";0,run": ("", "0,run", None),
    "0,5~0.2;0,run": ("0,5~0.2", "0,run", None),
    "*;;5,": (None, None, "5,"),
    ";;,0": ("", None, ",0"),
    "0,5~0.2;0,run;5,1000": ("0,5~0.2", "0,run", "5,1000"),
}


def test_a_message_stores_all_policies_in_one_text() -> None:
    for stored, policies in STORED.items():
        assert message_policy(*policies) == stored
        assert split_policy(stored) == policies


def test_a_ramp_is_a_rate_and_an_order_and_knows_how_long_a_backlog_takes() -> None:
    for text, shown, stored in (
        ("200/s", "200/s", "200,1000,oldest"),
        ("30 / m, oldest first", "30/m", "30,60000,oldest"),
        ("1/h newest", "1/h newest first", "1,3600000,newest"),
    ):
        ramp = Ramp.parse(text)
        assert (str(ramp), ramp.encode()) == (shown, stored)
        assert Ramp.decode(stored) == ramp == Ramp.parse(ramp)
    assert Ramp.parse("200/s").lasts(100_000) == timedelta(seconds=500)
    assert Ramp.parse("3/h").lasts(1) == timedelta(minutes=20)


# Percentiles


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
    shards = [{"late_max@g": 5, "sent": 1}, {"late_max@g": 7, "sent": 1}]
    assert summed(shards) == {"late_max@g": 7, "sent": 2}
