"""What the jobs' commands share: how Spark runs, where the server is, how an error ends them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from lisa.cli.options import Chosen
from lisa.core.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["connection", "session", "spark_options"]

F = TypeVar("F", bound=Callable[..., Any])


def _settings(
    ctx: click.Context,  # noqa: ARG001 - click's signature
    param: click.Parameter,
    value: tuple[str, ...],
) -> dict[str, str]:
    found = {}
    for pair in value:
        name, mark, text = pair.partition("=")
        if not mark or not name.startswith("spark."):
            raise click.BadParameter(
                f"{pair!r} is not NAME=VALUE, as in spark.driver.memory=2g", param=param
            )
        found[name] = text
    return found


def spark_options(command: F) -> F:
    """Add --master and --spark-conf: the command gets `master` and `spark_conf`, a dict."""
    for option in (
        click.option("--spark-conf", metavar="NAME=VALUE", multiple=True, callback=_settings,
                     help="A setting of Spark's; may be repeated."),
        click.option("--master", metavar="URL", default="local[*]", show_default=True,
                     help="Where Spark runs; spark-submit's own choice goes before this."),
    ):  # fmt: skip
        command = option(command)
    return command


@contextmanager
def session(
    name: str, master: str = "local[*]", spark_conf: dict[str, str] | None = None
) -> Iterator[SparkSession]:
    """The Spark session of the job `name`, stopped at its end; errors of tasks become Lisa's.

    Raises ConfigError in one line where Spark or Java is missing, and what went wrong in a task
    (ServerUnavailable, say) as the error that it was there.
    """
    try:
        import pyspark  # noqa: F401 - asked before anything of ours needs it
    except ImportError:
        raise ConfigError(
            "the pipeline needs Spark: pip install 'lisa-delay-queue[pipeline]', or [java] where "
            "there is no Java either"
        ) from None
    from lisa.pipeline.errors import unwrapped
    from lisa.pipeline.session import spark_session

    with unwrapped():
        spark = spark_session(app=f"lisa {name}", master=master, settings=spark_conf)
        try:
            yield spark
        finally:
            spark.stop()


def connection(chosen: Chosen) -> dict[str, str]:
    """Server and prefix, as --redis, --prefix, --config and the environment name them.

    In the form of the data source's options `url` and `prefix`. Raises ConfigError for what a
    URL cannot carry: Spark's workers know no more than that.
    """
    address, prefix = chosen.server()
    if address.options or address.username or address.password:
        from lisa.pipeline.source.options import as_url

        return {"url": as_url(address), "prefix": prefix}
    return {"url": address.url, "prefix": prefix}
