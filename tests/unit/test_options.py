"""Options of topics and retry policies: their forms, what is refused, and how they are shown."""

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lisa.core.model.errors import ConfigError, InvalidMessage
from lisa.core.model.lanes import KeyLimits, KeyOrder, Rate
from lisa.core.model.options import (
    LANE_OPTIONS,
    MIN_RETENTION,
    OPTIONS,
    PRODUCER_RETRY_TIME,
    TopicOptions,
    encode,
    field_of,
    group_options,
    warning,
)
from lisa.core.model.retry_policy import DEFAULT_POLICY, MAX_RETRIES, RetryPolicy
from tests.generators import generator

FORMS: dict[str, tuple[Any, str, str]] = {
    "ack_timeout": (timedelta(seconds=30), "30s", "30000"),
    "retry_delays": ([timedelta(0), timedelta(minutes=2)], "0,2m", "0,120000"),
    "max_ready": (5, "5", "5"),
    "capacity": (100, "100", "100"),
    "retention": (timedelta(0), "0", "0"),
    "garbage_keep": (timedelta(days=1), "1d", "86400000"),
    "max_body_bytes": (10, "10", "10"),
    "max_groups": (7, "7", "7"),
    "rate": (Rate(10, timedelta(minutes=1), 3), "10/m, burst 3", "10,60000,3"),
    "key_rate": (Rate(5, timedelta(seconds=90)), "5 per 90s", "5,90000,1"),
    "concurrency": (100, "100", "100"),
    "key_concurrency": (1, "1", "1"),
    "order": (KeyOrder.HOLD, "hold", "hold"),
    "fair": (True, "yes", "1"),
    "slack": (timedelta(minutes=5), "5m", "300000"),
    "max_per_key": (1000, "1000", "1000"),
    "paused": (True, "yes", "1"),
}
"""Values of options, as text of a command line, and in the topic's hash."""

EVERY = {name: value for name, (value, _, _) in FORMS.items()}
STORED = {name: stored for name, (_, _, stored) in FORMS.items()}


def test_values_and_text_are_stored_alike_and_read_again() -> None:
    assert encode(EVERY) == STORED
    assert encode({name.replace("_", "-"): text for name, (_, text, _) in FORMS.items()}) == STORED
    read = TopicOptions(**EVERY | {"retry_delays": RetryPolicy((0, 120_000))})
    in_bytes = {key.encode(): value.encode() for key, value in STORED.items()}
    assert TopicOptions.from_hash(STORED) == TopicOptions.from_hash(in_bytes) == read
    empty: dict[bytes, bytes] = {}
    options = TopicOptions.from_hash(empty)
    assert options == TopicOptions()
    assert options.ack_timeout == timedelta(seconds=10)
    assert options.retry_delays.delays_ms == (20_000,) * 10
    assert (options.max_ready, options.capacity, options.paused) == (10_000, None, False)
    for unlimited in (None, "", "none", "unlimited"):
        assert encode({"capacity": unlimited}) == {"capacity": ""}


def test_a_body_limit_that_blocks_the_server_causes_a_warning() -> None:
    limit = 8 * 1024 * 1024
    said = warning("orders", encode({"max_body_bytes": limit + 1}))
    assert said is not None
    assert "'orders'" in said
    assert f"{limit + 1} bytes" in said
    assert warning("orders", encode({"max_body_bytes": limit})) is None


def test_unknown_fields_are_ignored_and_damaged_ones_named() -> None:
    assert TopicOptions.from_hash({"colour": "blue", "max_ready": "7"}).max_ready == 7
    with pytest.raises(ConfigError, match="max_ready is unreadable: 'many'"):
        TopicOptions.from_hash({"max_ready": "many"})
    with pytest.raises(ConfigError, match="ack_timeout is unreadable"):
        TopicOptions.from_hash({"ack_timeout": "9" * 30})


def test_a_group_has_its_own_values_of_the_options_of_lanes() -> None:
    given = {"key-rate@fast": "2/s", "order": "hold", "order@fast": "none", "fair@fair": True}
    stored = encode(given)
    assert stored == {
        "key_rate@fast": "2,1000,1",
        "order": "hold",
        "order@fast": "",
        "fair@fair": "1",
    }
    assert group_options(stored) == {
        "fast": {"key_rate": Rate(2), "order": None},
        "fair": {"fair": True},
    }
    stored |= {
        "declared:order@fast": "hold",
        "lanes": "1",
        "lanes_changed": "x",
        "max_ready@fast": "7",
    }
    assert TopicOptions.from_hash(stored) == TopicOptions(order=KeyOrder.HOLD)
    assert TopicOptions.from_hash(stored, "fast") == TopicOptions(key_rate=Rate(2))
    assert TopicOptions.from_hash(stored, "slow") == TopicOptions(order=KeyOrder.HOLD)
    assert field_of("key-rate", "fast") == field_of("key_rate@fast") == "key_rate@fast"
    assert set(LANE_OPTIONS) < set(OPTIONS)
    for bad, said in {
        "max_per_key@fast": "max_per_key applies to all groups",
        "key_rat@fast": "did you mean key_rate",
        "key_rate@": "group '' is not allowed",
    }.items():
        with pytest.raises(ConfigError, match=said):
            encode({bad: "1"})
    with pytest.raises(ConfigError, match="slack@fast is unreadable"):
        group_options({"slack@fast": "x"})


def test_rates_have_bounds_and_are_shared_among_shards() -> None:
    assert Rate.parse(" 100 / 1m30s , burst 7") == Rate(100, timedelta(seconds=90), 7)
    assert str(Rate.parse("24 per 24h")) == "24/d"
    for bad, said in {
        "1000001/s": "1 to 1,000,000 messages",
        "1 per 0": "per 1ms to 30d, not per 0ms",
        "1 per 31d": "per 1ms to 30d, not per 31d",
        "1/s, burst 100001": "burst of a rate is 1 to 100,000",
        "1 per 30d, burst 3475": "burst of 3,475 is too large",
        "1 per x": "not a duration",
    }.items():
        with pytest.raises(InvalidMessage, match=said):
            Rate.parse(bad)
    assert Rate(100, burst=10).share(4) == Rate(25, burst=3)
    assert Rate(10, burst=10).share(4) == Rate(10, timedelta(seconds=4), 3)
    widest = Rate.parse("1 per 30d, burst 3474").share(64)
    assert widest.burst * widest.period / timedelta(microseconds=1) < 2**53


def test_limits_of_a_key_are_stored_as_text() -> None:
    for limits, stored in (
        (KeyLimits(), ""),
        (KeyLimits(weight=3), "weight=3"),
        (KeyLimits(Rate(2), 4, 1), "rate=2,1000,1;concurrency=4;weight=1"),
    ):
        assert limits.encode() == stored
        assert KeyLimits.decode(stored) == limits
    assert KeyLimits.parse("10/m, burst 3", 4) == KeyLimits(Rate(10, timedelta(minutes=1), 3), 4)
    for bad in ({"rate": "2"}, {"concurrency": 0}, {"weight": 1_001}, {"weight": "2"}):
        with pytest.raises(InvalidMessage, match=r"not a rate|from 1 to 1,000"):
            KeyLimits.parse(**bad)


def test_a_bad_name_or_value_is_refused_by_name() -> None:
    bad: dict[str, list[object]] = {
        "ack_timeout": [timedelta(milliseconds=99), 0, "10", timedelta(seconds=-1), "31d"],
        "retry_delays": ["banana"],
        "max_ready": [0, True, 1.5, None],
        "capacity": [0, "-5"],
        "retention": [timedelta(seconds=19), "1ms"],
        "garbage_keep": [0],
        "max_body_bytes": [10**12],
        "max_groups": [0, 1_001],
        "rate": [10, "10", "0/s", "1/w", "10/m burst 3", "1/s, burst 0", Rate(0)],
        "order": ["strict", True],
        "slack": ["31d", "5"],
        "paused": ["maybe", None],
    }
    for name, values in bad.items():
        for value in values:
            with pytest.raises(ConfigError, match=name):
                encode({name: value})
    for wrong, said in (
        ({"ack_timout": "1s"}, "did you mean ack_timeout"),
        ({"zzz": 1}, "the options are ack_timeout, retry_delays"),
        ({"max-ready": 1, "max_ready": 2}, "twice"),
    ):
        with pytest.raises(ConfigError, match=said):
            encode(wrong)
    assert MIN_RETENTION == 2 * PRODUCER_RETRY_TIME, "or no retention"
    assert encode({"retention": MIN_RETENTION}) == {"retention": "20000"}


def test_reference_and_example_match_the_options() -> None:
    options = generator("generate_options")
    for path, generated in ((options.PAGE, options.page()), (options.EXAMPLE, options.example())):
        assert path.read_text(encoding="utf-8") == generated, "run: python docs/generate_options.py"


def test_values_are_shown_in_words_and_plain_ones_are_accepted_again() -> None:
    options = TopicOptions.from_hash(STORED | {"retry_delays": "0,120000~0.2", "capacity": ""})
    plain = {name: one.kind.plain(getattr(options, name)) for name, one in OPTIONS.items()}
    assert TopicOptions.from_hash(encode(plain)) == options
    assert (plain["retry_delays"], plain["capacity"]) == ("0s,2m~0.2", "unlimited")
    options = TopicOptions.from_hash({"retry_delays": "5000,5000,60000~0.5", "max_ready": "12345"})
    shown = {name: one.kind.show(getattr(options, name)) for name, one in OPTIONS.items()}
    assert shown["retry_delays"] == "2 x 5s, 1m, jitter 0.5"
    assert (shown["max_ready"], shown["capacity"]) == ("12,345", "unlimited")
    assert (shown["journal"], shown["garbage_keep"]) == ("no", "90d")


SHOWN: dict[str, list[str]] = {
    "retry_delays": ["", "20000,20000,120000~0.123456789", "90061001", "0,0,3600000~1.0"],
    "max_ready": ["1", "1000", "1234567"],
    "capacity": ["", "12345"],
    "garbage_keep": ["1", "90061001", "86400000", "5405000", "3660000"],
    "promote_interval": ["0", "2"],
    "late": ["", "600000,skip", "3661001,garbage", "0,run"],
    "ramp": ["", "1000,1000,newest", "5,60000,oldest"],
    "rate": ["", "10,60000,3", "5,90000,1", "1000000,1,100000", "1,2592000000,3474"],
    "order": ["", "continue", "hold"],
    "slack": ["0", "1", "2592000000"],
    "window": ["", "not 22-8; not sun; tz=@timezone|Europe/Berlin"],
    "paused": ["0", "1"],
}


def test_what_is_shown_of_an_option_can_be_read_back() -> None:
    for name, one in OPTIONS.items():
        for stored in [*SHOWN.get(name, []), one.kind.encode(one.default)]:
            shown = one.kind.show(one.kind.decode(stored))
            assert one.kind.encode(shown) == stored, (name, shown)
            assert encode({name: shown}) == {name: stored}


STEEP = {"exponential": {"initial": "1s", "factor": 3, "cap": "20s", "count": 5}}
JITTERED = {"exponential": {"initial": "1ms", "factor": 1.5, "count": 4, "jitter": 0.1}}


def test_every_form_of_a_retry_policy() -> None:
    forms: tuple[tuple[object, tuple[int, ...], float], ...] = (
        ("0,0,2m,10m", (0, 0, 120_000, 600_000), 0.0),
        ("1s, 2s~0.2", (1_000, 2_000), 0.2),
        ("", (), 0.0),
        ("none", (), 0.0),
        ("3 x 1m 30s, 0s, jitter 0.2", (90_000, 90_000, 90_000, 0), 0.2),
        ([timedelta(0), "2m", 0], (0, 120_000, 0), 0.0),
        ((timedelta(microseconds=1),), (1,), 0.0),
        ({"fixed": {"delay": "20s", "count": 3}}, (20_000,) * 3, 0.0),
        ({"fixed": {"delay": "20s"}}, (20_000,) * 10, 0.0),
        (STEEP, (1_000, 3_000, 9_000, 20_000, 20_000), 0.0),
        (JITTERED, (1, 2, 3, 5), 0.1),
        ({"delays": ["1s", "5s"], "jitter": 1}, (1_000, 5_000), 1.0),
        ({"delays": "1s,5s~0.5"}, (1_000, 5_000), 0.5),
    )
    for written, delays_ms, jitter in forms:
        assert RetryPolicy.parse(written) == RetryPolicy(delays_ms, jitter)
    policy = RetryPolicy.exponential(initial=timedelta(seconds=1), factor=1_000, count=1_000)
    assert policy.delays_ms[:2] == (1_000, 1_000_000)
    assert set(policy.delays_ms[2:]) == {3_600_000}, "the cap"
    with pytest.raises(InvalidMessage, match="1001 retries are too many"):  # not all are read
        RetryPolicy.parse("1s," * (MAX_RETRIES + 1) + "not a delay")


@pytest.mark.parametrize(
    "bad",
    [
        "banana",
        "1s,",
        "0 x 1s",
        "x 1s",
        "1001 x 1s",
        "1s x 2",
        "1s, jitter",
        "120000",
        "1s~2",
        "1s~x",
        "1s~nan",
        [5],
        [timedelta(-1)],
        5,
        None,
        b"1s",
    ]
    + [timedelta(1), {}, {"fixed": 5}, {"fixed": {}}, {"fixed": {"delay": "1s", "cap": "2s"}}]
    + [{"fixed": {"delay": "1s"}, "delays": []}, {"delays": [], "extra": 1}, {"linear": {}}]
    + [{"fixed": {"delay": "1s", "count": n}} for n in (-1, MAX_RETRIES + 1, "3", True, 1.5)]
    + [{"exponential": {"initial": "2h", "cap": "1h"}}]
    + [{"exponential": {"initial": "1s", "factor": f}} for f in (0.5, float("nan"), "x", 10**400)]
    + [["1s"] * (MAX_RETRIES + 1), ["4000d"]],
)
def test_invalid_retry_policies_are_refused(bad: Any) -> None:
    with pytest.raises(InvalidMessage):
        RetryPolicy.parse(bad)


@given(
    st.lists(st.integers(0, 10**11), min_size=1, max_size=50),
    st.floats(min_value=0, max_value=1, allow_subnormal=False),
)
def test_decoding_a_retry_policy_reverses_encoding(delays: list[int], jitter: float) -> None:
    policy = RetryPolicy(tuple(delays), jitter)
    assert RetryPolicy.decode(policy.encode()) == policy


def test_the_encoding_of_a_retry_policy() -> None:
    assert RetryPolicy((0, 0, 120_000), 0.2).encode() == "0,0,120000~0.2"
    assert RetryPolicy((), 0.5).encode() == ""
    assert DEFAULT_POLICY.encode() == ",".join(["20000"] * 10)
    for bad in ("x", "1,,2", "1~", "-5", "1.5"):
        with pytest.raises(InvalidMessage):
            RetryPolicy.decode(bad)
