"""Prometheus text output. Imports prometheus_client: import this module late."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from lisa.core.daemon.status import StatusResponse
from lisa.core.metrics.families import FAMILIES, Family
from lisa.core.metrics.numbers import Numbers, Value, put


def metrics_page(role: str, parts: Iterable[Numbers], accept: str = "") -> StatusResponse:
    """The metrics page of a role; `accept` is the request's Accept header."""
    numbers: Numbers = {}
    for part in parts:
        numbers |= part
    put(numbers, "lisa_build_info", 1, _version(), role)
    encode, content_type = choose_encoder(accept)
    return StatusResponse(200, content_type, encode(_Numbers(numbers)))


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
            assert isinstance(value, list)  # noqa: S101  the form of a histogram
            *counts, total = value
            histogram.add_metric(values, list(zip(bounds, accumulate(counts), strict=True)), total)
        return metric
    plain = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric = single = plain(name, about, labels=labels)
    for values, value in rows.items():
        assert not isinstance(value, list)  # noqa: S101  the form of a number
        single.add_metric(values, value)
    return metric


def _version() -> str:
    try:
        return version("lisa-delay-queue")
    except PackageNotFoundError:  # not installed
        return "unknown"
