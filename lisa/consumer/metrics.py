"""What a consumer's handlers did and do, as numbers for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable

from lisa.consumer.slots import Slots
from lisa.consumer.subscription import Subscription
from lisa.core.metrics.numbers import Numbers, add, put

__all__ = ["own_numbers"]


def own_numbers(readers: Iterable[tuple[Subscription, bool]], slots: Slots) -> Numbers:
    """Of all subscriptions, each with whether reading it fails."""
    numbers: Numbers = {}
    troubled = False
    for sub, is_in_trouble in readers:
        troubled |= is_in_trouble
        _add_one(numbers, sub)
        group = sub.group or sub.wanted
        _put_worst(numbers, "lisa_consumer_unreachable", is_in_trouble, sub.whole, group)
    put(numbers, "lisa_up", float(not troubled))
    put(numbers, "lisa_consumer_concurrency", slots.size)
    put(numbers, "lisa_consumer_busy", slots.size - slots.free)
    return numbers


def _add_one(numbers: Numbers, sub: Subscription) -> None:
    labels = (sub.whole, sub.group or sub.wanted)
    add(numbers, "lisa_consumer_running", sub.running(), *labels)
    add(numbers, "lisa_consumer_held", len(sub.held), *labels)
    _put_worst(numbers, "lisa_consumer_degraded", sub.is_degraded, *labels)
    outcomes = {"ok": sub.went_well, "failed": sub.failed, "discarded": sub.discarded}
    for outcome, count in outcomes.items():
        add(numbers, "lisa_consumer_handled_total", count, *labels, outcome)
    seconds = sub.slow.numbers()
    seconds[0] += sub.fast
    seconds[-1] += sub.fast_s
    add(numbers, "lisa_consumer_handler_seconds", seconds, *labels)


def _put_worst(numbers: Numbers, name: str, is_so: object, *labels: str) -> None:
    """1 where it is so for any place of a topic, however many there are."""
    known = numbers.get(name, {}).get(labels, 0.0)
    put(numbers, name, 1.0 if is_so or known == 1.0 else 0.0, *labels)
