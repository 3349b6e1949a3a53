"""`lisa pipeline serve`."""

from __future__ import annotations

import gc
import logging
import os
import sys
import traceback
from collections.abc import Mapping
from importlib import import_module
from typing import NoReturn

import click

from lisa.cli.main import main
from lisa.cli.options import Chosen
from lisa.cli.pipeline import JOBS
from lisa.cli.pipeline.options import require_spark, spark_options
from lisa.core.model.errors import ConfigError

PRELOADED = (
    "deltalake",
    "jinja2",
    "matplotlib.pyplot",
    "pandas",
    "pyarrow.fs",
    "pyarrow.parquet",
    "pyspark.java_gateway",
    "pyspark.sql",
    "pyspark.sql.functions",
    "rich.console",
    "lisa.cli.pipeline.reading",
    "lisa.cli.pipeline.rows",
    "lisa.pipeline.archive.conversion",
    "lisa.pipeline.archive.database",
    "lisa.pipeline.archive.reading",
    "lisa.pipeline.archive.writing",
    "lisa.pipeline.jobs.archive",
    "lisa.pipeline.jobs.audit",
    "lisa.pipeline.jobs.deletion",
    "lisa.pipeline.jobs.report",
    "lisa.pipeline.jobs.restore",
    "lisa.pipeline.jobs.schedule",
    "lisa.pipeline.jobs.search",
    "lisa.pipeline.source.source",
)
"""Modules that commands need, and that take a while to import."""


@click.command()
@click.option(
    "--at-once",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="Maximum number of commands that run at the same time; others wait for their turn.",
)
@spark_options
def serve(at_once: int, master: str, spark_conf: dict[str, str], environment: str | None) -> None:
    """Keep a Spark session, in which the other commands of this user start at once.

    Runs until SIGTERM or Ctrl-C, which cancel the running commands. A command that needs another
    session (--master, --spark-conf, credentials in the environment) starts its own.
    """
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        raise ConfigError("`lisa pipeline serve` starts Spark itself: run it without spark-submit")
    require_spark()
    from lisa.pipeline.archive.drivers import installed_drivers
    from lisa.pipeline.warm.serving import WarmServer

    server = WarmServer(
        at_once,
        lambda line: click.echo(f"lisa pipeline serve: {line}", err=True),
        master=master,
        settings={**installed_drivers(), **spark_conf},
        environment=environment,
    )
    _preload()
    if server.run():
        _run_and_exit()


def _preload() -> None:
    """Import while Spark starts, so that no command has to."""
    # Threads would not survive a fork.
    single: Mapping[str, str] = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    before = {name: os.environ.get(name) for name in single}
    os.environ.update(single)
    for module in PRELOADED:
        import_module(module)
    for job in JOBS:
        import_module(f"lisa.cli.pipeline.{job}")
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    gc.collect()
    gc.freeze()  # so that forked commands share this memory


def _run_and_exit() -> NoReturn:
    """Run the command of this forked process, and end it without the server's own clean-up."""
    code: object = 1
    try:
        main(sys.argv[1:], obj=Chosen(warns=False))
    except SystemExit as ended:
        code = ended.code
    except BaseException:  # noqa: BLE001  as at the end of any program
        traceback.print_exc()
    finally:
        logging.shutdown()
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except OSError:
            code = 1
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)
