from datetime import timedelta
from typing import Any

import pytest

from lisa.core.errors import ConfigError
from lisa.core.options import MIN_RETENTION, PRODUCER_RETRY_TIME, TopicOptions, encode
from lisa.core.retry_policy import RetryPolicy

EVERY: dict[str, Any] = {
    "ack_timeout": timedelta(seconds=30),
    "retry_delays": [timedelta(0), timedelta(minutes=2)],
    "max_ready": 5,
    "capacity": 100,
    "retention": timedelta(0),
    "garbage_keep": timedelta(days=1),
    "max_body_bytes": 10,
    "paused": True,
}


def test_the_form_of_the_hash() -> None:
    assert encode(EVERY) == {
        "ack_timeout": "30000",
        "retry_delays": "0,120000",
        "max_ready": "5",
        "capacity": "100",
        "retention": "0",
        "garbage_keep": "86400000",
        "max_body_bytes": "10",
        "paused": "1",
    }
    assert encode({}) == {}


def test_text_from_a_command_line_means_the_same() -> None:
    text = {
        "ack-timeout": "30s",
        "retry-delays": "0,2m",
        "max-ready": "5",
        "capacity": "100",
        "retention": "0",
        "garbage-keep": "1d",
        "max-body-bytes": "10",
        "paused": "yes",
    }
    assert encode(text) == encode(EVERY)


@pytest.mark.parametrize("as_bytes", [False, True])
def test_what_is_written_is_read_back(*, as_bytes: bool) -> None:
    stored: Any = encode(EVERY)
    if as_bytes:
        stored = {key.encode(): value.encode() for key, value in stored.items()}
    assert TopicOptions.from_hash(stored) == TopicOptions(
        **{**EVERY, "retry_delays": RetryPolicy((0, 120_000))}
    )


def test_an_empty_hash_is_the_defaults() -> None:
    empty: dict[bytes, bytes] = {}
    options = TopicOptions.from_hash(empty)
    assert options == TopicOptions()
    assert options.ack_timeout == timedelta(seconds=10)
    assert options.retry_delays.delays_ms == (20_000,) * 10
    assert (options.max_ready, options.capacity, options.paused) == (10_000, None, False)


def test_unlimited_and_not_paused_can_be_set_again() -> None:
    for unlimited in (None, "", "none", "unlimited"):
        stored = encode({"capacity": unlimited, "paused": False})
        assert stored == {"capacity": "", "paused": "0"}
    assert TopicOptions.from_hash(stored) == TopicOptions()


def test_fields_of_other_versions_are_passed_over_and_damaged_ones_named() -> None:
    assert TopicOptions.from_hash({"colour": "blue", "max_ready": "7"}).max_ready == 7
    with pytest.raises(ConfigError, match="max_ready is unreadable: 'many'"):
        TopicOptions.from_hash({"max_ready": "many"})
    with pytest.raises(ConfigError, match="ack_timeout is unreadable"):
        TopicOptions.from_hash({"ack_timeout": "9" * 30})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ack_timeout", timedelta(milliseconds=99)),
        ("ack_timeout", 0),
        ("ack_timeout", "10"),
        ("ack_timeout", timedelta(seconds=-1)),
        ("ack_timeout", "31d"),
        ("retry_delays", "banana"),
        ("max_ready", 0),
        ("max_ready", True),
        ("max_ready", 1.5),
        ("max_ready", None),
        ("capacity", 0),
        ("capacity", "-5"),
        ("retention", timedelta(seconds=19)),
        ("retention", "1ms"),
        ("garbage_keep", 0),
        ("max_body_bytes", 10**12),
        ("paused", "maybe"),
        ("paused", None),
    ],
)
def test_a_bad_value_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        encode({name: value})


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean ack_timeout"):
        encode({"ack_timout": "1s"})
    with pytest.raises(ConfigError, match="there are ack_timeout, retry_delays"):
        encode({"zzz": 1})
    with pytest.raises(ConfigError, match="twice"):
        encode({"max-ready": 1, "max_ready": 2})


def test_retention_covers_twice_the_producers_retries_or_nothing() -> None:
    assert MIN_RETENTION == 2 * PRODUCER_RETRY_TIME
    assert encode({"retention": MIN_RETENTION}) == {"retention": "20000"}
    assert encode({"retention": timedelta(0)}) == {"retention": "0"}
