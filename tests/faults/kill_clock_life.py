"""A scenario: a manager renews leases after the server's clock was set."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from lisa.core.transitions.extend import Extend
from tests.faults.kill_lives import Life
from tests.roles import Cast, Services

if TYPE_CHECKING:
    from collections.abc import Callable

HELD = 60
"""More than one call renews."""

ACK_TIMEOUT_S = 1.5
GLANCES_S = 2.5
"""By then a manager has sampled the clock, seen the topic, and done so again."""


class ManagerClockLife(Life):
    """Leases of a live and of a dead consumer; another manager continues."""

    role = "manager"
    said = " runs on "
    set_clock: Callable[[], object]

    def order(self) -> dict[str, Any]:
        config = self.directory / "manager.yml"
        config.write_text("lisa-delay-queue: {manager-server: {}, groups: []}\n")
        return {"config": str(config)}

    def prepare(self) -> None:
        cast = self.cast
        cast.configure(ack_timeout=f"{ACK_TIMEOUT_S * 1e3:.0f}")
        cast.store.drive(cast.store.register([cast.topic]))
        self._other = Services(Cast(self.url))
        self._alive = [cast.send() for _ in range(HELD)]
        self._dead = [cast.send() for _ in range(HELD)]
        self.ends([*self._alive, *self._dead], "acked")

    def live(self) -> None:
        began = time.monotonic()
        self.until(lambda: time.monotonic() > began + GLANCES_S and self.said in self._last_words())
        self._held = self.cast.take(HELD, consumer="alive")
        for entry in self._held:
            self.note_delivery(entry.id, entry.attempt, entry.due_ms)
        assert len(self.cast.take(HELD, consumer="dead")) == HELD
        self.set_clock()
        stepped = time.monotonic()
        self.until(lambda: self.extend() and self._is_dead_back())
        assert time.monotonic() - stepped > ACK_TIMEOUT_S - 0.2, "leases restart at the step"
        assert set(self.cast.states(self._alive)) == {"in_flight"}
        for entry in self._held:
            self.cast.ack(entry)
        self.until(self._is_rest_handled)

    def _is_rest_handled(self) -> bool:
        self.consume()
        return self.are_all_at_an_end()

    def note_delivery(self, message_id: str, attempt: int, due_ms: int) -> None:
        super().note_delivery(message_id, attempt, due_ms)
        self.handled[-1]["at_ms"] = self.cast.now_ms()  # the machine's clock differs

    def extend(self) -> bool:
        """Extend the leases, as a consumer does while its handlers run."""
        receipts = [(one.id, one.entry) for one in self._held]
        call = Extend(self.cast.topic, self.cast.group, "alive", receipts)
        self.cast.store.call_by_id(call)
        return True

    def _is_dead_back(self) -> bool:
        return "in_flight" not in self.cast.states(self._dead)

    def turn(self) -> None:
        self._other.clock.sample(self._other.store)
        self._other.reclaimer.step([self.cast.topic])

    def check(self) -> None:
        super().check()
        assert self.cast.stats().get(f"reclaimed@{self.cast.group}") == HELD

    def close(self) -> None:
        self._other.store.close()
        super().close()
