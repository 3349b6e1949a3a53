"""Late policies and ramps as users write them."""

from __future__ import annotations

from datetime import timedelta

import pytest

from lisa import InvalidMessage, LateAction, LatePolicy, Ramp
from lisa.core.model.late import late_text, message_policy, split_policy

TEN_MINUTES = LatePolicy(timedelta(minutes=10), LateAction.SKIP)


def test_a_late_policy_has_several_forms_and_is_shown_as_it_is_written() -> None:
    for value in (
        TEN_MINUTES,
        {"after": "10m", "then": "skip"},
        {"after": timedelta(minutes=10), "then": LateAction.SKIP},
        "  skip  after 600s ",
    ):
        assert LatePolicy.parse(value) == TEN_MINUTES
    shown = (
        "skip after 1h30m",
        "skip after 5410s",
        "skip after 90500ms",
        "garbage after 10d",
        "run",
    )
    for text in shown:
        policy = LatePolicy.parse(text)
        assert str(policy) == text
        assert LatePolicy.decode(policy.encode()) == policy
        assert late_text(policy.encode()) == text


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (5, "not a late policy: 5"),
        ("", "not a late policy"),
        ("drop after 5m", "then is one of run, skip, garbage, collapse, not 'drop'"),
        ("skip", "skip needs after, as in 'skip after 10m'"),
        ({"then": "skip", "before": "5m"}, "not a late policy"),
        ({"after": "5m"}, "then is one of"),
        ("skip after 10", "unit"),
        ("skip after 500ms", "after is 1s to"),
    ],
)
def test_other_late_policies_are_refused(value: object, why: str) -> None:
    with pytest.raises(InvalidMessage, match=why):
        LatePolicy.parse(value)


@pytest.mark.parametrize(
    ("retry", "late", "stored"),
    [
        (None, None, None),
        ("0,5~0.2", None, "0,5~0.2"),
        ("", None, ""),
        (None, "0,run", "*;0,run"),
        ("", "0,run", ";0,run"),
        ("0,5~0.2", "0,run", "0,5~0.2;0,run"),
    ],
)
def test_a_message_stores_both_policies_in_one_text(
    retry: str | None, late: str | None, stored: str | None
) -> None:
    assert message_policy(retry, late) == stored
    assert split_policy(stored) == (retry, late)


@pytest.mark.parametrize(
    ("text", "shown", "stored"),
    [
        ("200/s", "200/s", "200,1000,oldest"),
        ("30 / m, oldest first", "30/m", "30,60000,oldest"),
        ("1/h newest", "1/h newest first", "1,3600000,newest"),
    ],
)
def test_a_ramp_is_a_rate_and_an_order(text: str, shown: str, stored: str) -> None:
    ramp = Ramp.parse(text)
    assert str(ramp) == shown
    assert ramp.encode() == stored
    assert Ramp.decode(stored) == ramp == Ramp.parse(ramp)


def test_a_ramp_knows_how_long_a_backlog_takes() -> None:
    assert Ramp.parse("200/s").lasts(100_000) == timedelta(seconds=500)
    assert Ramp.parse("3/h").lasts(1) == timedelta(minutes=20)


@pytest.mark.parametrize(
    "value", ["200", "0/s", "200/d", "200/s first", 200, "2000000/s", "\u0665/s"]
)
def test_other_ramps_are_refused(value: object) -> None:
    with pytest.raises(InvalidMessage, match="ramp"):
        Ramp.parse(value)
