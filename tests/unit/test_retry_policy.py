from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lisa.core.model.errors import InvalidMessage
from lisa.core.model.retry_policy import DEFAULT_POLICY, MAX_RETRIES, RetryPolicy


@pytest.mark.parametrize(
    ("written", "delays_ms", "jitter"),
    [
        ("0,0,2m,10m", (0, 0, 120_000, 600_000), 0.0),
        ("1s, 2s~0.2", (1_000, 2_000), 0.2),
        ("", (), 0.0),
        ([], (), 0.0),
        ([timedelta(0), "2m", 0], (0, 120_000, 0), 0.0),
        ((timedelta(microseconds=1),), (1,), 0.0),
        ({"fixed": {"delay": "20s", "count": 3}}, (20_000,) * 3, 0.0),
        ({"fixed": {"delay": "20s"}}, (20_000,) * 10, 0.0),
        (
            {"exponential": {"initial": "1s", "factor": 3, "cap": "20s", "count": 5}},
            (1_000, 3_000, 9_000, 20_000, 20_000),
            0.0,
        ),
        (
            {"exponential": {"initial": "1ms", "factor": 1.5, "count": 4, "jitter": 0.1}},
            (1, 2, 3, 5),
            0.1,
        ),
        ({"delays": ["1s", "5s"], "jitter": 1}, (1_000, 5_000), 1.0),
        ({"delays": "1s,5s~0.5"}, (1_000, 5_000), 0.5),
    ],
)
def test_every_form_compiles_to_delays(
    written: object, delays_ms: tuple[int, ...], jitter: float
) -> None:
    assert RetryPolicy.parse(written) == RetryPolicy(delays_ms, jitter)


@pytest.mark.parametrize(
    "bad",
    ["banana", "1s,", "120000", "1s~2", "1s~x", "1s~nan", [5], [timedelta(-1)], 5, None, b"1s"]
    + [timedelta(1), {}, {"fixed": 5}, {"fixed": {}}, {"fixed": {"delay": "1s", "cap": "2s"}}]
    + [{"fixed": {"delay": "1s"}, "delays": []}, {"delays": [], "extra": 1}, {"linear": {}}]
    + [{"fixed": {"delay": "1s", "count": n}} for n in (-1, MAX_RETRIES + 1, "3", True, 1.5)]
    + [{"exponential": {"initial": "2h", "cap": "1h"}}]
    + [{"exponential": {"initial": "1s", "factor": f}} for f in (0.5, float("nan"), "x", 10**400)]
    + [["1s"] * (MAX_RETRIES + 1), ["4000d"]],
)
def test_invalid_policies_are_refused(bad: Any) -> None:
    with pytest.raises(InvalidMessage):
        RetryPolicy.parse(bad)


def test_the_encoding_for_scripts() -> None:
    assert RetryPolicy((0, 0, 120_000), 0.2).encode() == "0,0,120000~0.2"
    assert RetryPolicy((5,)).encode() == "5"
    assert RetryPolicy(()).encode() == ""
    assert RetryPolicy((), 0.5).encode() == ""
    assert DEFAULT_POLICY.encode() == ",".join(["20000"] * 10)


@given(
    st.lists(st.integers(0, 10**11), min_size=1, max_size=50),
    st.floats(min_value=0, max_value=1, allow_subnormal=False),
)
def test_decoding_reverses_encoding(delays: list[int], jitter: float) -> None:
    policy = RetryPolicy(tuple(delays), jitter)
    assert RetryPolicy.decode(policy.encode()) == policy


@pytest.mark.parametrize("bad", ["x", "1,,2", "1~", "-5", "1.5"])
def test_a_damaged_encoding_is_refused(bad: str) -> None:
    with pytest.raises(InvalidMessage):
        RetryPolicy.decode(bad)


def test_a_steep_exponential_stays_at_its_cap() -> None:
    policy = RetryPolicy.exponential(initial=timedelta(seconds=1), factor=1_000, count=1_000)
    assert policy.delays_ms[:2] == (1_000, 1_000_000)
    assert set(policy.delays_ms[2:]) == {3_600_000}


def test_too_many_delays_are_not_all_read() -> None:
    """A request may have a million of them."""
    with pytest.raises(InvalidMessage, match="1001 retries are too many"):
        RetryPolicy.parse("1s," * (MAX_RETRIES + 1) + "not a delay")
