"""Numbers as the text that Prometheus reads. Imports prometheus_client: load it late."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from typing import NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from lisa.core.metrics.families import FAMILIES, Family
from lisa.core.metrics.numbers import Numbers, Value, put
from lisa.core.status import Page

__all__ = ["metrics_page"]


def metrics_page(role: str, parts: Iterable[Numbers], accept: str = "") -> Page:
    """All numbers of a role; `accept` is what the client says that it reads."""
    numbers: Numbers = {}
    for part in parts:
        numbers |= part
    put(numbers, "lisa_build_info", 1, _version(), role)
    encode, content_type = choose_encoder(accept)
    return Page(200, content_type, encode(_Numbers(numbers)))


class _Numbers(Collector):
    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers

    def collect(self) -> Iterator[Metric]:
        for family in FAMILIES.values():
            rows = self._numbers.get(family.name)
            if rows:
                yield _metric(family, rows)


def _metric(family: Family, rows: dict[tuple[str, ...], Value]) -> Metric:
    name, about, labels = family.name, family.help, family.labels
    metric: Metric
    if family.kind == "histogram":
        metric = histogram = HistogramMetricFamily(name, about, labels=labels)
        bounds = [*map(str, family.bounds), "+Inf"]
        for values, value in rows.items():
            counts, total = _histogram(value)
            histogram.add_metric(values, list(zip(bounds, accumulate(counts), strict=True)), total)
        return metric
    plain = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric = single = plain(name, about, labels=labels)
    for values, value in rows.items():
        single.add_metric(values, _number(value))
    return metric


class _Histogram(NamedTuple):
    counts: list[float]
    total: float


def _histogram(value: Value) -> _Histogram:
    if not isinstance(value, list):
        raise TypeError(f"a histogram is a list of counts, not {value!r}")
    return _Histogram(value[:-1], value[-1])


def _number(value: Value) -> float:
    if isinstance(value, list):
        raise TypeError(f"one number was wanted, not {value!r}")
    return value


def _version() -> str:
    try:
        return version("lisa-delay-queue")
    except PackageNotFoundError:  # run from a copy that was never installed
        return "unknown"
