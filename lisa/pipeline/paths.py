"""Relative paths: those that users give mean the directory of this process."""

from __future__ import annotations

import os
import re

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


def absolute(where: str) -> str:
    """A relative path below the working directory; absolute paths and URLs as they are.

    Spark's JVM and workers may have another working directory, so they need absolute paths.
    """
    if not where or where.startswith("/") or _SCHEME.match(where):
        return where
    return f"{os.getcwd()}/{where}"  # noqa: PTH109  `Path` would remove a trailing slash
