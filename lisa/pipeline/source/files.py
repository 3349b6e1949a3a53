"""Small files beside a job: reports and refused rows, on a disk or wherever Arrow can write.

Data sources in Python run beside Spark, not in it: its own file systems are out of reach here.
"""

from __future__ import annotations

import posixpath
from pathlib import Path
from typing import Any
from uuid import uuid4

from pyarrow import fs

from lisa.core.errors import ConfigError

__all__ = ["check_place", "join", "open_new", "write"]


def check_place(place: str, option: str) -> None:
    """Refuse a place that cannot be written to. Raises ConfigError."""
    try:
        _find(place)
    except (OSError, ValueError, NotImplementedError) as error:
        raise ConfigError(
            f'format("lisa"), option {option!r}: {place!r} cannot be used ({error}); give a path, '
            "or a file:, s3:, gs: or hdfs: URL that pyarrow can reach"
        ) from None


def join(place: str, name: str) -> str:
    """A file in a directory."""
    return posixpath.join(place, name)


def open_new(place: str) -> Any:
    """A binary stream to a new file; its directory is made, an older file is replaced."""
    try:
        system, path = _find(place)
        system.create_dir(posixpath.dirname(path), recursive=True)
        return system.open_output_stream(path, compression=None)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write {place}: {error}") from None


def write(place: str, content: bytes) -> None:
    """Write a file, whole or not at all. Raises ConfigError."""
    try:
        system, path = _find(place)
        system.create_dir(posixpath.dirname(path), recursive=True)
        fresh = f"{path}.{uuid4().hex[:8]}"
        with system.open_output_stream(fresh, compression=None) as stream:
            stream.write(content)
        system.move(fresh, path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write {place}: {error}") from None


def _find(place: str) -> tuple[fs.FileSystem, str]:
    if "://" in place or place.startswith("file:/"):
        found = fs.FileSystem.from_uri(place)
        return found[0], found[1]
    return fs.LocalFileSystem(), str(Path(place).resolve())
