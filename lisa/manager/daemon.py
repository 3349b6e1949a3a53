"""The manager as its users see it, and its life as a daemon."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

from lisa.core import presence
from lisa.core.address import DEFAULT_URL, Address
from lisa.core.errors import LisaError
from lisa.core.keys import DEFAULT_PREFIX
from lisa.core.mailbox import STOPPING, Mailbox
from lisa.core.metrics.cache import METRICS
from lisa.core.status import HEALTH, Page, StatusServer, health_page
from lisa.manager.engine import Engine
from lisa.manager.metrics import MetricsPage
from lisa.manager.plan import DEFAULT_GROUP, Plan, Schedules

__all__ = ["Manager"]

log = logging.getLogger(__name__)
_SCHEDULES = Schedules()


class Manager:
    """Moves messages: promotes what is due, takes back what was not settled, sweeps.

    Any number may run at once. `topics` are names, or a mapping of names to topic options
    (`{"orders": {"ack_timeout": timedelta(seconds=30)}}`), which are declared; among the options
    `group` or `groups` names groups to declare, as `groups={"orders": ["billing"]}` does. A topic
    without any group gets `default_group` once a consumer asks for one; messages alone declare
    nothing. Topics that are not named are found by themselves.

    `move`, `clean`, `process_pending` and `sweep` say when the services run at the latest: cron
    expressions or intervals. `http` is the `HOST:PORT` where `/healthz` and `/metrics` are
    served.

    Raises ConfigError, InvalidMessage.
    """

    def __init__(
        self,
        server: str | Address = DEFAULT_URL,
        *,
        topics: Mapping[str, Mapping[str, object]] | Iterable[str] = (),
        groups: Mapping[str, Iterable[str]] | None = None,
        prefix: str = DEFAULT_PREFIX,
        default_group: str = DEFAULT_GROUP,
        name: str | None = None,
        move: str | timedelta = _SCHEDULES.move,
        clean: str | timedelta = _SCHEDULES.clean,
        process_pending: str | timedelta = _SCHEDULES.process_pending,
        sweep: str | timedelta = _SCHEDULES.sweep,
        http: str | None = None,
    ) -> None:
        schedules = Schedules(move=move, clean=clean, process_pending=process_pending, sweep=sweep)
        plan = Plan.of(topics, groups or {}, default_group=default_group, schedules=schedules)
        self._set_up(Address.of(server), plan, prefix=prefix, name=name, http=http, read=None)

    def _set_up(
        self,
        address: Address,
        plan: Plan,
        *,
        prefix: str,
        name: str | None,
        http: str | None,
        read: Callable[[], Plan] | None,
    ) -> None:
        unique = presence.unique_name(name or "manager")
        self._engine = Engine(address, plan, prefix, unique)
        self._status: StatusServer | None = None
        if http:
            pages: dict[str, Callable[[], Page]] = {
                HEALTH: lambda: health_page(self._engine.health()),
                METRICS: MetricsPage(self._engine),
            }
            self._status = StatusServer(http, pages)
        self._read = read
        self._state = "new"
        self._signals: Mailbox[int] = Mailbox()

    @classmethod
    def from_config(cls, path: Path | str | None = None, **overrides: Any) -> Self:
        """A manager as the YAML, the environment and the overrides describe it.

        Raises ConfigError. SIGHUP makes `run` read them again.
        """
        from lisa.core.settings import ManagerSettings

        settings = ManagerSettings.load(path, **overrides)
        settings.require_enabled()
        manager = cls.__new__(cls)
        cls._set_up(
            manager, Address.from_settings(settings.redis), Plan.from_settings(settings),
            prefix=settings.prefix, name=None, http=settings.http,
            read=lambda: Plan.from_settings(ManagerSettings.load(path, **overrides)),
        )  # fmt: skip
        return manager

    @property
    def name(self) -> str:
        """The name under which `lisa managers` lists it; no two are the same."""
        return self._engine.name

    @property
    def status_port(self) -> int | None:
        """Where `/healthz` and `/metrics` are served, if they are."""
        return self._status.port if self._status else None

    def start(self) -> Self:
        """Begin, on threads of its own; a server that is not there is waited for.

        Returns the manager. Raises ConfigError if the server refuses us, or is of a newer layout.
        """
        if self._state != "new":
            raise LisaError("a manager starts once: make another one")
        self._state = "running"
        if self._status:
            self._status.start()
        try:
            self._engine.start()
        except LisaError:
            self._state = "stopped"
            if self._status:
                self._status.stop()
            raise
        return self

    def stop(self) -> None:
        """Finish the scripts that run, and end. Again: nothing."""
        if self._state != "running":
            return
        self._state = "stopped"
        self._engine.stop()
        if self._status:
            self._status.stop()

    def run(self) -> None:
        """Work until SIGTERM or SIGINT; SIGHUP reads the configuration again."""
        before = {
            number: signal.signal(number, lambda number, _frame: self._signals.post(number))
            for number in (*STOPPING, signal.SIGHUP)
        }
        try:
            with self._signals.hearing_signals():
                self.start()
                log.info("manager %s runs on %s", self.name, self._engine.store.where)
                while self._signals.get() == signal.SIGHUP:
                    self.reload()
            log.info("manager %s stops", self.name)
        finally:
            self.stop()
            for number, handler in before.items():
                signal.signal(number, handler)

    def reload(self) -> None:
        """Read the configuration again and declare what it says; a bad one is logged, no more."""
        if self._read is None:
            log.warning("this manager was not made from a configuration: nothing to read again")
            return
        try:
            plan = self._read()
        except LisaError as error:
            log.warning("the configuration stays as it was: %s", error)
            return
        changes = self._engine.reconfigure(plan)
        for line in changes or ["nothing changed"]:
            log.info("reloaded: %s", line)

    def health(self) -> dict[str, object]:
        """What `/healthz` tells: `status` is ok, starting or failing."""
        return self._engine.health()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
