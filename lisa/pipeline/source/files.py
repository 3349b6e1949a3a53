"""Writes the small files of a job (reports and refused rows) to any file system Arrow supports.

Python data sources run outside the JVM, so Spark's own file systems are not available here. The
same URLs are accepted: `s3a:` means `s3:`.
"""

from __future__ import annotations

import os
import posixpath
import socket
from pathlib import Path
from typing import Any
from uuid import getnode, uuid4

from pyarrow import fs

from lisa.core.model.errors import ConfigError
from lisa.pipeline.errors import one_line


def check_target(target: str, option: str) -> None:
    """Raises ConfigError unless `target`, the value of an option, is a usable path or URL."""
    try:
        found(target)
    except (OSError, ValueError, NotImplementedError) as error:
        raise ConfigError(
            f'format("lisa"), option {option!r}: {target!r} cannot be used ({error}); give a path, '
            "or a file:, s3a:, gs: or hdfs: URL that pyarrow supports"
        ) from None


def join(target: str, name: str) -> str:
    """The path of a file in a directory."""
    return posixpath.join(target, name)


def open_new(target: str) -> Any:
    """Open a binary stream to a file, creating its directory and replacing the file.

    Raises ConfigError if the file cannot be written.
    """
    try:
        system, path = found(target)
        system.create_dir(posixpath.dirname(path), recursive=True)
        return system.open_output_stream(path, compression=None)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write {target}: {one_line(error)}") from None


def write(target: str, content: bytes) -> None:
    """Write or replace a file atomically. Raises ConfigError if it cannot be written."""
    try:
        system, path = found(target)
        system.create_dir(posixpath.dirname(path), recursive=True)
        fresh = f"{path}.{uuid4().hex[:8]}"
        with system.open_output_stream(fresh, compression=None) as stream:
            stream.write(content)
        system.move(fresh, path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write {target}: {one_line(error)}") from None


def is_local(target: str) -> bool:
    """Whether a target is a path or a file: URL, which means another file on each machine."""
    return isinstance(found(target)[0], fs.LocalFileSystem)


def machine() -> str:
    """Identifies the file system that this process sees: machine, container, mount namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        mounts = os.readlink("/proc/self/ns/mnt")  # noqa: PTH115  not a path
    except OSError:  # not Linux
        boot, mounts = str(getnode()), ""
    return f"{socket.gethostname()} {boot} {mounts}"


def found(target: str) -> tuple[fs.FileSystem, str]:
    """The file system of a path or URL, and the path in it."""
    for scheme in ("s3a://", "s3n://"):
        if target.startswith(scheme):
            target = f"s3://{target.removeprefix(scheme)}"
    if "://" in target or target.startswith("file:/"):
        system, path = fs.FileSystem.from_uri(target)
        return system, path
    return fs.LocalFileSystem(), str(Path(target).resolve())
