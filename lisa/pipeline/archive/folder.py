"""A directory on any file system that Hadoop knows, reached through Spark's JVM."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple

from py4j.protocol import Py4JJavaError

from lisa.core.model.errors import ConfigError, LisaError
from lisa.pipeline.paths import absolute
from lisa.pipeline.session import jvm_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_S3 = {
    "AWS_ACCESS_KEY_ID": "access.key",
    "AWS_SECRET_ACCESS_KEY": "secret.key",
    "AWS_SESSION_TOKEN": "session.token",
    "AWS_ENDPOINT_URL": "endpoint",
    "AWS_REGION": "endpoint.region",
}
"""Names of delta-rs -> names of Hadoop after `fs.s3a.`; without them, the environment counts."""


class Stored(NamedTuple):
    """A file: its path below the folder, and its size in bytes."""

    path: str
    size: int


class Folder:
    """A directory; all paths are relative to it.

    Writes are durable, because the journal trims events as soon as the archive has them. Hadoop
    ensures durability on its own file systems; on a local disk this class calls fsync.
    """

    def __init__(self, spark: SparkSession, where: str) -> None:
        jvm = jvm_of(spark)
        conf = spark._jsc.hadoopConfiguration()  # noqa: SLF001
        self._jvm, self._conf = jvm, conf
        try:
            root = jvm.org.apache.hadoop.fs.Path(absolute(where))
            self._fs = root.getFileSystem(conf)
            self._root = self._fs.makeQualified(root)
            # On a local disk Hadoop keeps checksum files. With them, a file cannot be replaced
            # atomically: a concurrent reader finds no file, or a wrong checksum.
            local = self._fs.getScheme() == "file" and hasattr(self._fs, "getRaw")
            self._texts = self._fs.getRaw() if local else self._fs
        except Py4JJavaError as error:
            raise ConfigError(f"{where}: {error.java_exception.getMessage()}") from error
        self.where: str = self._root.toString()
        scheme = self.where.partition(":")[0]
        self._is_local, self._is_s3 = scheme == "file", scheme in {"s3", "s3a", "s3n"}

    def _path(self, path: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self.url(path))

    def url(self, path: str = "") -> str:
        """The URL of a path, for Spark's readers and writers."""
        return f"{self.where}/{path}" if path else self.where

    def delta_address(self, path: str) -> tuple[str, dict[str, str]]:
        """The URL of a path for delta-rs, and its settings, from Hadoop's settings for S3."""
        url = self.url(path)
        if self._is_local:
            return url.removeprefix("file:"), {}
        rest = url.partition(":")[2]
        if not self._is_s3:
            return url, {}
        found = {name: self._conf.get(f"fs.s3a.{theirs}") for name, theirs in _S3.items()}
        settings = {name: str(value) for name, value in found.items() if value}
        endpoint = settings.get("AWS_ENDPOINT_URL", "")
        if endpoint and "://" not in endpoint:
            settings["AWS_ENDPOINT_URL"] = f"https://{endpoint}"
        if endpoint.startswith("http:"):
            settings["AWS_ALLOW_HTTP"] = "true"
        return f"s3:{rest}", settings

    def exists(self, path: str) -> bool:
        """Whether the file or directory exists."""
        return bool(self._fs.exists(self._path(path)))

    def read(self, path: str) -> str | None:
        """The content of a text file, None if it does not exist."""
        from_java = self._jvm.org.apache.hadoop.io.IOUtils
        try:
            stream = self._texts.open(self._path(path))
        except Py4JJavaError as error:
            if "FileNotFound" in error.java_exception.getClass().getName():
                return None
            raise
        with closing(stream):
            out = self._jvm.java.io.ByteArrayOutputStream()
            from_java.copyBytes(stream, out, 65536, False)  # noqa: FBT003  Java's
            return bytes(out.toByteArray()).decode()

    def write(self, path: str, text: str) -> None:
        """Write or replace a text file; atomically, except that HDFS lacks it for a moment."""
        if self._is_s3:  # a file appears, or is replaced, when it is complete
            self._create(path, text)
            return
        temporary = f"{path.rpartition('/')[0]}/.{path.rpartition('/')[2]}.tmp"
        self._create(temporary, text)
        self.rename(temporary, path)

    def _create(self, path: str, text: str) -> None:
        with closing(self._texts.create(self._path(path), True)) as stream:  # noqa: FBT003  Java's
            stream.write(text.encode())

    def rename(self, path: str, to: str) -> None:
        """Move a file, replacing the target and creating its directory. Raises OSError if it fails.

        A checksum file of Hadoop stays behind.
        """
        target = self._path(to)
        self._fs.mkdirs(target.getParent())
        if not self._is_local:  # a rename replaces no other file
            self.delete(to)
        self.sync(path)
        if not self._texts.rename(self._path(path), target):
            raise OSError(f"cannot move {self.url(path)} to {self.url(to)}")
        self.sync(to.rpartition("/")[0])

    def check(self, files: Iterable[Stored]) -> None:
        """Raises LisaError if a file on a local disk is missing, or has another size.

        Spark reads an empty file as one without rows. Other file systems show complete files only.
        """
        for file in files if self._is_local else ():
            whole = self.url(file.path).removeprefix("file:")
            size = os.stat(whole).st_size if os.path.exists(whole) else None  # noqa: PTH110, PTH116
            if size != file.size:
                found = "is missing" if size is None else f"has {size:,} bytes"
                raise LisaError(
                    f"{whole} {found}; the archive wrote {file.size:,} bytes: restore the file "
                    "from a copy of the archive"
                )

    def sync(self, path: str) -> None:
        """Flush a file or directory to disk (fsync); does nothing on other file systems."""
        if not self._is_local:
            return
        opened = os.open(self.url(path).removeprefix("file:"), os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)

    def delete(self, path: str) -> None:
        """Remove a file, or a directory recursively; does nothing if it does not exist."""
        self._fs.delete(self._path(path), True)  # noqa: FBT003  Java's

    def names(self, path: str) -> list[str]:
        """Sorted names of a directory's entries; empty if it does not exist."""
        if not self.exists(path):
            return []
        found = self._fs.listStatus(self._path(path))
        return sorted(status.getPath().getName() for status in found)

    def files(self, path: str) -> list[Stored]:
        """All files below a directory, sorted; without Spark's markers (names with `_` or `.`)."""
        if not self.exists(path):
            return []
        found, walk = [], self._fs.listFiles(self._path(path), True)  # noqa: FBT003  Java's
        while walk.hasNext():
            status = walk.next()
            whole = status.getPath().toString()
            if whole.rpartition("/")[2][0] not in "._":
                found.append(Stored(whole[len(self.where) + 1 :], int(status.getLen())))
        return sorted(found)
