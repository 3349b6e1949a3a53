"""The public `Consumer` class, which runs handlers for due messages."""

from __future__ import annotations

import signal
import threading
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Self

from lisa.consumer.base import BaseConsumer
from lisa.consumer.pull import Delivery
from lisa.core.daemon.process_signals import Mailbox, stopping
from lisa.core.model.errors import LisaError


class Consumer(BaseConsumer):
    """Reads due messages of one or more topics and calls handlers with them.

    server, prefix: as for `Producer`.
    group: the group to join on each topic, declared if missing. None joins the topic's only group.
    name: prefix of the consumer's unique name, followed by host, pid and a random suffix.
    concurrency: the most handlers that run at the same time, over all topics.
    poll_timeout: how long one read blocks on the server.
    poll_batch_size: the most unstarted messages held per topic. None adapts to the number that
        handlers finish in 50 ms.
    grace: how long running handlers may take to finish when the consumer stops.
    lifespan: a function without arguments that returns a context manager, synchronous or not. The
        consumer enters it before it reads, and leaves it after the last handler, or after `grace`.
        Handlers find the value that it yields in `message.state`. `start` raises StartupFailed if
        it cannot be entered.
    middleware: objects whose `handle`, or another form of it, is called around each handler; the
        first one is the outermost.

    Register handlers with `on` or `subscribe`, or connect receivers to `message_received`, either
    the consumer's own or the module-wide signal. Raises ConfigError if an option is invalid.
    """

    _ending: Mailbox[LisaError | None] | None = None

    def unsubscribe(self, topic: str) -> None:
        """Remove a topic's handlers and release its unstarted messages.

        Running handlers finish, and their outcomes are settled.
        """
        self._unsubscribe(topic)

    def pause(self, topic: str | None = None) -> None:
        """Pause one topic, or all topics, in this consumer only; held messages are finished.

        Raises ConfigError if the consumer does not run.
        """
        self._running().readers.pause(topic, paused=True)

    def resume(self, topic: str | None = None) -> None:
        """Resume one topic, or all topics. Raises ConfigError if the consumer does not run."""
        self._running().readers.pause(topic, paused=False)

    def pull(
        self,
        topic: str,
        *,
        batch: int = 1,
        wait: timedelta | str = timedelta(0),
        ack_timeout: timedelta | str | None = None,
    ) -> list[Delivery]:
        """Return up to `batch` deliveries to settle yourself; waits up to `wait` for the first.

        Needs neither handlers nor `start`. `batch` may be up to 500, but one call returns at most
        250 deliveries, and fewer if the topic has several groups. `ack_timeout` replaces the
        topic's for these deliveries. On a sharded topic, each call reads one shard in turn. Raises
        LisaError.
        """
        topic, times = self._checked_pull(topic, wait, ack_timeout)
        with self._lock:
            if self._runtime is None:
                self._runtime = self._new_runtime()
            runtime, puller = self._runtime, self._runtime.puller(self._options.group)
        return runtime.drive(puller.pull(topic, batch, *times))

    def start(self) -> Self:
        """Start the consumer's threads and return the consumer; retries an unreachable server.

        Raises ConfigError if a topic or handler is missing, or if the consumer already runs.
        """
        self._start()
        return self

    def stop(self) -> None:
        """Stop reading, release unstarted messages, and let running handlers finish in `grace`.

        If one of the consumer's handlers calls `stop`, it returns and stops in the background.
        """
        runtime = self._runtime
        if runtime is not None and runtime.owns_this_thread():
            threading.Thread(target=self.stop, name="lisa-stop", daemon=True).start()
            return
        self._stop()

    close = stop

    def run(self) -> None:
        """Run until SIGTERM, SIGINT or `stop`; a second signal ends the process immediately.

        SIGHUP, as of a closed terminal, stops it, too, unless the program handles or ignores it.
        Raises ConfigError, also for errors found later, such as a topic with several groups.
        """
        ending = self._ending = Mailbox()
        try:
            with _until_signalled(ending):
                self.start()
                try:
                    failure = ending.get()
                finally:
                    self.stop()
        finally:
            self._ending = None
        if failure is not None:
            raise failure

    def __enter__(self) -> Self:
        if self._all_wanted():
            return self.start()
        self._is_entered = True
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _end_run(self, error: LisaError | None = None) -> bool:
        ending = self._ending
        if ending is not None:
            ending.post(error)
        return ending is not None


def _until_signalled(ending: Mailbox[LisaError | None]) -> AbstractContextManager[None]:
    """Post None at the first signal; a second SIGTERM or SIGINT ends the process.

    SIGHUP does not count, because a closing terminal, or systemd, may send it along with another.
    """
    if threading.current_thread() is not threading.main_thread():
        return nullcontext()
    heard: list[int] = []

    def hear(number: int) -> None:
        if heard and number != signal.SIGHUP:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if number != signal.SIGHUP:
            heard.append(number)
        ending.post(None)

    return ending.handling_signals(hear, stopping())
