"""Builds the Java programs in `tests/clients/java` with Maven, and runs them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Self

import pytest

from tests.servers import JVM_PATIENCE

PROJECT = Path(__file__).parent / "java"
JVM = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xshare:auto")

_UNREACHABLE = re.compile(
    r"Could not (?:resolve|transfer)|Could not find artifact|could not be resolved"
    r"|Unknown host|PluginResolutionException"
)


def build(directory: Path, *options: str) -> str:
    """Compile the programs into a directory; returns their class path.

    Skips the test if a tool is missing or an artefact is neither on this machine nor obtainable.
    """
    for tool in ("mvn", "javac", "java"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not on PATH (Debian: apt-get install maven default-jdk)")
    done = subprocess.run(
        ["mvn", "-B", "-q", *options, f"-Dbuild.to={directory}", "compile"],
        cwd=PROJECT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=JVM_PATIENCE.total_seconds(),
    )
    if done.returncode and _UNREACHABLE.search(done.stdout):
        reason = next(line for line in done.stdout.splitlines() if _UNREACHABLE.search(line))
        pytest.skip(f"Maven Central does not provide what the Java programs need: {reason[:300]}")
    assert done.returncode == 0, done.stdout
    libraries = (directory / "classpath").read_text(encoding="utf-8").strip()
    return f"{directory / 'classes'}:{libraries}"


class Program:
    """A running Java program that prints lines of JSON; leaving the context ends the program."""

    def __init__(self, class_path: str, main: str, *arguments: str) -> None:
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115  closed on exit
        self._popen = subprocess.Popen(
            ["java", *JVM, "-cp", class_path, main, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            encoding="utf-8",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._popen.poll() is None:
            self._popen.kill()
        self._popen.wait()
        for pipe in (self._popen.stdin, self._popen.stdout, self._errors):
            assert pipe is not None
            pipe.close()

    def result(self) -> Any:
        """The next line of JSON. The program itself has time limits."""
        assert self._popen.stdout is not None
        line = self._popen.stdout.readline()
        if not line:
            self._errors.seek(0)
            pytest.fail(f"the program ended without a result: {self._errors.read()[-3_000:]}")
        return json.loads(line)

    def go_on(self) -> None:
        """Tell a program that waits for a line that it may go on."""
        assert self._popen.stdin is not None
        self._popen.stdin.write("\n")
        self._popen.stdin.flush()


def run(class_path: str, main: str, *arguments: str) -> Any:
    """Run a program that prints one result."""
    with Program(class_path, main, *arguments) as program:
        return program.result()
