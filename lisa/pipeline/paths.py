"""Paths and URLs from users: absolute ones to use, and ones to show."""

from __future__ import annotations

import os
import re

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


def absolute(where: str) -> str:
    """Make a relative path absolute; absolute paths and URLs are returned unchanged.

    Spark's JVM and workers may have another working directory, so they need absolute paths.
    """
    if not where or where.startswith("/") or _SCHEME.match(where):
        return where
    return f"{os.getcwd()}/{where}"  # noqa: PTH109  `Path` would remove a trailing slash


def without_password(where: str) -> str:
    """A path or URL without user and query, which may contain a password."""
    return re.sub(r"//[^/]*@", "//", re.sub(r"[?;].*", "", where))
