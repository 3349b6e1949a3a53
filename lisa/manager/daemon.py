"""The public `Manager` class and its daemon loop."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from lisa.core.daemon.process_signals import STOPPING, Mailbox
from lisa.core.daemon.status import HEALTH, StatusResponse, StatusServer, health_page
from lisa.core.metrics import topics as topic_metrics
from lisa.core.metrics.numbers import METRICS, Numbers, Reading, of_process
from lisa.core.model.errors import LisaError, ServerUnavailable
from lisa.core.model.keys import DEFAULT_GROUP, Keys
from lisa.core.redis.address import Address
from lisa.core.store import presence
from lisa.manager.engine import Engine
from lisa.manager.plan import Plan, Schedules

if TYPE_CHECKING:
    from lisa.core.settings import ManagerSettings

log = logging.getLogger(__name__)
_SCHEDULES = Schedules()
_AT_START = ("enabled", "redis", "prefix", "http", "log_format", "log_level", "handlers", "relay")
"""The settings that only a start applies, apart from those of `manager-server`."""


class Manager:
    """Promotes due messages, reclaims messages whose lease expired, and cleans up.

    Any number of managers may run at the same time.

    server, prefix: as for `Producer`.
    topics: topic names, or a mapping of names to topic options, such as
        `{"orders": {"ack_timeout": timedelta(seconds=30)}}`. The manager declares these options.
        The keys `group` and `groups` name groups to declare, and `key_limits` has limits of single
        keys, as in `{"customer-42": {"rate": "10/s", "concurrency": 4, "weight": 3}}`; those of
        `key_limits@billing` apply to the group `billing` only. The manager also finds and serves
        topics that are not listed here.
    groups: groups to declare by topic, such as `{"orders": ["billing"]}`.
    schedules: recurring messages, each a mapping of the arguments of `Producer.schedule`, such as
        `[{"name": "daily", "topic": "reports", "body": 1, "cron": "0 9 * * *"}]`. The manager
        declares them: it changes and removes only what a manager declared last.
    default_group: the group to declare when a consumer waits on a topic without any group.
    move, clean, process_pending, sweep: maximum interval between runs of each service, as a cron
        expression or a timedelta.
    http: the `HOST:PORT` that serves `/healthz` and `/metrics`.

    Raises ConfigError if an option is invalid, and InvalidMessage if a name or a schedule is.
    """

    def __init__(
        self,
        server: str | Address | None = None,
        *,
        topics: Mapping[str, Mapping[str, object]] | Iterable[str] = (),
        groups: Mapping[str, Iterable[str]] | None = None,
        schedules: Iterable[Mapping[str, Any]] = (),
        prefix: str | None = None,
        default_group: str = DEFAULT_GROUP,
        name: str | None = None,
        move: str | timedelta = _SCHEDULES.move,
        clean: str | timedelta = _SCHEDULES.clean,
        process_pending: str | timedelta = _SCHEDULES.process_pending,
        sweep: str | timedelta = _SCHEDULES.sweep,
        http: str | None = None,
    ) -> None:
        plan = Plan.of(
            topics,
            groups or {},
            default_group=default_group,
            schedules=Schedules(
                move=move, clean=clean, process_pending=process_pending, sweep=sweep
            ),
            recurring=schedules,
        )
        prefix = Keys.of(prefix).prefix
        self._set_up(Address.of(server), plan, prefix=prefix, name=name, http=http)

    def _set_up(
        self,
        address: Address,
        plan: Plan,
        *,
        prefix: str,
        name: str | None,
        http: str | None,
        read: Callable[[], ManagerSettings] | None = None,
        settings: ManagerSettings | None = None,
    ) -> None:
        unique = presence.unique_name(name or "manager")
        self._engine = Engine(address, plan, prefix, unique)
        self._status: StatusServer | None = None
        if http:
            pages: dict[str, Callable[[], StatusResponse]] = {
                HEALTH: lambda: health_page(self.health()),
                METRICS: self._metrics,
            }
            self._status = StatusServer(http, pages)
        self._beside: dict[str, Callable[[], dict[str, object]]] = {}
        self._numbers: list[Callable[[], Numbers]] = [of_process, self._engine.numbers]
        self._reading = Reading()
        self._reading_lock = threading.Lock()
        self._read = read
        self._settings = settings
        self._state = "new"
        self._signals: Mailbox[int] = Mailbox()

    @classmethod
    def from_config(cls, path: Path | str | None = None, **overrides: Any) -> Self:
        """Create a manager from a YAML file, the environment and the overrides.

        `run` reads them again on SIGHUP. Raises ConfigError if a setting is invalid.
        """
        from lisa.core.settings import ManagerSettings

        settings = ManagerSettings.load(path, **overrides)
        settings.require_enabled()
        manager = cls.__new__(cls)
        cls._set_up(
            manager,
            Address.from_settings(settings.redis),
            Plan.from_settings(settings),
            prefix=settings.prefix,
            name=None,
            http=settings.http,
            read=lambda: ManagerSettings.load(path, **overrides),
            settings=settings,
        )
        return manager

    @property
    def name(self) -> str:
        """The manager's unique name, as `lisa managers` lists it."""
        return self._engine.name

    @property
    def status_port(self) -> int | None:
        """The port of `/healthz` and `/metrics`, or None without `http`."""
        return self._status.port if self._status else None

    def start(self) -> Self:
        """Start the manager's threads and return the manager; waits for an unreachable server.

        Raises ConfigError if the server rejects the connection or has a newer data layout.
        """
        if self._state != "new":
            raise LisaError("a manager can be started only once; create a new one")
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
        """Finish running scripts, then stop. A second call does nothing."""
        if self._state != "running":
            return
        log.info("manager %s: stopping", self.name)
        self._state = "stopped"
        self._engine.stop()
        if self._status:
            self._status.stop()
        log.info("manager %s: stopped", self.name)

    def run(self) -> None:
        """Run until SIGTERM or SIGINT. SIGHUP reloads the configuration."""
        with self._signals.handling_signals(self._signals.post, (*STOPPING, signal.SIGHUP)):
            try:
                self.start()
                log.info("manager %s runs on %s", self.name, self._engine.store.where)
                while self._signals.get() == signal.SIGHUP:
                    self.reload()
            finally:
                self.stop()

    def reload(self) -> None:
        """Reload the configuration and declare its topics; only log an invalid configuration."""
        if self._read is None:
            log.warning("cannot reload: this manager was not created by Manager.from_config")
            return
        try:
            settings = self._read()
            plan = Plan.from_settings(settings)
        except LisaError as error:
            log.warning("configuration not reloaded, the previous one stays active: %s", error)
            return
        changes = [*self._engine.reconfigure(plan), *_not_applied(self._settings, settings)]
        for line in changes or ["nothing changed"]:
            log.info("reloaded: %s", line)

    def include(
        self, name: str, health: Callable[[], dict[str, object]], numbers: Callable[[], Numbers]
    ) -> None:
        """Show another service of this process in `/healthz`, under `name`, and `/metrics`.

        It does not change the manager's own status, for which the process may be restarted.
        """
        self._beside[name] = health
        self._numbers.append(numbers)

    def health(self) -> dict[str, object]:
        """The content of `/healthz`; `status` is ok, starting or failing."""
        beside = {name: health() for name, health in self._beside.items()}
        return self._engine.health() | beside

    def _metrics(self) -> StatusResponse:
        """The Prometheus page: the manager's own metrics, and the state of the topics in Redis."""
        # Imported on first use, so that a manager without scrapes does not load it.
        from lisa.core.metrics.page import metrics_page

        own = [numbers() for numbers in self._numbers]
        return metrics_page("manager", [*own, self._topics()])

    def _topics(self) -> Numbers:
        """The state of the topics; scrapes that come close to each other share one reading."""
        with self._reading_lock:
            known, began, store = self._reading.get(), time.monotonic(), self._engine.store
            if known is not None:
                return known
            try:
                if not self._engine.nodes.is_any_available:
                    raise ServerUnavailable(f"{store.where} does not answer")
                return self._reading.keep(store.drive(topic_metrics.read(store)), began)
            except LisaError as error:
                return self._reading.keep(error, began)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def _not_applied(started: ManagerSettings | None, now: ManagerSettings) -> list[str]:
    """A line that names the settings that differ from those at the start, if any."""
    names = [name for name in _AT_START if getattr(started, name) != getattr(now, name)]
    listed = ", ".join(name.replace("_", "-") for name in names)
    return [f"{listed} changed: restart to apply"] if names else []
