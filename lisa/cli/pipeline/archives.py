"""Options that select an archive: --archive or --to, and credentials for a database."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from lisa.cli.options import read_text_file, together
from lisa.core.model.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from lisa.pipeline.archive import Archive

F = TypeVar("F", bound=Callable[..., Any])


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
        try:
            from lisa.pipeline.archive.drivers import jdbc_settings
        except ImportError as error:  # runs before `session` reports that Spark is missing
            raise ConfigError(f"the pipeline needs Spark: {error}") from None
        return jdbc_settings(self.where, self.driver_jar)

    def open(self, spark: SparkSession) -> Archive:
        """Open the present version of the archive. Raises ConfigError if there is none."""
        from lisa.pipeline.archive import open_archive

        if self.where is None:
            raise ConfigError("no archive was given; add --archive")
        return open_archive(spark, self.where, self.properties)


def archive_options(
    name: str = "--archive", *, required: bool = True, help_text: str = "The archive."
) -> Callable[[F], F]:
    """Add `name`, --user, --password-file and --driver-jar; the command receives `source`."""

    def add(command: F) -> F:
        @wraps(command)
        def call(
            *args: Any,
            where: str | None,
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
            click.option(name, "where", required=required, metavar="DIR|JDBC", help=help_text),
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
