"""The overview: one row per topic, and totals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.responses import Response

from lisa.gateway.page.snapshot_cache import Line
from lisa.gateway.page.view_context import PageRequest

PER_PAGE = 50

ORDERS: dict[str, Callable[[Line], Any]] = {
    "topic": lambda line: line.topic,
    "waiting": lambda line: -line.counts.waiting,
    "ready": lambda line: -line.counts.ready,
    "in_flight": lambda line: -line.counts.in_flight,
    "retry": lambda line: -line.counts.retry,
    "garbage": lambda line: -line.counts.garbage,
    "in": lambda line: -(line.in_per_s or 0),
    "out": lambda line: -(line.out_per_s or 0),
    "p50": lambda line: -(line.p50_ms or 0),
    "p99": lambda line: -(line.p99_ms or 0),
    "consumers": lambda line: line.consumers,
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
        "waiting": sum(line.counts.waiting for line in lines),
        "ready": sum(line.counts.ready for line in lines),
        "in flight": sum(line.counts.in_flight for line in lines),
        "retry": sum(line.counts.retry for line in lines),
        "garbage": sum(line.counts.garbage for line in lines),
        "in": sum(line.in_per_s or 0 for line in lines),
        "out": sum(line.out_per_s or 0 for line in lines),
        "p99": max(worst, default=None),
    }
