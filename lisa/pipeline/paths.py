"""Paths and URLs from users: absolute ones to use, and ones to show."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
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
"""Options of Spark's readers. Its usual file system, which keeps checksums, fails for a colon."""

_PATTERN = re.compile(r"([][{}*?\\])")


def readable(source: str, endings: tuple[str, ...]) -> str:
    """The path under which Spark reads `source`, with LOCAL_FILES.

    A path that exists is no pattern; others may be, as in `orders-*.csv`. Raises ConfigError for
    files with these endings that Spark would ignore because their names begin with _ or a dot.
    """
    local = re.sub("^file:(//)?(?=/)", "", source)
    if not os.path.exists(local):  # noqa: PTH110 - not every source is a path
        return absolute(source)
    for file in _files(local):
        name = os.path.basename(file)  # noqa: PTH119
        if name.startswith(("_", ".")) and (file == local or name.lower().endswith(endings)):
            raise ConfigError(
                f"{file}: Spark ignores files whose names begin with _ or a dot; rename the file"
            )
    return _PATTERN.sub(r"\\\1", os.path.abspath(local))  # noqa: PTH100 - keeps links


def _files(path: str) -> Iterator[str]:
    """The files below a path, or the path itself."""
    if not os.path.isdir(path):  # noqa: PTH112
        yield path
    for folder, _, names in os.walk(path):
        yield from (os.path.join(folder, name) for name in names)  # noqa: PTH118


def without_password(where: str) -> str:
    """A path or URL without user and query, which may contain a password."""
    return re.sub(r"//[^/]*@", "//", re.sub(r"[?;].*", "", where))
