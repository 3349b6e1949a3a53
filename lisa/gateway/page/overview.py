"""The overview: what needs attention, totals, and one row per topic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from operator import attrgetter
from typing import Any

from starlette.responses import Response

from lisa.admin import history
from lisa.admin.history import MINUTE_MS
from lisa.admin.live import Interval
from lisa.admin.messages import LiveState
from lisa.gateway.access import Scope
from lisa.gateway.page import attention
from lisa.gateway.page.attention import AttentionItem, Rank
from lisa.gateway.page.rendering import rate
from lisa.gateway.page.snapshot import Line
from lisa.gateway.page.visits import PageRequest

PER_PAGE = 50
MOST_PROBLEMS = 6
"""Problems that are always visible; the others are in a closed section."""

SPARK_STEP_MS = 4 * MINUTE_MS
SPARK_STEPS = 15
SPARK_S = 30.0
SPARK_WIDTH, SPARK_HEIGHT = 60, 16

WORST = "worst"


def _most_first(figure: str) -> Callable[[Line], float]:
    """Sort key: the highest figure first, none as 0."""
    of = attrgetter(figure)
    return lambda line: -(of(line) or 0)


ORDERS: dict[str, Callable[[Line], Any]] = {
    "topic": attrgetter("topic"),
    "oldest": lambda line: line.oldest_due_ms or inf,
    **{str(state): _most_first(f"counts.{state}") for state in LiveState},
    "in": _most_first("in_per_s"),
    "out": _most_first("out_per_s"),
    "p99": _most_first("p99_ms"),
    "consumers": attrgetter("consumers"),
}


@dataclass(frozen=True, slots=True)
class Spark:
    """The last hour of a topic as two polylines in an SVG, and in words."""

    sent: str
    acked: str
    said: str


async def show(visit: PageRequest) -> Response:
    """The overview page."""
    is_operator = visit.token.allows(Scope.OPERATE, None)
    snapshot = (await visit.snapshots.current()).shown_to(operators=is_operator)
    seen = [line for line in snapshot.lines.values() if visit.token.sees(line.topic)]
    problems = attention.problems(snapshot, seen)
    wanted = visit.query.get("q", "").strip()[:128]
    found = [line for line in seen if wanted.lower() in line.topic.lower()]
    order = visit.query.get("sort", WORST)
    order = order if order in ORDERS else WORST
    found.sort(key=ORDERS.get(order) or _worst_first(problems))
    pages = max(1, -(-len(found) // PER_PAGE))
    page = min(max(1, _number(visit.query.get("page"))), pages)
    lines = found[(page - 1) * PER_PAGE : page * PER_PAGE]
    return visit.page(
        "overview.html",
        snapshot=snapshot,
        problems=problems[:MOST_PROBLEMS],
        more_problems=problems[MOST_PROBLEMS:],
        ranks=attention.worst(problems),
        old_ms=attention.OLD_MS,
        seen=seen,
        found=found,
        wanted=wanted,
        order=order,
        lines=lines,
        sparks=await _sparks(visit, [line.topic for line in lines], snapshot.at_ms),
        page=page,
        pages=pages,
        sums=_sums(seen),
        alive=sum(manager.alive for manager in snapshot.managers),
    )


def _worst_first(problems: Sequence[AttentionItem]) -> Callable[[Line], Any]:
    """Sort key: by the worst problem, then the oldest due message, then garbage, then name."""
    ranks = attention.worst(problems)
    return lambda line: (
        ranks.get(line.topic, Rank.NONE),
        (line.oldest_due_ms or inf) if line.topic in ranks else inf,
        not line.counts.garbage,
        line.topic,
    )


async def _sparks(visit: PageRequest, topics: list[str], now_ms: int) -> dict[str, Spark]:
    """The last hour of each topic that has one."""
    names = tuple(sorted(topics))
    found = await visit.snapshots.ask(
        SPARK_S, history.recent, names, SPARK_STEP_MS, SPARK_STEPS, now_ms=now_ms
    )
    return {topic: _spark(past) for topic, past in found.items() if len(past) > 1}


def _spark(past: Sequence[Interval]) -> Spark:
    sent = [interval.per_s("sent") for interval in past]
    acked = [interval.per_s("acked") for interval in past]
    highest = max(*sent, *acked) or 1.0
    return Spark(
        _points(sent, highest),
        _points(acked, highest),
        f"Last hour: at most {rate(max(sent))} sent and {rate(max(acked))} acked per second",
    )


def _points(values: Sequence[float], highest: float) -> str:
    """The points of a polyline; the newest value is at the right edge."""
    step = SPARK_WIDTH / (SPARK_STEPS - 1)
    first = SPARK_WIDTH - step * (len(values) - 1)
    room = SPARK_HEIGHT - 2
    return " ".join(
        f"{first + i * step:.1f},{1 + room * (1 - value / highest):.1f}"
        for i, value in enumerate(values)
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
