"""Read one topic or shard for one group and pass its messages to handlers."""

from __future__ import annotations

import time
from collections.abc import Callable

from lisa.consumer.intake import Intake
from lisa.consumer.outages import OutageLog
from lisa.consumer.stream_reader import StreamReader
from lisa.consumer.subscription import Subscription
from lisa.core.daemon.threads import ServiceThread, unforeseen
from lisa.core.model.backoff import FIRST_S, Backoff, longest_after
from lisa.core.model.errors import ConfigError, GroupRemoved, LisaError
from lisa.core.redis import errors

LOOK_AGAIN_S = 1.0
"""How often a paused topic, or a topic without a group, is checked."""


class Reader:
    """A thread that joins a group, then reads, opens and dispatches until the subscription closes.

    sub: what is read.
    longest_s: the longest round, without the time that a read blocks.
    failed: called with an error that stops the consumer.
    outages: logs what fails; one for all readers.
    """

    def __init__(
        self,
        sub: Subscription,
        stream: StreamReader,
        intake: Intake,
        longest_s: float,
        failed: Callable[[LisaError], None],
        *,
        outages: OutageLog,
    ) -> None:
        self._stream = stream
        self._intake = intake
        self.sub = sub
        self._failed = failed
        self._outages = outages
        self._error: BaseException | None = None
        self._backoff = Backoff()
        self.thread = ServiceThread(
            f"lisa-{sub.shard}",
            self._run,
            longest_s + stream.longest.total_seconds(),
            is_over=sub.closing.is_set,
        )

    @property
    def is_failing(self) -> bool:
        """Whether the last round failed."""
        return self._error is not None

    def start(self) -> None:
        """Start the thread."""
        self.thread.start()

    def wake(self) -> None:
        """End the reader's pauses and its wait for a slot."""
        self._intake.wake()

    def interrupt(self) -> bool:
        """Also end its blocking read, without losing entries.

        Returns False if the server did not answer the request to end the read.
        """
        self.wake()
        return self._stream.interrupt()

    def end(self, ends: float, *, is_answered: bool) -> bool:
        """Wait until the instant `ends` for the thread to stop, unless it runs a handler.

        `is_answered` tells whether the server answers requests to end reads; returns the same.
        """
        while self.thread.is_alive() and time.monotonic() < ends:
            is_answered = is_answered and self.interrupt()
            self.thread.join(0.05)
            if not self._stream.is_reading and self.sub.leases.running():
                break
        return is_answered

    def _run(self) -> None:
        closing = self.sub.closing
        while not closing.is_set():
            self.thread.begin()
            try:
                self._step()
                if self._error is not None:
                    self._outages.end(f"topic {self.sub.shard}: reading again", self._error)
                self._error = None
                self._backoff.reset()
            except GroupRemoved as error:
                self._group_removed(error)
            except errors.ClientError as error:
                self._recovered(error)
            except ConfigError as error:
                if not self.sub.group:
                    self._failed(error)
                    break
                self._wait_out(error)
            except Exception as error:  # noqa: BLE001  logged; the reader must survive any error
                self._wait_out(error)
        self._intake.close()

    def _recovered(self, error: BaseException) -> None:
        try:
            self._recover(error)
        except Exception as another:  # noqa: BLE001  as in _run
            self._wait_out(another)

    def _recover(self, error: BaseException) -> None:
        """Handle an error of the blocking read: declare a lost group again, else wait and retry."""
        sub = self.sub
        if not errors.is_missing_group(error) and not str(error).startswith("UNBLOCKED"):
            self._wait_out(errors.translated(error, sub.store.where))
        elif not sub.membership.mend():
            self._group_removed(error)

    def _group_removed(self, error: BaseException) -> None:
        sub = self.sub
        try:
            was_lost = sub.membership.was_lost()
        except LisaError as another:
            self._wait_out(another)
            return
        self._stream.drop_unopened()
        if was_lost:
            self._join_again()
            return
        sub.membership.end(error)
        self._intake.drop_all()

    def _join_again(self) -> None:
        self.sub.membership.reset()
        self._intake.pause(FIRST_S)

    def _await_group(self) -> None:
        """Wait for a removed group to be declared again."""
        member = self.sub.membership
        self._intake.pause(LOOK_AGAIN_S)
        if self.sub.closing.is_set():
            return
        if member.was_lost():
            self._join_again()
        else:
            member.rejoin()

    def _wait_out(self, error: BaseException) -> None:
        if not isinstance(error, LisaError):
            unforeseen(f"topic {self.sub.shard}: reading", error)
        elif self._error is None:
            self._outages.warn(f"topic {self.sub.shard}: cannot read, trying again", error)
        self._error = self._error or error
        self._intake.pause(self._backoff.take(longest_after(error)))

    def _step(self) -> None:
        """Do one round of the work that the topic needs now. Raises LisaError, client errors."""
        sub = self.sub
        if not sub.group:
            self._join()
        elif sub.membership.is_removed:
            self._await_group()
        elif sub.is_paused_here:
            self._intake.release_unstarted()
            self._intake.pause(LOOK_AGAIN_S)
        elif sub.is_paused_topic:
            self._intake.release_unstarted()
            self._intake.pause(LOOK_AGAIN_S)
            sub.check_paused()
        else:
            self._intake.step()

    def _join(self) -> None:
        member = self.sub.membership
        if member.is_former_shard():
            self._intake.pause(LOOK_AGAIN_S)  # the heartbeat will close this subscription
            return
        if member.join():
            return
        member.ask_for_group()
        backoff = Backoff(longest_s=LOOK_AGAIN_S)
        while not self.sub.closing.is_set() and not member.has_groups():
            self.thread.begin()
            self._intake.pause(backoff.take())
