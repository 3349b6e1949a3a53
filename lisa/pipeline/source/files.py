"""Writes the small files of a job (reports and refused rows) to any file system Arrow supports.

Python data sources run outside the JVM, so Spark's own file systems are not available here.
"""

from __future__ import annotations

import posixpath
from pathlib import Path
from typing import Any
from uuid import uuid4

from pyarrow import fs

from lisa.core.model.errors import ConfigError


def check_target(target: str, option: str) -> None:
    """Raises ConfigError unless `target`, the value of an option, is a usable path or URL."""
    try:
        _find(target)
    except (OSError, ValueError, NotImplementedError) as error:
        raise ConfigError(
            f'format("lisa"), option {option!r}: {target!r} cannot be used ({error}); give a path, '
            "or a file:, s3:, gs: or hdfs: URL that pyarrow supports"
        ) from None


def join(target: str, name: str) -> str:
    """The path of a file in a directory."""
    return posixpath.join(target, name)


def open_new(target: str) -> Any:
    """Open a binary stream to a file, creating its directory and replacing the file.

    Raises ConfigError if the file cannot be written.
    """
    try:
        system, path = _find(target)
        system.create_dir(posixpath.dirname(path), recursive=True)
        return system.open_output_stream(path, compression=None)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write {target}: {error}") from None


def write(target: str, content: bytes) -> None:
    """Write or replace a file atomically. Raises ConfigError if it cannot be written."""
    try:
        system, path = _find(target)
        system.create_dir(posixpath.dirname(path), recursive=True)
        fresh = f"{path}.{uuid4().hex[:8]}"
        with system.open_output_stream(fresh, compression=None) as stream:
            stream.write(content)
        system.move(fresh, path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write {target}: {error}") from None


def _find(target: str) -> tuple[fs.FileSystem, str]:
    if "://" in target or target.startswith("file:/"):
        found = fs.FileSystem.from_uri(target)
        return found[0], found[1]
    return fs.LocalFileSystem(), str(Path(target).resolve())
