"""The overview: one row per topic, and totals."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from starlette.responses import Response

from lisa.admin.messages import LiveState
from lisa.gateway.page.snapshot_cache import Line
from lisa.gateway.page.view_context import PageRequest

PER_PAGE = 50


def _most_first(figure: str) -> Callable[[Line], float]:
    """Sort key: the highest figure first, none as 0."""
    of = attrgetter(figure)
    return lambda line: -(of(line) or 0)


ORDERS: dict[str, Callable[[Line], Any]] = {
    "topic": attrgetter("topic"),
    **{str(state): _most_first(f"counts.{state}") for state in LiveState},
    "in": _most_first("in_per_s"),
    "out": _most_first("out_per_s"),
    "p50": _most_first("p50_ms"),
    "p99": _most_first("p99_ms"),
    "consumers": attrgetter("consumers"),
}


async def show(visit: PageRequest) -> Response:
    """The overview page."""
    snapshot = await visit.snapshot()
    seen = [line for line in snapshot.lines.values() if visit.token.sees(line.topic)]
    wanted = visit.query.get("q", "").strip()[:128]
    found = [line for line in seen if wanted.lower() in line.topic.lower()]
    order = visit.query.get("sort", "topic")
    order = order if order in ORDERS else "topic"
    found.sort(key=ORDERS[order])
    pages = max(1, -(-len(found) // PER_PAGE))
    page = min(max(1, _number(visit.query.get("page"))), pages)
    return visit.page(
        "overview.html",
        snapshot=snapshot,
        seen=seen,
        found=found,
        wanted=wanted,
        order=order,
        lines=found[(page - 1) * PER_PAGE : page * PER_PAGE],
        page=page,
        pages=pages,
        sums=_sums(seen),
        alive=sum(one.alive for one in snapshot.managers),
        overdue_ms=snapshot.overdue_ms(seen),
    )


def _number(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 7 else 1


def _sums(lines: list[Line]) -> dict[str, float | None]:
    """Totals over all topics that the visitor may see; for lateness, the highest p99."""
    worst = [line.p99_ms for line in lines if line.p99_ms is not None]
    return {
        **{state: sum(getattr(line.counts, state) for line in lines) for state in LiveState},
        "in": sum(line.in_per_s or 0 for line in lines),
        "out": sum(line.out_per_s or 0 for line in lines),
        "p99": max(worst, default=None),
    }
