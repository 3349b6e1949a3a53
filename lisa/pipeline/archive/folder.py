"""A directory on a local disk, in an object store or in HDFS, reached without Spark."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from pyarrow import NativeFile, fs

from lisa.core.model.errors import ConfigError, LisaError
from lisa.pipeline.paths import absolute

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_S3 = {
    "AWS_ACCESS_KEY_ID": "access.key",
    "AWS_SECRET_ACCESS_KEY": "secret.key",
    "AWS_SESSION_TOKEN": "session.token",
    "AWS_ENDPOINT_URL": "endpoint",
    "AWS_REGION": "endpoint.region",
}
"""Names of delta-rs -> names after `spark.hadoop.fs.s3a.`; without them, the environment counts."""


class Stored(NamedTuple):
    """A file: its path below the folder, and its size in bytes."""

    path: str
    size: int


class Folder:
    """A directory; all paths are relative to it.

    Writes are durable, because the journal trims events as soon as the archive has them. Other file
    systems ensure durability themselves; on a local disk this class calls fsync.

    where: a path, or a URL that Spark, delta-rs and pyarrow support. Raises ConfigError for others.
    """

    def __init__(self, spark: SparkSession, where: str) -> None:
        where = absolute(where)
        scheme = where.partition(":")[0] if not where.startswith("/") else "file"
        self._is_local, self._is_s3 = scheme == "file", scheme in {"s3", "s3a", "s3n"}
        self._settings: dict[str, str] = {}
        if self._is_local:
            self._root = os.path.abspath(re.sub("^file:(//)?(?=/)", "", where))  # noqa: PTH100
            self._fs, self.where = fs.LocalFileSystem(), f"file:{self._root}"
            return
        self.where = where.rstrip("/")
        try:
            if self._is_s3:
                self._settings = _s3_settings(spark)
                self._fs = _s3(self._settings)
                self._root = self.where.partition("://")[2]
            else:
                self._fs, self._root = fs.FileSystem.from_uri(self.where)
        except (OSError, ValueError, NotImplementedError) as error:
            raise ConfigError(f"{where}: {error}") from error
        # A file of an object store appears, or is replaced, when it is complete.
        self._is_store = not isinstance(self._fs, fs.HadoopFileSystem)

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def url(self, path: str = "") -> str:
        """The URL of a path, for Spark's readers and writers."""
        return f"{self.where}/{path}" if path else self.where

    def delta_address(self, path: str) -> tuple[str, dict[str, str]]:
        """The URL of a path for delta-rs, and its settings, from Hadoop's settings for S3."""
        if self._is_local:
            return self._path(path), {}
        url = self.url(path)
        return f"s3:{url.partition(':')[2]}" if self._is_s3 else url, self._settings

    def open(self, path: str) -> NativeFile:
        """Open a file to read; close it. Raises FileNotFoundError if it does not exist."""
        return self._fs.open_input_file(self._path(path))

    def read(self, path: str) -> str | None:
        """The content of a text file, None if it does not exist."""
        try:
            with self.open(path) as file:
                return bytes(file.read()).decode()
        except FileNotFoundError:
            return None

    def write(self, path: str, text: str) -> None:
        """Write or replace a text file; atomically, except that HDFS lacks it for a moment."""
        if not self._is_local and self._is_store:
            self._create(path, text)
            return
        folder, _, name = path.rpartition("/")
        temporary = f"{folder}/.{name}.tmp".lstrip("/")
        self._make(folder)
        self._create(temporary, text)
        self.rename(temporary, path)

    def _create(self, path: str, text: str) -> None:
        with self._fs.open_output_stream(self._path(path), compression=None) as stream:
            stream.write(text.encode())

    def rename(self, path: str, to: str) -> None:
        """Move a file, replacing the target and creating its directory. Raises OSError if it fails.

        A checksum file of Hadoop stays behind.
        """
        folder = to.rpartition("/")[0]
        if self._is_local:
            self._make(folder)
            self.sync(path)
            os.replace(self._path(path), self._path(to))  # noqa: PTH105
            self.sync(folder)
        elif self._is_store:
            self._fs.copy_file(self._path(path), self._path(to))
            self._fs.delete_file(self._path(path))
        else:  # a rename replaces no other file
            self._make(folder)
            self.delete(to)
            self._fs.move(self._path(path), self._path(to))

    def _make(self, path: str) -> None:
        """Create a directory, durably, with those above it."""
        lacking, above = list[str](), self._path(path)
        while self._is_local and not os.path.isdir(above):  # noqa: PTH112
            above = os.path.dirname(above)  # noqa: PTH120
            lacking.append(above)
        self._fs.create_dir(self._path(path), recursive=True)
        for folder in lacking:
            _sync(folder)

    def check(self, files: Iterable[Stored]) -> None:
        """Raises LisaError if a file on a local disk is missing, or has another size.

        Spark reads an empty file as one without rows. Other file systems show complete files only.
        """
        for file in files if self._is_local else ():
            whole = self._path(file.path)
            size = os.stat(whole).st_size if os.path.exists(whole) else None  # noqa: PTH110, PTH116
            if size != file.size:
                found = "is missing" if size is None else f"has {size:,} bytes"
                raise LisaError(
                    f"{whole} {found}; the archive wrote {file.size:,} bytes: restore the file "
                    "from a copy of the archive"
                )

    def sync(self, path: str) -> None:
        """Flush a file or directory to disk (fsync); does nothing on other file systems."""
        if self._is_local:
            _sync(self._path(path))

    def delete(self, path: str) -> None:
        """Remove a file, or a directory recursively; does nothing if it does not exist."""
        whole = self._path(path)
        kind = self._fs.get_file_info(whole).type
        if kind == fs.FileType.Directory:
            self._fs.delete_dir(whole)
        elif kind != fs.FileType.NotFound:
            self._fs.delete_file(whole)

    def names(self, path: str) -> list[str]:
        """Sorted names of a directory's entries; empty if it does not exist."""
        return sorted(found.base_name for found in self._entries(path))

    def files(self, path: str) -> list[Stored]:
        """All files below a directory, sorted; without Spark's markers (names with `_` or `.`)."""
        return sorted(
            Stored(found.path[len(self._root) + 1 :], found.size)
            for found in self._entries(path, recursive=True)
            if found.type == fs.FileType.File and found.base_name[0] not in "._"
        )

    def _entries(self, path: str, *, recursive: bool = False) -> list[fs.FileInfo]:
        asked = fs.FileSelector(self._path(path), allow_not_found=True, recursive=recursive)
        found: list[fs.FileInfo] = self._fs.get_file_info(asked)
        return found


def _sync(whole: str) -> None:
    opened = os.open(whole, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _s3_settings(spark: SparkSession) -> dict[str, str]:
    found = {
        name: spark.conf.get(f"spark.hadoop.fs.s3a.{theirs}", None) for name, theirs in _S3.items()
    }
    settings = {name: str(value) for name, value in found.items() if value}
    endpoint = settings.get("AWS_ENDPOINT_URL", "")
    if endpoint and "://" not in endpoint:
        settings["AWS_ENDPOINT_URL"] = f"https://{endpoint}"
    if endpoint.startswith("http:"):
        settings["AWS_ALLOW_HTTP"] = "true"
    return settings


def _s3(settings: dict[str, str]) -> fs.S3FileSystem:
    return fs.S3FileSystem(
        access_key=settings.get("AWS_ACCESS_KEY_ID"),
        secret_key=settings.get("AWS_SECRET_ACCESS_KEY"),
        session_token=settings.get("AWS_SESSION_TOKEN"),
        endpoint_override=settings.get("AWS_ENDPOINT_URL"),
        region=settings.get("AWS_REGION"),
    )
