"""What the commands share: options, the Spark session, progress lines, and lists of messages."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime, tzinfo
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from lisa.cli.options import Chosen, common, read_text_file, together
from lisa.cli.output import iso, print_table
from lisa.core.model.errors import ConfigError
from lisa.core.model.extras import requires
from lisa.core.model.keys import shown_id
from lisa.core.model.sharding import shard_named

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from lisa.pipeline.archive import Archive
    from lisa.pipeline.jobs.windows import Window
    from lisa.pipeline.server import Server

topic_option = click.option(
    "--topic", "topics", multiple=True, help="Only this topic; may be repeated."
)
id_option = click.option("--id", "ids", multiple=True, help="Only this message; may be repeated.")


F = TypeVar("F", bound=Callable[..., Any])

EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class JobOptions:
    """The values of the options that all jobs have."""

    chosen: Chosen
    master: str | None
    spark_conf: Mapping[str, str]
    environment: str | None = None

    @property
    def json(self) -> bool:
        """Whether to print JSON."""
        return self.chosen.json

    @contextmanager
    def session(
        self, name: str, archive: ArchiveSource | None = None, *, progress: bool = True
    ) -> Iterator[SparkSession]:
        """The Spark session of the job `name`; stops it on exit.

        archive: what the job reads or writes. progress: whether to print progress lines to stderr
        while it is not a terminal; never with --json.

        Raises ConfigError if Spark or Java is missing. If a task raises one of Lisa's errors (for
        example ServerUnavailable), that error is raised instead of Spark's.
        """
        with requires("pipeline"):
            from pyspark.logger import PySparkLogger
        # Commands print one line for a query that Spark refuses; PySpark logs its plan and stack.
        for logger in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
            PySparkLogger.getLogger(logger).disabled = True
        from lisa.pipeline.errors import unwrapped
        from lisa.pipeline.session import (
            chosen_master,
            is_connect,
            refuse_connect,
            spark_session,
        )

        remote = is_connect(chosen_master(self.master))
        refuse_connect(remote and name == "archive", "lisa pipeline archive")
        refuse_connect(
            remote and archive is not None and archive.is_database, "an archive in a database"
        )
        with (
            unwrapped(),
            progress_lines(f"lisa pipeline {name}", shown=progress and not self.json) as lines,
        ):
            spark = spark_session(
                app=f"lisa pipeline {name}",
                master=self.master,
                settings={**(archive.settings() if archive else {}), **self.spark_conf},
                environment=self.environment,
            )
            lines.spark, lines.stage = spark, ""
            try:
                yield spark
            finally:
                lines.spark = None
                spark.stop()

    def server(self) -> Server:
        """The server that the command line or the environment names.

        Raises ConfigError if a URL cannot express its settings: Spark's workers receive only a URL.
        """
        from lisa.pipeline.server import Server
        from lisa.pipeline.source.options import as_url

        address, prefix = self.chosen.server()
        return Server(as_url(address), prefix)

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


_job_options = together(
    click.option(
        "--master",
        metavar="URL",
        help="Spark's master, or sc://HOST:PORT for Spark Connect. Default: $SPARK_REMOTE, else "
        "local[*]. Ignored under spark-submit, which has its own option.",
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
    common,
)


def job_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of all jobs; the command receives their values as `JobOptions`."""

    @wraps(command)
    def call(
        chosen: Chosen,
        *args: Any,
        master: str | None,
        spark_conf: dict[str, str],
        environment: str | None,
        **rest: Any,
    ) -> Any:
        return command(JobOptions(chosen, master, spark_conf, environment), *args, **rest)

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


@dataclass(frozen=True, slots=True)
class ArchiveSource:
    """The values of the archive options; falsy if no archive was given."""

    where: str | None
    driver_jar: Path | None = None
    properties: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __bool__(self) -> bool:
        return self.where is not None

    @property
    def is_database(self) -> bool:
        """Whether the archive is in a database."""
        return self.where is not None and self.where.startswith("jdbc:")

    def settings(self) -> dict[str, str]:
        """The Spark settings that load the JDBC driver; empty for an archive in files.

        Raises ConfigError if the driver file does not exist or the URL is not supported.
        """
        if self.where is None or not self.is_database:
            return {}
        from lisa.pipeline.archive.database import jdbc_settings

        return jdbc_settings(self.where, self.driver_jar)

    def open(self, spark: SparkSession) -> Archive:
        """Open the present version of the archive. Raises ConfigError if there is none."""
        from lisa.pipeline.archive import open_archive

        if self.where is None:
            raise ConfigError("no archive was given; add --archive")
        return open_archive(spark, self.where, self.properties)


def archive_option(*, required: bool = True) -> Callable[[F], F]:
    """Add --archive, for an archive in files; the command receives `source`."""

    def add(command: F) -> F:
        @wraps(command)
        def call(*args: Any, where: str | None, **rest: Any) -> Any:
            source = ArchiveSource(where)
            if source.is_database:
                from lisa.pipeline.archive import IN_SQL

                raise ConfigError(IN_SQL)
            return command(*args, source=source, **rest)

        made: Any = call
        option = click.option(
            "--archive", "where", required=required, metavar="DIR", help="The archive."
        )
        return option(made)  # type: ignore[no-any-return]

    return add


def archive_options(name: str, help_text: str) -> Callable[[F], F]:
    """Add `name`, --user, --password-file and --driver-jar; the command receives `source`."""

    def add(command: F) -> F:
        @wraps(command)
        def call(
            *args: Any,
            where: str,
            user: str | None,
            password_file: Path | None,
            driver_jar: Path | None,
            **rest: Any,
        ) -> Any:
            properties = {} if user is None else {"user": user}
            if password_file is not None:
                first_line = read_text_file(password_file).partition("\n")[0]
                properties["password"] = first_line.rstrip("\r")
            return command(*args, source=ArchiveSource(where, driver_jar, properties), **rest)

        existing = click.Path(exists=True, dir_okay=False, path_type=Path)
        options = together(
            click.option(name, "where", required=True, metavar="DIR|JDBC", help=help_text),
            click.option("--user", help="JDBC: user name."),
            click.option(
                "--password-file",
                type=existing,
                help="JDBC: file whose first line is the password.",
            ),
            click.option(
                "--driver-jar",
                type=existing,
                help="JDBC: driver. Default: the driver of Debian's package.",
            ),
        )
        made: Any = call
        return options(made)  # type: ignore[no-any-return]

    return add


class ProgressLines:
    """Prints the job's name, its duration, and the finished tasks of its running stages.

    stage: what the job is doing. spark: None while Spark starts; Spark Connect reports no tasks.
    """

    def __init__(self, name: str) -> None:
        self.stage = "starting Spark"
        self.spark: SparkSession | None = None
        self._name, self._began = name, time.monotonic()

    def line(self) -> str:
        """The line to print now."""
        words = [f"{time.monotonic() - self._began:,.0f} s"]
        done, known = self._tasks()
        if known:
            words.append(f"{done:,} of {known:,} tasks")
        if self.stage:
            words.append(self.stage)
        return f"{self._name}: {', '.join(words)}"

    def _tasks(self) -> tuple[int, int]:
        from lisa.pipeline.session import is_remote

        if self.spark is None or is_remote(self.spark):
            return 0, 0
        tracker = self.spark.sparkContext.statusTracker()
        stages = map(tracker.getStageInfo, tracker.getActiveStageIds())
        infos = [stage for stage in stages if stage is not None]
        return sum(info.numCompletedTasks for info in infos), sum(info.numTasks for info in infos)


@contextmanager
def progress_lines(name: str, *, shown: bool) -> Iterator[ProgressLines]:
    """Print the progress of this block, if `shown`, unless stderr is a terminal."""
    lines, ended = ProgressLines(name), threading.Event()

    def run() -> None:
        while not ended.wait(EVERY_S):
            try:
                click.echo(lines.line(), err=True)
            except Exception:  # noqa: BLE001  Spark is stopping, or stderr is closed
                return

    thread = threading.Thread(target=run, daemon=True, name="lisa-progress-lines")
    if shown and not sys.stderr.isatty():
        thread.start()
    try:
        yield lines
    finally:
        ended.set()
        if thread.is_alive():
            thread.join()


def print_messages(
    columns: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    *,
    total: int,
    title: str = "",
) -> None:
    """Print the first rows of a list, and how many more there are.

    names: the row's value of each column; those ending in _ms are shown as times.
    """
    cells = [[_cell(name, row[name]) for name in names] for row in rows]
    more = total - len(rows)
    if more:
        cells.append([f"and {more:,} more", *[""] * (len(names) - 1)])
    print_table(columns, cells, title)


def _cell(name: str, value: Any) -> object:
    if name == "id":
        return shown_id(value)
    return iso(value) if name.endswith("_ms") else value


def print_windows(columns: Sequence[str], windows: Sequence[Window], title: str = "") -> None:
    """Print windows of time: topic or shard, begin, end and reason; nothing without windows."""
    if windows:
        rows = [
            (
                shard_named(window.topic, window.shard),
                iso(window.after_ms),
                iso(window.until_ms),
                window.reason,
            )
            for window in windows
        ]
        print_table(columns, rows, title)


def with_times(windows: Sequence[Window]) -> list[dict[str, Any]]:
    """Windows for JSON, with their times also in ISO 8601."""
    return [
        asdict(window) | {"after": iso(window.after_ms), "until": iso(window.until_ms)}
        for window in windows
    ]
