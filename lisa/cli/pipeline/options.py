"""Options that several jobs have: Spark's settings, the server's address, topics, a period."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, tzinfo
from functools import wraps
from typing import TYPE_CHECKING, Any, TypedDict

import click

from lisa.cli.options import Chosen, common, together
from lisa.cli.pipeline.archives import ArchiveSource
from lisa.cli.pipeline.progress import progress_lines
from lisa.core.model.errors import ConfigError
from lisa.core.model.extras import requires

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

topic_option = click.option(
    "--topic", "topics", multiple=True, help="Only this topic; may be repeated."
)
id_option = click.option("--id", "ids", multiple=True, help="Only this message; may be repeated.")


class ServerOptions(TypedDict):
    """The server, as options of the data source and arguments of the jobs."""

    url: str
    prefix: str


def require_spark() -> None:
    """Raise MissingExtra if Spark is missing; call it before the pipeline's modules import it."""
    with requires("pipeline"):
        import pyspark  # noqa: F401


def _silence_query_errors() -> None:
    """Commands print one line for a query that Spark refuses; PySpark logs its plan and stack."""
    from pyspark.logger import PySparkLogger

    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(name).disabled = True


@dataclass(frozen=True, slots=True)
class JobOptions:
    """The values of the options that all jobs have."""

    chosen: Chosen
    master: str
    spark_conf: Mapping[str, str]
    environment: str | None = None

    @property
    def json(self) -> bool:
        """Whether to print JSON."""
        return self.chosen.json

    @contextmanager
    def session(
        self, name: str, settings: Mapping[str, str] | None = None, *, progress: bool = True
    ) -> Iterator[SparkSession]:
        """The Spark session of the job `name`; stops it on exit.

        settings: overridden by --spark-conf. progress: whether to print progress lines to stderr
        while it is not a terminal; never with --json.

        Raises ConfigError if Spark or Java is missing. If a task raises one of Lisa's errors (for
        example ServerUnavailable), that error is raised instead of Spark's.
        """
        require_spark()
        _silence_query_errors()
        from lisa.pipeline.errors import unwrapped
        from lisa.pipeline.session import spark_session
        from lisa.pipeline.warm.attached import attached

        together = {**(settings or {}), **self.spark_conf}
        with (
            unwrapped(),
            progress_lines(f"lisa pipeline {name}", shown=progress and not self.json) as lines,
        ):
            warm = attached()
            if warm is not None:
                spark = warm.session()
                lines.stages = warm.stages
            else:
                spark = spark_session(
                    app=f"lisa pipeline {name}",
                    master=self.master,
                    settings=together,
                    environment=self.environment,
                )
            lines.spark, lines.stage = spark, ""
            try:
                yield spark
            finally:
                lines.spark = None
                if warm is None:
                    spark.stop()

    def run_in_server(self, source: ArchiveSource | None) -> int | None:
        """Run this command in the session of `lisa pipeline serve`; returns its exit code.

        Returns None if it must run here. source: the command's archive.
        """
        from lisa.pipeline.warm.client import is_present, run_in_server

        if not is_present():
            return None
        from lisa.pipeline.session import comparable, settings_for

        try:
            made = {**(source.settings() if source else {}), **self.spark_conf}
            settings = comparable(settings_for(self.master, made, self.environment))
        except ConfigError:  # the command reports it in its own place
            return None
        return run_in_server(
            self.chosen.words,
            self.master,
            settings,
            list(self.spark_conf),
            lambda line: None if self.json else click.echo(line, err=True),
        )

    def connection(self) -> ServerOptions:
        """The data source's options `url` and `prefix`, from the command line and environment.

        Raises ConfigError if a URL cannot express the server's settings: Spark's workers receive
        only a URL.
        """
        address, prefix = self.chosen.server()
        if "?" in address.url or address.options or address.username or address.password:
            from lisa.pipeline.source.options import as_url

            return {"url": as_url(address), "prefix": prefix}
        return {"url": address.url, "prefix": prefix}

    def show_stage(self, description: str) -> None:
        """Print the current stage to stderr; print nothing with --json."""
        if not self.json:
            click.echo(f"{description} ...", err=True)


def pairs(example: str, *, prefix: str = "") -> Callable[..., dict[str, str]]:
    """A click callback that parses NAME=VALUE pairs; names must begin with `prefix`."""

    def parse(
        ctx: click.Context,  # noqa: ARG001 - click's signature
        param: click.Parameter,
        value: tuple[str, ...],
    ) -> dict[str, str]:
        for pair in value:
            if "=" not in pair or not pair.startswith(prefix):
                raise click.BadParameter(
                    f"{pair!r} is not NAME=VALUE, as in {example}", param=param
                )
        return dict(pair.split("=", 1) for pair in value)

    return parse


spark_options = together(
    click.option(
        "--master",
        metavar="URL",
        default="local[*]",
        show_default=True,
        help="Spark's master; ignored under spark-submit, which has its own option.",
    ),
    click.option(
        "--spark-conf",
        metavar="NAME=VALUE",
        multiple=True,
        callback=pairs("spark.driver.memory=2g", prefix="spark."),
        help="A Spark setting; may be repeated.",
    ),
    click.option(
        "--environment",
        metavar="FILE",
        help="Archive of the Python environment for the executors of a cluster, made by venv-pack "
        "or conda-pack: a path or URL.",
    ),
)
"""The options that decide how a Spark session starts."""

_job_options = together(
    spark_options,
    click.option(
        "--server/--no-server",
        default=True,
        show_default=True,
        help="Use the session of `lisa pipeline serve`, if it runs.",
    ),
    common,
)


def job_options(
    command: Callable[..., Any], *, is_alone: Callable[[Mapping[str, Any]], bool] | None = None
) -> Callable[..., Any]:
    """Add the options of all jobs; the command receives their values as `JobOptions`.

    If `lisa pipeline serve` runs, and --no-server is not given, the command runs there.

    is_alone: whether a command with these other options always has a session of its own.
    """

    @wraps(command)
    def call(
        chosen: Chosen,
        *args: Any,
        master: str,
        spark_conf: dict[str, str],
        environment: str | None,
        server: bool,
        **rest: Any,
    ) -> Any:
        shared = JobOptions(chosen, master, spark_conf, environment)
        if server and chosen.words and not (is_alone is not None and is_alone(rest)):
            source = rest.get("source")
            code = shared.run_in_server(source if isinstance(source, ArchiveSource) else None)
            if code is not None:
                raise click.exceptions.Exit(code)
        return command(shared, *args, **rest)

    return _job_options(call)


def aware(option: str, moment: datetime | None, zone: tzinfo | None = None) -> datetime | None:
    """The time; without an offset it is in `zone`. Raises UsageError if there is neither."""
    if moment is None or moment.utcoffset() is not None:
        return moment
    if zone is None:
        raise click.UsageError(
            f"{option} {moment.isoformat()} has no time zone; add Z or an offset (+01:00)"
        )
    return moment.replace(tzinfo=zone)


def period(
    start: datetime | None, end: datetime | None, *, until: str, zone: tzinfo | None = None
) -> tuple[datetime | None, datetime | None]:
    """The times of the options --from and `until` (see `aware`).

    Raises UsageError unless the start is before the end.
    """
    start, end = aware("--from", start, zone), aware(until, end, zone)
    if start is not None and end is not None and start >= end:
        raise click.UsageError(f"--from must be before {until}")
    return start, end
