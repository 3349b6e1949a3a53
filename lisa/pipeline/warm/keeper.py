"""The keeper: the process that owns the JVM and its first session.

It opens a gateway for each command, so that commands neither share connections and callbacks nor
leave objects in the JVM. It ends, and the JVM with it, when the server closes its channel.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from lisa.core.model.errors import ConfigError, LisaError
from lisa.pipeline.session import comparable, settings_for, spark_session
from lisa.pipeline.source.options import listed
from lisa.pipeline.warm.protocol import (
    CloseGateway,
    GatewayOpened,
    GatewayRefused,
    MessageChannel,
    OpenGateway,
    SessionReady,
    StartFailure,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SIZES = (
    "spark.driver.memory",
    "spark.driver.maxResultSize",
    "spark.executor.",
    "spark.local.dir",
    "spark.scheduler.",
    "spark.ui.",
)
"""Settings, or beginnings of their names, that do not change results. The server's apply, unless
the user of a command names others."""


SHARED_SETTINGS = {
    "spark.scheduler.mode": "FAIR",  # commands share the cores, each with a pool of its own
    "spark.python.daemon.module": "lisa.pipeline.warm.daemon",
}
"""Settings that only a session of several commands has."""


def keep(
    channel: MessageChannel, master: str, settings: Mapping[str, str], environment: str | None
) -> None:
    """Start a session, and serve until the server closes the channel.

    Reports `SessionReady`, or `StartFailure` and returns.

    settings: Spark's settings that the user gave.
    """
    # The server decides when the session ends.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.setpgid(0, 0)
    try:
        spark = _session(master, settings, environment)
    except Exception as error:  # noqa: BLE001  reported by the server
        kind = type(error).__name__ if isinstance(error, LisaError) else "LisaError"
        channel.send(StartFailure(kind, " ".join(str(error).split())))
        return
    channel.send(SessionReady(str(spark.version)))
    keeper = Keeper(spark, comparable(settings_for(master, settings, environment)))
    try:
        while True:
            for message in channel.receive():
                if isinstance(message, OpenGateway):
                    channel.send(keeper.open(message))
                elif isinstance(message, CloseGateway):
                    keeper.close(message.number)
    except (EOFError, OSError):
        spark.stop()


def _session(master: str, settings: Mapping[str, str], environment: str | None) -> SparkSession:
    spark = spark_session(
        app="lisa pipeline serve",
        master=master,
        settings={**SHARED_SETTINGS, **settings},
        environment=environment,
    )
    # Loads what every job needs, so that the first command is as fast as the others.
    spark.range(2).selectExpr("try_parse_json('[1]') AS json", "id").groupBy("id").count().collect()
    return spark


class Keeper:
    """Gateways of the running commands.

    settings: those that the session was started with.
    """

    def __init__(self, spark: SparkSession, settings: Mapping[str, str]) -> None:
        self._spark, self._settings = spark, settings
        self._gateways: dict[int, Any] = {}

    def open(self, asked: OpenGateway) -> GatewayOpened | GatewayRefused:
        """Open a gateway for a command, if the session suits it."""
        context = self._spark.sparkContext
        if asked.master != self._settings_master():
            return GatewayRefused(asked.number, f"--master is {self._settings_master()} there")
        try:
            differing = differing_settings(
                self._settings, asked.settings, asked.named, self._spark.conf.isModifiable
            )
        except ConfigError as error:
            return GatewayRefused(asked.number, str(error))
        jvm: Any = context._jvm  # noqa: SLF001  PySpark has no public access to the JVM
        jsc: Any = context._jsc  # noqa: SLF001
        gateway = jvm.org.apache.spark.api.python.Py4JServer(jsc.getConf())
        gateway.start()
        self._gateways[asked.number] = gateway
        return GatewayOpened(
            asked.number, int(gateway.getListeningPort()), str(gateway.secret()), differing
        )

    def _settings_master(self) -> str:
        return str(self._spark.sparkContext.master)

    def close(self, number: int) -> None:
        """Cancel a command's jobs, and close its gateway; tables that it cached are dropped."""
        gateway = self._gateways.pop(number, None)
        if gateway is None:
            return
        self._spark.sparkContext.cancelJobsWithTag(tag_of(number))
        gateway.shutdown()
        if not self._gateways:  # all sessions share one cache
            self._spark.catalog.clearCache()


def tag_of(number: int) -> str:
    """The tag of all Spark jobs of a command."""
    return f"lisa-{number}"


def differing_settings(
    kept: Mapping[str, str],
    asked: Mapping[str, str],
    named: Collection[str],
    is_modifiable: Callable[[str], bool],
) -> dict[str, str | None]:
    """The settings that a command's own session needs to be as the command asks; None removes one.

    kept: settings of the server's session. asked: of the session that the command would start.
    named: those of them that the user named. is_modifiable: whether sessions can differ in it.

    Raises ConfigError if they differ in a setting of the whole JVM; the values may be secret.
    """
    differing: dict[str, str | None] = {}
    for name in sorted(kept.keys() | asked.keys()):
        ours, theirs = kept.get(name), asked.get(name)
        if ours == theirs or (name.startswith(SIZES) and name not in named):
            continue
        if name == "spark.jars" and set(listed(theirs or "")) <= set(listed(ours or "")):
            continue
        if not is_modifiable(name):
            raise ConfigError(f"the session was started with another {name}")
        differing[name] = theirs
    return differing
