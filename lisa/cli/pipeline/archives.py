"""Which archive a job reads: --archive, and for one in a database how to get in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from lisa.core.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from lisa.pipeline.archive import Archive

__all__ = ["Source", "archive_options"]

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Source:
    """What the options say; falsy where no archive is named."""

    where: str | None
    driver_jar: Path | None = None
    properties: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __bool__(self) -> bool:
        return self.where is not None

    def settings(self, given: Mapping[str, str]) -> dict[str, str]:
        """Spark's settings, with the driver of a database. Raises ConfigError."""
        if self.where is None or not self.where.startswith("jdbc:"):
            return dict(given)
        try:
            from lisa.pipeline.archive.database import jdbc_settings
        except ImportError as error:  # before `session` says that Spark is missing
            raise ConfigError(f"the pipeline needs Spark: {error}") from None
        return {**jdbc_settings(self.where, self.driver_jar), **given}

    def open(self, spark: SparkSession) -> Archive:
        """The archive as it is now. Raises ConfigError if there is none."""
        from lisa.pipeline.archive import open_archive

        if self.where is None:
            raise ConfigError("no archive is named; give --archive")
        return open_archive(spark, self.where, self.properties)


def archive_options(*, required: bool) -> Callable[[F], F]:
    """Add --archive, --user, --password-file and --driver-jar: the command gets `source`."""

    def add(command: F) -> F:
        @wraps(command)
        def call(
            *args: Any, where: str | None, user: str | None, password_file: Path | None,
            driver_jar: Path | None, **rest: Any,
        ) -> Any:  # fmt: skip
            properties = {} if user is None else {"user": user}
            if password_file is not None:
                properties["password"] = password_file.read_text("utf-8").rstrip("\r\n")
            return command(*args, source=Source(where, driver_jar, properties), **rest)

        made: Any = call
        existing = click.Path(exists=True, dir_okay=False, path_type=Path)
        for option in (
            click.option("--driver-jar", type=existing,
                         help="JDBC: the driver. Default: Debian's."),
            click.option("--password-file", type=existing,
                         help="JDBC: a file that holds the password."),
            click.option("--user", help="JDBC: the user."),
            click.option("--archive", "where", required=required, metavar="DIR|JDBC",
                         help="The archive."),
        ):  # fmt: skip
            made = option(made)
        return made  # type: ignore[no-any-return]

    return add
