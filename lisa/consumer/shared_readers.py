"""The shared readers of a consumer, and the thread that starts to read topics."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from lisa.consumer.dispatcher import Dispatcher
from lisa.consumer.handlers import Handlers
from lisa.consumer.member import Member
from lisa.consumer.options import ConsumerOptions
from lisa.consumer.outages import OutageLog
from lisa.consumer.settler import Settler
from lisa.consumer.shared_reader import SharedReader
from lisa.consumer.shared_reads import SharedReads
from lisa.consumer.subscription import Subscription
from lisa.core.daemon.threads import ServiceThread, begin_round, rest
from lisa.core.model.backoff import LONGEST_AWAY_S, Backoff
from lisa.core.store.store import SyncStore

log = logging.getLogger("lisa.consumer")

MOST_JOINED = 100
"""Once this many topics wait to be read, the running reads are interrupted to add them."""


class SharedReaders:
    """The shared readers of a consumer, one for each group, consumer name and `MOST_TOPICS`.

    is_wanted: whether a topic should be read together with others.
    """

    def __init__(
        self,
        store: SyncStore,
        options: ConsumerOptions,
        handlers: Handlers,
        dispatcher: Dispatcher,
        settler: Settler,
        *,
        is_wanted: Callable[[Subscription], bool],
        longest_s: float,
        outages: OutageLog,
    ) -> None:
        self._store = store
        self._options = options
        self._handlers = handlers
        self._dispatcher = dispatcher
        self._settler = settler
        self._is_wanted = is_wanted
        self._is_refused = False
        self._longest_s = longest_s
        self._outages = outages
        self._lock = threading.Lock()
        self._readers: dict[SharedReader, tuple[str, str]] = {}
        self._made = 0
        self._starting: deque[Member] = deque()
        self._joiner: ServiceThread | None = None
        self._joined: list[SharedReader] = []
        self._woken = threading.Event()

    def _new(self, group: str, name: str) -> SharedReader:
        self._made += 1
        address, poll = self._options.address, self._options.poll_timeout
        reads = SharedReads(self._store, address, group, name, longest=poll, settler=self._settler)
        return SharedReader(
            reads,
            self._dispatcher,
            self._handlers.plan,
            readers=lambda: list(self._readers),
            refused=self._refuse,
            cap=self._options.poll_batch_size,
            number=self._made,
            longest_s=self._longest_s,
            outages=self._outages,
        )

    def is_wanted(self, sub: Subscription) -> bool:
        """Whether a topic should be read together with others."""
        return not self._is_refused and self._is_wanted(sub)

    def _refuse(self) -> None:
        """Stop sharing reads: the server, or a proxy before it, refuses reads of several topics."""
        self._is_refused = True

    def threads(self) -> list[ServiceThread]:
        """The threads that must be alive now."""
        joining = [] if (joiner := self._joiner) is None else [joiner]
        return [*joining, *(one.thread for one in list(self._readers) if not one.members.is_over)]

    def start(self, member: Member) -> None:
        """Let a topic join its group, after those that start before it, on one thread for all.

        Raises RuntimeError at the thread limit.
        """
        with self._lock:
            self._need_joiner()
            self._starting.append(member)

    def _need_joiner(self) -> None:
        if self._joiner is None:
            thread = ServiceThread("lisa-joiner", self._begin_all, self._longest_s)
            thread.start()
            self._joiner = thread

    def wake(self) -> None:
        """End a pause of the thread that joins groups."""
        self._woken.set()

    def _next(self) -> Member | None:
        """The next topic to start; first ends the reads for those that joined."""
        while True:
            with self._lock:
                ends: set[SharedReader] = set()
                if len(self._joined) >= MOST_JOINED or not self._starting:
                    ends, self._joined = set(self._joined), []
                if not ends:
                    if self._starting:
                        return self._starting.popleft()
                    self._joiner = None
                    return None
            for shared in ends:
                shared.interrupt()

    def _begin_all(self) -> None:
        backoff = Backoff(longest_s=LONGEST_AWAY_S)
        while (member := self._next()) is not None:
            begin_round()
            self._woken.clear()
            if member.begin():
                backoff.reset()
                continue
            with self._lock:
                self._starting.append(member)
            rest()
            self._woken.wait(backoff.take())

    def take(self, member: Member) -> bool:
        """Read a topic that has joined its group, until it is given back.

        Returns False if no thread can be started.
        """
        who = member.sub.group, member.sub.name
        with self._lock:
            self._readers = {
                one: served for one, served in self._readers.items() if not one.members.is_over
            }
            known = [one for one, served in self._readers.items() if served == who]
            shared = next((one for one in known if one.join(member)), None)
            if shared is None:
                return self._take_first(member, who)
            self._joined.append(shared)
            with suppress(RuntimeError):  # then the topic is read after the running read
                self._need_joiner()
        return True

    def _take_first(self, member: Member, who: tuple[str, str]) -> bool:
        shared = self._new(*who)
        shared.join(member)
        try:
            shared.thread.start()
        except RuntimeError as error:
            log.warning("%s: %s", shared.thread.name, error)
            return False
        self._readers[shared] = who
        return True
