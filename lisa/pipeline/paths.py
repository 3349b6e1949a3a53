"""Paths and URLs from users: absolute ones to use, and ones to show."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

from lisa.core.model.errors import ConfigError

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


def absolute(where: str) -> str:
    """Make a relative path absolute; absolute paths and URLs are returned unchanged.

    Spark's JVM and workers may have another working directory, so they need absolute paths.
    """
    if not where or where.startswith("/") or _SCHEME.match(where):
        return where
    return f"{os.getcwd()}/{where}"  # noqa: PTH109  `Path` would remove a trailing slash


def shown(url: str) -> str:
    """The path of a file that Spark names by URL."""
    return unquote(url.removeprefix("file:").replace("///", "/", 1)) if url[:5] == "file:" else url


LOCAL_FILES = {
    "fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
    "fs.file.impl.disable.cache": "true",
}
"""Options of Spark's readers. The default file system, with checksums, rejects colons in names."""

_PATTERN = re.compile(r"([][{}*?\\])")


def literal(path: str) -> str:
    """A path for Spark's readers, which take a path for a pattern."""
    return _PATTERN.sub(r"\\\1", path)


_HIDDEN = ("_", ".")


def readable(source: str, endings: tuple[str, ...], *, is_recursive: bool = False) -> str:
    """The path under which Spark reads `source`, with LOCAL_FILES.

    A path that exists is not a pattern; others may be, as in `orders-*.csv`. Raises ConfigError for
    files with these endings that Spark would ignore: those whose names begin with _ or a dot, and
    those in folders within, unless these are partitions (`day=1`). is_recursive: with those.
    """
    local = re.sub("^file:(//)?(?=/)", "", source)
    if not os.path.exists(local):  # noqa: PTH110 - not every source is a path
        return absolute(source)
    for file, folders in _files(local):
        name = os.path.basename(file)  # noqa: PTH119
        if file != local and not name.lower().endswith(endings):
            continue
        if name.startswith(_HIDDEN):
            raise ConfigError(
                f"{file}: Spark ignores files whose names begin with _ or a dot; rename the file"
            )
        if not is_recursive and any("=" not in folder for folder in folders):
            raise ConfigError(
                f"{file} is in a folder within {source}: add --read-option recursiveFileLookup=true"
            )
    return literal(os.path.abspath(local))  # noqa: PTH100 - keeps links


def _files(path: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The path itself; or the files below it, each with the folders between."""
    if not os.path.isdir(path):  # noqa: PTH112
        yield path, ()
    for folder, within, names in os.walk(path):
        within[:] = [name for name in within if not name.startswith(_HIDDEN)]
        folders = Path(folder).relative_to(path).parts
        yield from ((os.path.join(folder, name), folders) for name in names)  # noqa: PTH118


def without_password(where: str) -> str:
    """A path or URL without user and query, which may contain a password."""
    return re.sub(r"//[^/]*@", "//", re.sub(r"[?;].*", "", where))
