"""Every parameter that is a duration takes a timedelta or text with a unit, checked by the call."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import pytest

from lisa import (
    AsyncProducer,
    ConfigError,
    Consumer,
    InvalidMessage,
    Outgoing,
    Producer,
    Retry,
    RetryPolicy,
)
from lisa.producer.plan import SendPlan

if TYPE_CHECKING:
    from collections.abc import Callable

    from lisa.producer.plan import SendOptions

NOWHERE = "redis://127.0.0.1:1/0"
PLAN = SendPlan()


def plan(**options: Any) -> SendPlan:
    return SendPlan.of(cast("SendOptions", options), None)


OPTIONS: dict[str, Callable[[Any], Any]] = {
    "grace": lambda value: Consumer(NOWHERE, grace=value)._options.grace,
    "poll_timeout": lambda value: Consumer(NOWHERE, poll_timeout=value)._options.poll_timeout,
    "patience": lambda value: Producer(NOWHERE, patience=value)._patience,
    "async patience": lambda value: AsyncProducer(NOWHERE, patience=value)._patience,
}
PARAMETERS: dict[str, Callable[[Any], Any]] = {
    "delay": lambda value: plan(delay=value).due,
    "ttl": lambda value: plan(ttl=value).ttl_ms,
    "outgoing delay": lambda value: PLAN.with_differences(Outgoing(1, delay=value)).due,
    "outgoing ttl": lambda value: PLAN.with_differences(Outgoing(1, ttl=value)).ttl_ms,
    "Retry": lambda value: Retry(delay=value).delay,
    "fixed delay": lambda value: RetryPolicy.fixed(delay=value),
    "initial": lambda value: RetryPolicy.exponential(initial=value),
    "cap": lambda value: RetryPolicy.exponential(initial=timedelta(seconds=1), cap=value),
}


@pytest.mark.parametrize("name", [*OPTIONS, *PARAMETERS])
def test_text_means_the_same_as_a_timedelta(name: str) -> None:
    use = (OPTIONS | PARAMETERS)[name]
    assert use("90s") == use("1m30s") == use(timedelta(seconds=90)) != use("2m")


@pytest.mark.parametrize("value", [10, 1.5, "10", "soon", "-1s", timedelta(seconds=-1)])
@pytest.mark.parametrize("name", [*OPTIONS, *PARAMETERS])
def test_anything_else_is_refused_by_name(name: str, value: Any) -> None:
    kind = ConfigError if name in OPTIONS else InvalidMessage
    with pytest.raises(kind, match=f"^{name.rpartition(' ')[2].replace('Retry', 'delay')}: "):
        (OPTIONS | PARAMETERS)[name](value)


@pytest.mark.parametrize("name", ["wait", "ack_timeout"])
@pytest.mark.parametrize("value", [5, "soon"])
def test_a_pull_checks_before_it_asks_the_server(name: str, value: Any) -> None:
    with Consumer(NOWHERE) as consumer, pytest.raises(InvalidMessage, match=f"^{name}: "):
        consumer.pull("orders", **{name: value})


def test_a_number_gets_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"^grace: 10 has no unit; write '10ms' or '10s'$"):
        OPTIONS["grace"](10)
