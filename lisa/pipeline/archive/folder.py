"""A directory on any file system that Hadoop knows, reached through Spark's JVM."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

from py4j.protocol import Py4JJavaError

from lisa.core.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Folder", "Stored"]


class Stored(NamedTuple):
    """A file: its path below the folder, and its size in bytes."""

    path: str
    size: int


class Folder:
    """Paths are relative to it. What is renamed appears whole or not at all.

    It also outlasts a power cut: the journal, on another machine, may forget what stands here.
    Hadoop sees to that everywhere but on a local disk.
    """

    def __init__(self, spark: SparkSession, where: str) -> None:
        jvm: Any = spark._jvm  # noqa: SLF001  the only way to Hadoop's file systems
        conf = spark._jsc.hadoopConfiguration()  # noqa: SLF001
        self._jvm, self._conf = jvm, conf
        try:
            root = jvm.org.apache.hadoop.fs.Path(where)
            self._fs = root.getFileSystem(conf)
            self._root = self._fs.makeQualified(root)
            # With the checksums that Hadoop keeps beside the files of a local disk no file is
            # replaced at once: who reads meanwhile finds none, or one that seems damaged.
            local = self._fs.getScheme() == "file" and hasattr(self._fs, "getRaw")
            self._texts = self._fs.getRaw() if local else self._fs
        except Py4JJavaError as error:
            raise ConfigError(f"{where}: {error.java_exception.getMessage()}") from error
        self.where: str = self._root.toString()

    def _path(self, path: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(f"{self.where}/{path}" if path else self.where)

    def url(self, path: str = "") -> str:
        """A path as Spark's readers and writers take it."""
        return f"{self.where}/{path}" if path else self.where

    def exists(self, path: str) -> bool:
        """Whether there is such a file or directory."""
        return bool(self._fs.exists(self._path(path)))

    def read(self, path: str) -> str | None:
        """A text file, None if there is none."""
        from_java = self._jvm.org.apache.hadoop.io.IOUtils
        try:
            stream = self._texts.open(self._path(path))
        except Py4JJavaError as error:
            if "FileNotFound" in error.java_exception.getClass().getName():
                return None
            raise
        try:
            out = self._jvm.java.io.ByteArrayOutputStream()
            from_java.copyBytes(stream, out, 65536, False)  # noqa: FBT003  Java's
            return bytes(out.toByteArray()).decode()
        finally:
            stream.close()

    def write(self, path: str, text: str) -> None:
        """A text file that appears whole, in place of one of that name."""
        temporary = f"{path.rpartition('/')[0]}/.{path.rpartition('/')[2]}.tmp"
        stream = self._texts.create(self._path(temporary), True)  # noqa: FBT003  Java's
        try:
            stream.write(text.encode())
        finally:
            stream.close()
        self.sync(temporary)
        if not self._texts.rename(self._path(temporary), self._path(path)):
            self.delete(path)  # HDFS does not replace
            self.rename(temporary, path)
        self.sync(path.rpartition("/")[0])

    def write_new(self, path: str, text: str) -> bool:
        """A text file, unless there is one of that name already."""
        try:
            stream = self._texts.create(self._path(path), False)  # noqa: FBT003  Java's
        except Py4JJavaError as error:
            if "AlreadyExists" in error.java_exception.getClass().getName():
                return False
            raise
        stream.write(text.encode())
        stream.close()
        return True

    def rename(self, path: str, to: str) -> None:
        """Move a file; the directory is made if need be."""
        target = self._path(to)
        self._fs.mkdirs(target.getParent())
        self.sync(path)
        if not self._fs.rename(self._path(path), target):
            raise OSError(f"{self.url(path)} cannot be moved to {self.url(to)}")
        self.sync(to.rpartition("/")[0])

    def copy(self, path: str, to: str) -> None:
        """Copy a file, over one of that name."""
        util = self._jvm.org.apache.hadoop.fs.FileUtil
        self._fs.mkdirs(self._path(to).getParent())
        util.copy(self._fs, self._path(path), self._fs, self._path(to), False, True, self._conf)  # noqa: FBT003  Java's
        self.sync(to)
        self.sync(to.rpartition("/")[0])

    def sync(self, path: str) -> None:
        """Have a file's bytes, or a directory's names, on the disk, where that is a local one."""
        url = self.url(path)
        if not url.startswith("file:"):
            return
        opened = os.open(url.removeprefix("file:"), os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)

    def delete(self, path: str) -> None:
        """Remove a file, or a directory with all that is in it; nothing is all right, too."""
        self._fs.delete(self._path(path), True)  # noqa: FBT003  Java's

    def names(self, path: str) -> list[str]:
        """What stands directly in a directory, in order; nothing if there is none."""
        if not self.exists(path):
            return []
        found = self._fs.listStatus(self._path(path))
        return sorted(one.getPath().getName() for one in found)

    def files(self, path: str) -> list[Stored]:
        """All files below a directory that Spark wrote, in order; none of its marks."""
        if not self.exists(path):
            return []
        found, walk = [], self._fs.listFiles(self._path(path), True)  # noqa: FBT003  Java's
        while walk.hasNext():
            status = walk.next()
            whole = status.getPath().toString()
            if whole.rpartition("/")[2][0] not in "._":
                found.append(Stored(whole[len(self.where) + 1 :], int(status.getLen())))
        return sorted(found)
