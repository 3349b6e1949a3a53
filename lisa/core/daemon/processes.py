"""Runs several child processes of one role and restarts those that exit; exit codes, and memory.

Service managers restart a daemon unless it ended with 0 or 2.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from queue import Empty
from typing import Any

from lisa.core.daemon.process_signals import Mailbox, stopping
from lisa.core.model.backoff import Backoff
from lisa.core.model.errors import ConfigError, InvalidMessage, LisaError, ServerUnavailable

EXIT_CONFIG = 2
"""A restart would fail again: a child that ends with it stops its siblings."""

FIRST_RESTART_S = 1.0
LONGEST_RESTART_S = 30.0
STABLE_AFTER_S = 10.0
"""A child that ran longer is restarted after the first pause again."""

MEMORY = "/dev/shm"  # noqa: S108  Linux's file system in memory

Event = tuple[str, int]
"""("signal", number), ("ended", slot), or ("start", slot) when a pause has passed."""


def exit_code(error: LisaError) -> int:
    """2 for an error that a restart does not fix, 3 for an unavailable server, 1 for others."""
    if isinstance(error, ServerUnavailable):
        return 3
    return EXIT_CONFIG if isinstance(error, (ConfigError, InvalidMessage)) else 1


def freeze_loaded_objects() -> None:
    """Exclude the objects loaded so far from garbage collection.

    A full collection of them takes 20 ms and delays messages by as much; at the end of the process
    it takes 100 ms.
    """
    gc.collect()
    gc.freeze()


log = logging.getLogger("lisa.processes")


class ChildProcesses:
    """Starts `size` child processes, restarts those that exit, and stops all when it ends.

    `command` is run with the option --parent-pipe: the read end of a pipe that closes when this
    process exits for any reason (see `end_with_parent`). `keeps` are further file descriptors that
    the children inherit.
    """

    def __init__(self, size: int, command: Sequence[str], *, keeps: Sequence[int] = ()) -> None:
        self._keeps = tuple(keeps)
        self._size = size
        self._command = command
        self._events: Mailbox[Event] = Mailbox()
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._started: dict[int, float] = {}
        self._restarts: dict[int, float] = {}  # when to start another child, by `time.monotonic`
        self._backoff = [Backoff(FIRST_RESTART_S, LONGEST_RESTART_S) for _ in range(size)]
        self._parent_pipe, self._held_end = os.pipe()

    def run(self) -> int:
        """Run until SIGTERM, SIGINT or SIGHUP; return the exit code.

        A second signal, other than SIGHUP, kills the children.
        """
        with self._events.handling_signals(
            lambda number: self._events.post(("signal", number)), stopping()
        ):
            try:
                for slot in range(self._size):
                    self._start(slot)
                return self._watch()
            finally:
                self._signal_all(signal.SIGKILL)
                os.close(self._held_end)
                os.close(self._parent_pipe)

    def health(self) -> Mapping[str, Any]:
        """The number of running children, for `/healthz`."""
        running = sum(1 for child in list(self._children.values()) if child.poll() is None)
        return {"status": "ok" if running == self._size else "failing", "processes": running}

    def _watch(self) -> int:
        is_stopping, is_asked, code = False, False, 0
        while self._children:
            kind, value = self._next_event()
            if kind == "signal":
                # A closing terminal, or systemd, may send SIGHUP along with another signal.
                is_final = is_asked and value != signal.SIGHUP
                is_asked = is_asked or value != signal.SIGHUP
                if is_final or not is_stopping:
                    self._signal_all(signal.SIGKILL if is_final else signal.SIGTERM)
                is_stopping = True
            elif kind == "start" and not is_stopping:
                self._start_again(value)
            elif kind == "ended" and self._exit_code(value) == EXIT_CONFIG:
                if not is_stopping:  # a second signal would cut the grace period of handlers short
                    self._signal_all(signal.SIGTERM)
                code, is_stopping, is_asked = EXIT_CONFIG, True, True
            elif kind == "ended" and not is_stopping:
                self._start_again_later(value)
            if is_stopping:
                # Children that wait for their restart have already exited.
                ended = [slot for slot, child in self._children.items() if child.poll() is not None]
                for slot in ended:
                    del self._children[slot]
        return code

    def _next_event(self) -> Event:
        slot = min(self._restarts, key=self._restarts.__getitem__, default=None)
        if slot is None:
            return self._events.get()
        try:
            return self._events.get(self._restarts[slot] - time.monotonic())
        except Empty:
            del self._restarts[slot]
            return "start", slot

    def _exit_code(self, slot: int) -> int:
        child = self._children.get(slot)
        return child.poll() or 0 if child else 0

    def _start(self, slot: int) -> None:
        # Own process group: Ctrl-C in a terminal reaches only this process, which forwards it once.
        child = subprocess.Popen(
            [*self._command, "--parent-pipe", str(self._parent_pipe)],
            pass_fds=(self._parent_pipe, *self._keeps),
            process_group=0,
        )
        try:
            threading.Thread(target=self._wait_for, args=(slot, child), daemon=True).start()
        except RuntimeError:  # at the thread limit
            child.kill()
            child.wait()
            raise
        self._children[slot] = child
        self._started[slot] = time.monotonic()

    def _wait_for(self, slot: int, child: subprocess.Popen[bytes]) -> None:
        child.wait()
        self._events.post(("ended", slot))

    def _start_again_later(self, slot: int) -> None:
        child = self._children[slot]
        lived = time.monotonic() - self._started[slot]
        if lived > STABLE_AFTER_S:
            self._backoff[slot].reset()
        pause = self._pause(slot)
        log.error(
            "process %d ended with code %d; another one starts in %g s",
            child.pid,
            child.returncode,
            pause,
        )

    def _start_again(self, slot: int) -> None:
        """Start another child; try again later if the machine is short of memory or processes."""
        try:
            self._start(slot)
        except (OSError, RuntimeError) as error:
            pause = self._pause(slot)
            log.warning("cannot start a process: %s; trying again in %g s", error, pause)

    def _pause(self, slot: int) -> float:
        """Schedule the next start in a slot; returns the seconds until then."""
        pause = self._backoff[slot].take()
        self._restarts[slot] = time.monotonic() + pause
        return pause

    def _signal_all(self, number: signal.Signals) -> None:
        for child in list(self._children.values()):
            child.send_signal(number)  # no effect on an exited child


def python(module: str, *arguments: str) -> list[str]:
    """The command line that runs a module of Lisa.

    With -P, a file of the current directory such as `redis.py` does not replace the package.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def writable_folder() -> str:
    """A folder for temporary files: in memory if all others are read-only, as in containers.

    Raises ConfigError if there is none.
    """
    try:
        return tempfile.gettempdir()
    except FileNotFoundError as error:
        if os.access(MEMORY, os.W_OK):
            return MEMORY
        raise ConfigError(
            "there is no writable folder for temporary files: mount one at /tmp, or name one in "
            "TMPDIR"
        ) from error


def is_running(pid: int) -> bool:
    """Whether this machine has a process of that id, of any user."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def when_parent_ends(parent_pipe: int, action: Callable[[], None]) -> None:
    """Call `action`, in a thread, when the parent closes its end of the pipe or dies."""

    def watch() -> None:
        while os.read(parent_pipe, 1):
            pass
        action()

    threading.Thread(target=watch, name="lisa-parent-watch", daemon=True).start()


def end_with_parent(parent_pipe: int) -> None:
    """Send SIGTERM to this process when the parent's end of the pipe closes."""

    def end() -> None:
        log.error("the parent process is gone; ending")
        os.kill(os.getpid(), signal.SIGTERM)

    when_parent_ends(parent_pipe, end)
