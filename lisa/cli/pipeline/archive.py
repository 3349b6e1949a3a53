"""`lisa pipeline archive`."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lisa.cli.options import Chosen, Duration, common, pass_chosen
from lisa.cli.pipeline import run
from lisa.cli.pipeline.options import connection, session, spark_options
from lisa.core.errors import ConfigError

if TYPE_CHECKING:
    from lisa.pipeline.jobs.archive import Archived, Progress

__all__ = ["archive"]


@click.command()
@click.option("--to", "where", required=True, metavar="DIR|JDBC",
              help="A directory or URL that Hadoop knows, or a database.")  # fmt: skip
@click.option("--topic", "topics", multiple=True,
              help="Only this topic; may be repeated. Default: all with a journal.")  # fmt: skip
@click.option("--once", is_flag=True, help="End when all is archived that is there now.")
@click.option("--interval", type=Duration(), default="5s", show_default=True,
              help="How often a batch is written.")  # fmt: skip
@click.option("--max-events", type=click.IntRange(min=1), default=500_000, show_default=True,
              help="The most events of one batch.")  # fmt: skip
@click.option("--name", metavar="NAME",
              help="As what the journal knows it. Default: made from --to.")  # fmt: skip
@click.option("--on-gap", type=click.Choice(["fail", "record"]), default="fail",
              show_default=True, help="Where events are gone: end, or go on.")  # fmt: skip
@click.option("--compact", "compact_only", is_flag=True,
              help="Only make few files of many small ones, now.")  # fmt: skip
@click.option("--keep", type=Duration(), default="1h", show_default=True,
              help="How long compacted files stay for those who are reading them.")  # fmt: skip
@click.option("--checkpoint", metavar="DIR", help="Spark's notes; needed for JDBC.")
@click.option("--user", help="JDBC: the user.")
@click.option("--password-file", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="JDBC: a file that holds the password.")  # fmt: skip
@click.option("--driver-jar", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="JDBC: the driver. Default: Debian's.")  # fmt: skip
@spark_options
@common
@pass_chosen
def archive(
    chosen: Chosen, where: str, *, topics: tuple[str, ...], once: bool, interval: timedelta,
    max_events: int, name: str | None, on_gap: str, compact_only: bool, keep: timedelta,
    checkpoint: str | None, user: str | None, password_file: Path | None,
    driver_jar: Path | None, master: str, spark_conf: dict[str, str],
) -> None:  # fmt: skip
    """Keep every transition in the tables message_log and messages, exactly once.

    Runs until SIGTERM or Ctrl-C, then finishes its batch. Killed at any point, or ended, it is
    continued by the next run. The journal waits for it (topic option journal).

    Exit code 1 where the journal has a gap; it is named.
    """
    options = connection(chosen)
    is_jdbc = where.startswith("jdbc:")
    if is_jdbc and checkpoint is None and not compact_only:
        raise click.UsageError("an archive in a database needs --checkpoint DIR")
    if compact_only and is_jdbc:
        raise click.UsageError("--compact is for files; a database does that by itself")
    settings = {**(_driver(where, driver_jar) if is_jdbc else {}), **spark_conf}
    with _stopping() as stop, session("pipeline archive", master, settings) as spark:
        if compact_only:
            _compact(chosen, spark, where, keep)
            return
        from lisa.pipeline.jobs.archive import archive as keep_events

        _catch(stop)  # Spark has put up a handler of its own
        done = keep_events(
            spark, where, topics=topics or None, once=once, interval=interval,
            max_events=max_events, name=name, on_gap=on_gap, checkpoint=checkpoint, keep=keep,
            properties=_properties(user, password_file), stop=stop, progress=_teller(chosen),
            **options,
        )  # fmt: skip
    _tell(chosen, done)


def _driver(where: str, jar: Path | None) -> dict[str, str]:
    try:
        from lisa.pipeline.archive.database import jdbc_settings
    except ImportError as error:  # before `session` says that Spark is missing
        raise ConfigError(f"the pipeline needs Spark: {error}") from None
    return jdbc_settings(where, jar)


def _properties(user: str | None, password_file: Path | None) -> dict[str, str]:
    found = {} if user is None else {"user": user}
    if password_file is not None:
        found["password"] = password_file.read_text(encoding="utf-8").rstrip("\r\n")
    return found


@contextmanager
def _stopping() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set, the handlers before it put back at the end."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    stop = threading.Event()
    _catch(stop)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _catch(stop: threading.Event) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())


def _compact(chosen: Chosen, spark: Any, where: str, keep: timedelta) -> None:
    from lisa.cli.output import print_json
    from lisa.pipeline.archive import open_archive
    from lisa.pipeline.archive.writing import ParquetWriter

    open_archive(spark, where)  # says so where there is none, and makes none
    writer = ParquetWriter(spark, where, keep=keep)
    try:
        files = writer.compact(all_of_it=True)
        left = len(writer.manifest.files)
    finally:
        writer.close()
    if chosen.json:
        print_json({"where": where, "compacted": files, "files": left})
    else:
        click.echo(f"{files:,} files put together; the archive now consists of {left:,}")


def _teller(chosen: Chosen) -> Any:
    """Tells of each batch: a line for people on stderr, a JSON line for programs on stdout."""
    from lisa.cli.output import print_json
    from lisa.core.clock import human

    def tell(one: Progress) -> None:
        gaps = [gap.reason for gap in one.gaps]
        if chosen.json:
            print_json({
                "batch": one.batch, "events": one.events, "total": one.total,
                "seconds": round(one.seconds, 3), "lag_ms": one.lag_ms, "gaps": gaps,
            })  # fmt: skip
            return
        lag = "" if one.lag_ms is None else f", {human(one.lag_ms)} behind"
        rate = one.events / max(one.seconds, 0.001)
        click.echo(f"batch {one.batch}: {one.events:,} events, {rate:,.0f}/s{lag}", err=True)
        for line in gaps:
            click.echo(f"gap: {line}", err=True)

    return tell


def _tell(chosen: Chosen, done: Archived) -> None:
    from lisa.cli.output import print_json

    gaps: Sequence[str] = [gap.reason for gap in done.gaps]
    if chosen.json:
        print_json({
            "where": done.where, "name": done.name, "events": done.events,
            "batches": done.batches, "seconds": round(done.seconds, 3),
            "offsets": {topic: list(mark) for topic, mark in done.offsets.items()}, "gaps": gaps,
        })  # fmt: skip
        return
    told = f", {len(gaps)} gaps recorded" if gaps else ""
    click.echo(
        f"{done.events:,} events archived in {done.batches} batches ({done.seconds:,.1f} s){told}: "
        f"{done.where}"
    )


if __name__ == "__main__":
    run(archive)
