"""The Prometheus metrics of a consumer, and its health."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lisa.consumer.slots import Slots
from lisa.consumer.subscription import Subscription
from lisa.core.daemon.threads import ServiceThread, stalled
from lisa.core.metrics.numbers import Numbers, add, put


def own_numbers(readers: Iterable[tuple[Subscription, bool]], slots: Slots) -> Numbers:
    """The metrics of all subscriptions, each given with whether its reader is failing."""
    numbers: Numbers = {}
    any_failing = False
    for sub, is_failing in readers:
        any_failing |= is_failing
        _add_one(numbers, sub)
        group = sub.group or sub.wanted
        _put_worst(numbers, "lisa_consumer_unreachable", is_failing, sub.topic, group)
    put(numbers, "lisa_up", float(not any_failing))
    put(numbers, "lisa_consumer_concurrency", slots.size)
    put(numbers, "lisa_consumer_busy", slots.size - slots.free)
    return numbers


def _add_one(numbers: Numbers, sub: Subscription) -> None:
    labels = (sub.topic, sub.group or sub.wanted)
    add(numbers, "lisa_consumer_running", len(sub.leases.running()), *labels)
    add(numbers, "lisa_consumer_held", len(sub.leases.held), *labels)
    _put_worst(numbers, "lisa_consumer_degraded", sub.stats.degradation.is_degraded, *labels)
    stats = sub.stats
    outcomes = {
        "ok": stats.succeeded,
        "failed": stats.failed,
        "discarded": stats.discarded,
        "deferred": stats.deferred,
    }
    for outcome, count in outcomes.items():
        add(numbers, "lisa_consumer_handled_total", count, *labels, outcome)
    add(numbers, "lisa_consumer_handler_seconds", stats.seconds(), *labels)


def _put_worst(numbers: Numbers, name: str, is_so: object, *labels: str) -> None:
    """Set a metric to 1 if the condition holds for any shard of a topic."""
    known = numbers.get(name, {}).get(labels) == 1.0
    put(numbers, name, float(known or bool(is_so)), *labels)


def health_of(
    readers: Iterable[tuple[Subscription, bool]], threads: Sequence[ServiceThread]
) -> Mapping[str, Any]:
    """What `/healthz` reports of subscriptions, each with whether its reads fail, and threads."""
    faults, is_failing = stalled(threads), False
    waiting = removed = False
    topics: dict[str, dict[str, Any]] = {}
    for sub, fails in readers:
        is_failing = is_failing or fails
        waiting = waiting or not sub.group
        removed = removed or sub.membership.is_removed
        state = "unreachable" if fails else sub.state
        one = {"state": state, "held": len(sub.leases.held), "handled": sub.stats.handled}
        known = topics.setdefault(f"{sub.topic}/{sub.group or '-'}", one)
        if known is not one:  # a further shard of the topic
            known["held"] += one["held"]
            known["handled"] += one["handled"]
            if state not in ("running", "stopping"):
                known["state"] = state
    failing = bool(faults) or is_failing
    status = "failing" if failing else "waiting" if removed else "starting" if waiting else "ok"
    ages = {one.name: round(one.age_s, 1) for one in threads}
    return {"status": status, "topics": topics, "threads": ages, "faults": faults}
