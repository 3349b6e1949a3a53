"""Performs the scenarios of `clients/conformance` with a client, and checks their results."""

import json
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Protocol

import pytest
import yaml

from tests.gateways import Gateway, new_topic
from tests.servers import ROOT, wait_until

SCENARIOS: list[dict[str, Any]] = yaml.safe_load(
    (ROOT / "clients" / "conformance" / "scenarios.yml").read_text(encoding="utf-8")
)
STEP_S = 30
"""The longest wait for a step's result."""


class StepFailed(Exception):
    """A client's call raised an error; the text is its kind."""


class Runner(Protocol):
    """Performs single steps with one client. A step's future may raise StepFailed."""

    def perform(self, name: str, topic: str, given: Any) -> Future[Any]: ...


class ProcessRunner:
    """A program that reads steps as lines of JSON, and prints a line with the result of each."""

    def __init__(self, command: Sequence[str]) -> None:
        self._results: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            found = json.loads(line)
            result = self._results[found["number"]]
            if "error" in found:
                result.set_exception(StepFailed(found["error"]))
            else:
                result.set_result(found["value"])

    def perform(self, name: str, topic: str, given: Any) -> Future[Any]:
        """Write the step; the program performs steps concurrently."""
        result = Future[Any]()
        assert self._process.stdin is not None
        with self._lock:
            number = len(self._results)
            self._results[number] = result
            step = {"number": number, "name": name, "topic": topic, "given": given}
            self._process.stdin.write(json.dumps(step) + "\n")
            self._process.stdin.flush()
        return result

    def close(self) -> None:
        """End the input. The program must then end: no timer or request of a client may be left."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            assert self._process.wait(STEP_S) == 0
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill the program if it still runs, and close the pipes."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


class Scenario:
    """A scenario on a new topic."""

    def __init__(self, scenario: Mapping[str, Any], runner: Runner, gateway: Gateway) -> None:
        self._scenario = scenario
        self._runner = runner
        self._gateway = gateway
        self._topic = new_topic("conformance")
        self._background: Future[Any] | None = None

    def run(self, restart_gateway: Callable[[], None] | None = None) -> None:
        """Perform all steps and check their results."""
        if options := self._scenario.get("options"):
            path = f"/v1/topics/{self._topic}/options"
            assert self._gateway.client.patch(path, json=options).status_code == 200
        for step in self._scenario["steps"]:
            name, given = next(iter(step.items()))
            if name == "restart_gateway":
                assert restart_gateway is not None
                restart_gateway()
            elif name == "remove_group":
                path = f"/v1/topics/{self._topic}/groups/{given}"
                assert self._gateway.client.delete(path).status_code == 200
            elif name == "end_of_background":
                assert self._background is not None
                check(self._background.result(STEP_S), step["expect"])
            elif step.get("in_background"):
                self._background = self._runner.perform(name, self._topic, given)
            else:
                self._perform(step, name, with_due_time(given))

    def _perform(self, step: Mapping[str, Any], name: str, given: Any) -> None:
        def call() -> Any:
            return self._runner.perform(name, self._topic, given).result(STEP_S)

        if "error" in step:
            with pytest.raises(StepFailed) as caught:
                call()
            assert str(caught.value) == step["error"], step
        elif "until" in step:
            seen: list[Any] = []

            def matches() -> bool:
                seen[:] = [call()]
                return is_match(seen[0], step["until"])

            try:
                wait_until(matches, timeout=timedelta(seconds=STEP_S))
            except AssertionError:
                pytest.fail(f"{step} was not reached: {seen}")
        else:
            value = call()
            if "expect" in step:
                check(value, step["expect"])


def with_due_time(given: Any) -> Any:
    """The arguments with `due_ms` in place of `due_in_ms`."""
    if not isinstance(given, dict) or "due_in_ms" not in given:
        return given
    due_ms = time.time_ns() // 1_000_000 + given["due_in_ms"]
    return {**{key: one for key, one in given.items() if key != "due_in_ms"}, "due_ms": due_ms}


def check(found: Any, expected: Any) -> None:
    assert is_match(found, expected), f"expected {expected}, found {found}"


def is_match(found: Any, expected: Any) -> bool:
    """Whether a value is as expected; objects may have further fields."""
    if isinstance(expected, dict):
        return isinstance(found, dict) and all(
            key in found and is_match(found[key], one) for key, one in expected.items()
        )
    if isinstance(expected, list):
        return (
            isinstance(found, list)
            and len(found) == len(expected)
            and all(map(is_match, found, expected))
        )
    return type(found) is type(expected) and bool(found == expected)
