"""Several processes of one role under one that looks after them."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lisa.core.mailbox import STOPPING, Mailbox

__all__ = ["EXIT_CONFIG", "Family", "end_with_parent"]

log = logging.getLogger("lisa.processes")

EXIT_CONFIG = 2
"""A child that ends so would end so again: all end with it."""

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
LIVED_WELL_S = 10.0

Event = tuple[str, int]


class Family:
    """Starts `size` children, starts one again that died, ends all with itself.

    `command` makes a child's command line from the descriptor of a pipe that closes when this
    process is gone, however it went (see `end_with_parent`). `keeps` are other descriptors that
    children need.
    """

    def __init__(
        self, size: int, command: Callable[[int], Sequence[str]], *, keeps: Sequence[int] = ()
    ) -> None:
        self._keeps = tuple(keeps)
        self._size = size
        self._command = command
        self._events: Mailbox[Event] = Mailbox()
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._started: dict[int, float] = {}
        self._pauses = dict.fromkeys(range(size), FIRST_PAUSE_S)
        self._leash, self._held_end = os.pipe()

    def run(self) -> int:
        """Until SIGTERM or SIGINT; the exit code. A second signal kills the children."""
        before = {number: signal.signal(number, self._hear) for number in STOPPING}
        try:
            with self._events.hearing_signals():
                for place in range(self._size):
                    self._start(place)
                return self._watch()
        finally:
            self._signal_all(signal.SIGKILL)
            os.close(self._held_end)
            os.close(self._leash)
            for number, handler in before.items():
                signal.signal(number, handler)

    def health(self) -> Mapping[str, Any]:
        """How many children run, as `/healthz` shows it."""
        running = sum(1 for child in list(self._children.values()) if child.poll() is None)
        return {"status": "ok" if running == self._size else "failing", "processes": running}

    def _hear(self, number: int, _frame: object) -> None:
        self._events.post(("signal", number))

    def _watch(self) -> int:
        stopping, code = False, 0
        while self._children:
            kind, value = self._events.get()
            if kind == "signal":
                self._signal_all(signal.SIGKILL if stopping else signal.SIGTERM)
                stopping = True
            elif kind == "start" and not stopping:
                self._start(value)
            elif kind == "ended" and self._code(value) == EXIT_CONFIG:
                self._signal_all(signal.SIGTERM)
                code, stopping = EXIT_CONFIG, True
            elif kind == "ended" and not stopping:
                self._start_again_later(value)
            if stopping:
                # Those that ended, and wait to be started again, have nothing to end.
                ended = [at for at, child in self._children.items() if child.poll() is not None]
                for place in ended:
                    del self._children[place]
        return code

    def _code(self, place: int) -> int:
        child = self._children.get(place)
        return child.poll() or 0 if child else 0

    def _start(self, place: int) -> None:
        # A group of its own: Ctrl-C in a terminal goes to this process, which passes it on once.
        child = subprocess.Popen(
            self._command(self._leash), pass_fds=(self._leash, *self._keeps), process_group=0
        )
        self._children[place] = child
        self._started[place] = time.monotonic()
        threading.Thread(target=self._wait_for, args=(place, child), daemon=True).start()

    def _wait_for(self, place: int, child: subprocess.Popen[bytes]) -> None:
        child.wait()
        self._events.post(("ended", place))

    def _start_again_later(self, place: int) -> None:
        child = self._children[place]
        lived = time.monotonic() - self._started[place]
        pause = FIRST_PAUSE_S if lived > LIVED_WELL_S else self._pauses[place]
        self._pauses[place] = min(2 * pause, LONGEST_PAUSE_S)
        log.error("process %d ended with code %d; another one starts in %g s", child.pid,
                  child.returncode, pause)  # fmt: skip
        timer = threading.Timer(pause, self._events.post, [("start", place)])
        timer.daemon = True
        timer.start()

    def _signal_all(self, number: signal.Signals) -> None:
        for child in list(self._children.values()):
            child.send_signal(number)  # does nothing to one that was waited for


def end_with_parent(leash: int) -> None:
    """Send oneself SIGTERM once the other end of the pipe has closed."""

    def watch() -> None:
        while os.read(leash, 1):
            pass
        log.error("the parent process is gone; ending")
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="lisa-leash", daemon=True).start()
