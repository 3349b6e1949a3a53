from datetime import timedelta
from typing import Any

import pytest

from lisa.core.model.errors import ConfigError
from lisa.core.model.options import (
    MIN_RETENTION,
    OPTIONS,
    PRODUCER_RETRY_TIME,
    TopicOptions,
    encode,
    warning,
)
from lisa.core.model.retry_policy import RetryPolicy
from tests.generators import generator

EVERY: dict[str, Any] = {
    "ack_timeout": timedelta(seconds=30),
    "retry_delays": [timedelta(0), timedelta(minutes=2)],
    "max_ready": 5,
    "capacity": 100,
    "retention": timedelta(0),
    "garbage_keep": timedelta(days=1),
    "max_body_bytes": 10,
    "max_groups": 7,
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
        "max_groups": "7",
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
        "max-groups": "7",
        "paused": "yes",
    }
    assert encode(text) == encode(EVERY)


@pytest.mark.parametrize("as_bytes", [False, True])
def test_encoded_options_are_decoded(*, as_bytes: bool) -> None:
    stored: Any = encode(EVERY)
    if as_bytes:
        stored = {key.encode(): value.encode() for key, value in stored.items()}
    assert TopicOptions.from_hash(stored) == TopicOptions(
        **{**EVERY, "retry_delays": RetryPolicy((0, 120_000))}
    )


def test_a_body_limit_that_blocks_the_server_causes_a_warning() -> None:
    limit = 8 * 1024 * 1024
    said = warning("orders", encode({"max_body_bytes": limit + 1}))
    assert said is not None
    assert "'orders'" in said
    assert f"{limit + 1} bytes" in said
    assert warning("orders", encode({"max_body_bytes": limit})) is None
    assert warning("orders", encode({})) is None


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


def test_unknown_fields_are_ignored_and_damaged_ones_named() -> None:
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
        ("max_groups", 0),
        ("max_groups", 1_001),
        ("paused", "maybe"),
        ("paused", None),
    ],
)
def test_a_bad_value_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        encode({name: value})


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean ack_timeout"):
        encode({"ack_timout": "1s"})
    with pytest.raises(ConfigError, match="the options are ack_timeout, retry_delays"):
        encode({"zzz": 1})
    with pytest.raises(ConfigError, match="twice"):
        encode({"max-ready": 1, "max_ready": 2})


def test_retention_covers_twice_the_producers_retries_or_nothing() -> None:
    assert MIN_RETENTION == 2 * PRODUCER_RETRY_TIME
    assert encode({"retention": MIN_RETENTION}) == {"retention": "20000"}
    assert encode({"retention": timedelta(0)}) == {"retention": "0"}


def test_reference_and_example_match_the_options() -> None:
    options = generator("generate_options")
    for path, generated in ((options.PAGE, options.page()), (options.EXAMPLE, options.example())):
        assert path.read_text(encoding="utf-8") == generated, "run: python docs/generate_options.py"


def test_a_value_shown_as_plain_is_accepted_again() -> None:
    typed = encode(EVERY) | {"retry_delays": "0,120000~0.2", "capacity": ""}
    options = TopicOptions.from_hash(typed)
    plain = {name: one.kind.plain(getattr(options, name)) for name, one in OPTIONS.items()}
    assert TopicOptions.from_hash(encode(plain)) == options
    assert (plain["retry_delays"], plain["capacity"]) == ("0s,2m~0.2", "unlimited")


def test_values_are_shown_in_words() -> None:
    options = TopicOptions.from_hash({"retry_delays": "5000,5000,60000~0.5", "max_ready": "12345"})
    shown = {name: one.kind.show(getattr(options, name)) for name, one in OPTIONS.items()}
    assert shown["retry_delays"] == "2 x 5s, 1m, jitter 0.5"
    assert (shown["max_ready"], shown["capacity"]) == ("12,345", "unlimited")
    assert (shown["journal"], shown["garbage_keep"]) == ("no", "90d")
