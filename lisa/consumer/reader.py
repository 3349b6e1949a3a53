"""Read one topic or shard for one group and pass its messages to handlers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from lisa.consumer.blocking_reads import is_about_group
from lisa.consumer.inflight import Held
from lisa.consumer.intake import Intake
from lisa.consumer.joining import LOOK_AGAIN_S, Joining
from lisa.consumer.member import Holder, Return
from lisa.consumer.outages import OutageLog
from lisa.consumer.shared_reader import MOST_EACH
from lisa.consumer.shared_readers import SharedReaders
from lisa.consumer.stream_reader import StreamReader
from lisa.consumer.subscription import Subscription
from lisa.core.daemon.threads import ServiceThread, unforeseen
from lisa.core.delivery.opening import StreamRead
from lisa.core.model.backoff import Backoff, longest_after
from lisa.core.model.errors import ConfigError, GroupRemoved, LisaError, ServerUnavailable
from lisa.core.model.stream import Entry
from lisa.core.redis import errors

log = logging.getLogger("lisa.consumer")

BUSY_S = 1.0
"""The shortest time that a busy topic is read on its own thread."""


class Reader:
    """Joins a group, then reads, opens and dispatches until the subscription closes.

    It does so on a thread of its own, which ends while a `SharedReader` reads the topic.

    sub, stream: what is read, and how on its own thread.
    longest_s: the longest round, without the time that a read blocks.
    failed: called with an error that stops the consumer.
    outages: logs what fails; one for all readers.
    shared: read topics together with others.
    ended: set once no thread will read the topic again.
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
        shared: SharedReaders,
    ) -> None:
        self.stream = stream
        self._intake = intake
        self.sub = sub
        self._joining = Joining(sub, intake)
        self._failed = failed
        self._outages = outages
        self._error: BaseException | None = None
        self._backoff = Backoff()
        self._longest_s = longest_s + stream.longest.total_seconds()
        self._together = shared
        self._holder: Holder | None = None
        self._must_read = False
        self._busy_until = 0.0
        self.ended = threading.Event()
        self._thread = self._new_thread()

    def _new_thread(self) -> ServiceThread:
        name, is_over = f"lisa-{self.sub.shard}", self.sub.closing.is_set
        return ServiceThread(name, self._run, self._longest_s, is_over=is_over)

    @property
    def is_failing(self) -> bool:
        """Whether the last round failed."""
        holder = self._holder
        return self._error is not None or (holder is not None and holder.is_failing)

    def start(self) -> None:
        """Start to read."""
        if self._together.is_wanted(self.sub):
            self._together.start(self)
        else:
            self._thread.start()

    def threads(self) -> list[ServiceThread]:
        """The thread that must be alive now, if it is not a shared reader's."""
        return [] if self._holder is not None or self.ended.is_set() else [self._thread]

    @property
    def is_current(self) -> bool:
        """Whether the topic is read on the current thread."""
        holder = self._holder
        return threading.current_thread() is (self._thread if holder is None else holder.thread)

    def wake(self) -> None:
        """End the reader's pauses and its wait for a slot, and leave a shared reader."""
        self._intake.wake()
        self._together.wake()
        holder = self._holder
        if holder is not None:
            holder.leave(self)

    def interrupt(self) -> bool:
        """Also end its blocking read, without losing entries.

        Returns False if the server did not answer the request to end the read.
        """
        self.wake()
        holder = self._holder
        return self.stream.interrupt() if holder is None else holder.interrupt()

    def end(self, ends: float, *, is_answered: bool) -> bool:
        """Wait until the instant `ends` for the reader to stop, unless it runs a handler.

        `is_answered` tells whether the server answers requests to end reads; returns the same.
        """
        while not self.ended.is_set() and time.monotonic() < ends:
            is_answered = is_answered and self.interrupt()
            self.ended.wait(0.05)
            holder, running = self._holder, self.sub.leases.running()
            if holder.is_handling if holder else running and not self.stream.is_reading:
                break
        return is_answered

    def given_to(self, holder: Holder) -> None:
        """See `Member`."""
        self._holder = holder

    def begin(self) -> bool:
        """See `Member`. What cannot be done here is left to the reader's own thread."""
        sub = self.sub
        try:
            is_joined = (
                not sub.is_interrupted()
                and not sub.membership.is_former_shard()
                and sub.membership.join()
            )
        except ServerUnavailable as error:
            self._note(error)
            return False
        except Exception:  # noqa: BLE001  its own thread meets the error again, and handles it
            is_joined = False
        if is_joined:
            self._succeeded()
            if self._is_shareable() and self._together.take(self):
                return True
        self._holder = None
        return self._starts()

    def _starts(self) -> bool:
        """Start the topic's own thread; returns False at the thread limit."""
        try:
            self._thread.start()
        except RuntimeError as error:
            log.warning("topic %s: %s", self.sub.shard, error)
            return False
        return True

    def receive(
        self, entries: Sequence[Entry], read: StreamRead, startable: int
    ) -> tuple[list[Held], bool]:
        """See `Member`."""
        self.stream.accept(entries, read, startable)
        if self.sub.is_interrupted() or not self._intake.is_plain:
            return [], False
        try:
            deliveries = self._intake.open()
        except Exception:  # noqa: BLE001  its own thread opens them again, and handles the error
            return [], False
        return deliveries, not self.stream.has_unopened and not self.sub.is_paused_topic

    def take_back(self, why: Return) -> bool:
        """See `Member`."""
        self._must_read = why.failed
        self._busy_until = time.monotonic() + BUSY_S if why.busy else 0.0
        holder, self._thread = self._holder, self._new_thread()
        self._holder = None
        if not self._starts():
            self._holder = holder
            return False
        return True

    def _is_shareable(self) -> bool:
        """Whether a shared reader can read the topic from now on."""
        sub = self.sub
        return bool(
            self._together.is_wanted(sub)
            and not self._must_read
            and self._error is None
            and time.monotonic() >= self._busy_until
            and sub.state == "running"
            and self.stream.is_certain
            and self._intake.is_plain
        )

    def _run(self) -> None:
        closing, thread = self.sub.closing, self._thread
        while not closing.is_set():
            if self._is_shareable():
                self._intake.disconnect()
                if self._together.take(self):
                    return
                self._holder, self._must_read = None, True
            thread.begin()
            try:
                self._step()
                self._succeeded()
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
        try:
            self._intake.close()
        finally:
            self.ended.set()

    def _succeeded(self) -> None:
        if self._error is not None:
            self._outages.end(f"topic {self.sub.shard}: reading again", self._error)
        self._error = None
        self._backoff.reset()

    def _recovered(self, error: BaseException) -> None:
        try:
            self._recover(error)
        except Exception as another:  # noqa: BLE001  as in _run
            self._wait_out(another)

    def _recover(self, error: BaseException) -> None:
        """Handle an error of the blocking read: declare a lost group again, else wait and retry."""
        if not is_about_group(error):
            self._wait_out(errors.translated(error, self.sub.store.where))
        elif not self.sub.membership.mend():
            self._group_removed(error)

    def _group_removed(self, error: BaseException) -> None:
        try:
            self._joining.end(error)
        except LisaError as another:
            self._wait_out(another)

    def _wait_out(self, error: BaseException) -> None:
        if not isinstance(error, LisaError):
            unforeseen(f"topic {self.sub.shard}: reading", error)
            self._error = self._error or error
        else:
            self._note(error)
        self._intake.pause(self._backoff.take(longest_after(error)))

    def _note(self, error: LisaError) -> None:
        if self._error is None:
            self._outages.warn(f"topic {self.sub.shard}: cannot read, trying again", error)
        self._error = self._error or error

    def _step(self) -> None:
        """Do one round of the work that the topic needs now. Raises LisaError, client errors."""
        sub = self.sub
        if not sub.group:
            self._joining.join()
        elif sub.membership.is_removed:
            self._joining.rejoin()
        elif sub.is_paused_here or sub.is_paused_topic:
            self._intake.release_unstarted()
            self._intake.pause(LOOK_AGAIN_S)
            if not sub.is_paused_here:
                sub.check_paused()
        else:
            self._intake.step()
            self._must_read = False
            if self._busy_until and self.stream.last_count >= MOST_EACH:
                self._busy_until = time.monotonic() + BUSY_S
