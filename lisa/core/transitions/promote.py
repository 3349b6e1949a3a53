"""waiting, retry -> ready, when due."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from lisa.core.model.keys import TopicKeys
from lisa.core.model.options import LARGEST_BATCH
from lisa.core.transitions.base import Argument, Transition, exact_text, text


class Promoted(NamedTuple):
    """Result of one call.

    `next_due_ms` is the earliest remaining due time, infinite if another program wrote it so, None
    if nothing waits; with several groups it ignores overdue retries of a full group. `full` names
    the groups without room for their due messages. `cut_short`: more messages may be due now.
    `interval_ms`: the topic's option.
    `total`: messages that all managers moved from waiting so far; 0 if the topic is paused.
    `next_ids`: what the next call should expect. `expired`: ids that exceeded their ttl or are too
    late, which were not moved; may have lone surrogates.
    """

    moved: int
    full: tuple[str, ...]
    next_due_ms: float | None
    now_ms: int
    paused: bool
    cut_short: bool
    interval_ms: int
    total: int
    next_ids: list[str]
    expired: list[str]


@dataclass(frozen=True)
class Promote(Transition[Promoted]):
    """Promote up to `limit` messages that are due by Redis's clock.

    expected: ids that may be due: `next_ids` of the call before. Their entries may carry envelopes.
    """

    script: ClassVar[str] = "promote"
    limit: int = LARGEST_BATCH
    expected: Sequence[str] = ()

    def id_keys(self, keys: TopicKeys) -> Iterable[str]:
        return keys.bodies(self.expected)

    def args(self) -> Sequence[Argument]:
        return (self.limit,)

    def parse(self, reply: Sequence[Any]) -> Promoted:
        moved, full, next_due, now, paused, cut, interval, total, next_ids, *expired = reply
        return Promoted(
            moved,
            tuple(text(full).split(",")) if full else (),
            float(next_due) if next_due else None,
            int(now),
            bool(paused),
            bool(cut),
            int(interval),
            total,
            list(map(text, next_ids)),
            list(map(exact_text, expired)),
        )
