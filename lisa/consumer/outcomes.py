"""The outcomes of deliveries, on their way from the handlers to the settler."""

from __future__ import annotations

from lisa.consumer.inflight import Held, Verdict
from lisa.consumer.thread_queue import ThreadQueue
from lisa.core.transitions.defer import Postpone
from lisa.core.transitions.retry import Fail

Refusals = list[tuple[Held, Verdict]]


class Outcomes:
    """Ended deliveries of one subscription that wait to be settled.

    Handlers and the reader put deliveries in; the settler, and the reader with its next read, take
    them out.

    unanswered: a call for failures or deferrals that got no reply and may have taken effect. Only
        repeating the same call returns its outcomes.
    """

    def __init__(self) -> None:
        self.acks: ThreadQueue[Held] = ThreadQueue()
        self.expired: ThreadQueue[Held] = ThreadQueue()
        self.failures: ThreadQueue[tuple[Held, Verdict]] = ThreadQueue()
        self.deferrals: ThreadQueue[tuple[Held, Verdict]] = ThreadQueue()
        self.unanswered: tuple[Fail | Postpone, Refusals] | None = None

    def __bool__(self) -> bool:
        return bool(self.acks or self.expired or self.has_refusals)

    @property
    def has_refusals(self) -> bool:
        """Whether failures or deferrals wait."""
        return bool(self.failures or self.deferrals or self.unanswered)

    def begin_call(self, call: Fail | Postpone, refusals: Refusals) -> None:
        """Keep a call for failures or deferrals until its reply arrives."""
        self.unanswered = call, refusals

    def end_call(self) -> None:
        """Forget that call, whose reply has arrived."""
        self.unanswered = None

    def take_all(self) -> list[Held]:
        """Remove and return the deliveries that wait now."""
        taken = self.acks.take_all() + self.expired.take_all()
        refusals = self.failures.take_all() + self.deferrals.take_all()
        if self.unanswered:
            refusals += self.unanswered[1]
            self.unanswered = None
        return taken + [held for held, _ in refusals]
