"""The outcomes of deliveries, on their way from the handlers to the settler."""

from __future__ import annotations

from lisa.consumer.inflight import Held, Verdict
from lisa.consumer.thread_queue import ThreadQueue
from lisa.core.transitions.retry import Fail

Failures = list[tuple[Held, Verdict]]


class Outcomes:
    """Ended deliveries of one subscription that wait to be settled.

    Handlers and the reader put deliveries in; the settler, and the reader with its next read, take
    them out.

    unanswered: a call for failures that got no reply and may have taken effect. Only repeating the
        same call returns its outcomes.
    """

    def __init__(self) -> None:
        self.acks: ThreadQueue[Held] = ThreadQueue()
        self.expired: ThreadQueue[Held] = ThreadQueue()
        self.failures: ThreadQueue[tuple[Held, Verdict]] = ThreadQueue()
        self.unanswered: tuple[Fail, Failures] | None = None

    def __bool__(self) -> bool:
        return bool(self.acks or self.failures or self.expired or self.unanswered)

    def begin_call(self, call: Fail, failures: Failures) -> None:
        """Keep a call for failures until its reply arrives."""
        self.unanswered = call, failures

    def end_call(self) -> None:
        """Forget the call for failures, whose reply has arrived."""
        self.unanswered = None

    def take_all(self) -> list[Held]:
        """Remove and return the deliveries that wait now."""
        taken = self.acks.take_all() + self.expired.take_all()
        failures = self.failures.take_all()
        if self.unanswered:
            failures += self.unanswered[1]
            self.unanswered = None
        return taken + [held for held, _ in failures]
