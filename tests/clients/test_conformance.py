"""Each client passes the same scenarios: TypeScript, Go, and the Python package."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from lisa import Manager
from lisa.embedded.server import free_port
from tests.clients.conformance import SCENARIOS, ProcessRunner, Scenario
from tests.clients.python_runner import PythonRunner
from tests.gateways import Gateway
from tests.servers import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from lisa.embedded import EmbeddedServer

pytestmark = pytest.mark.timeout(180)

TOKEN = "a-token-of-the-conformance-tests"


def skip_without(*tools: str) -> None:
    for tool in tools:
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not on PATH (Debian: apt-get install npm golang-go)")


def run(*command: str, cwd: Path, **environment: str) -> None:
    """Run a command; fails the test with the output of a command that failed."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def typescript(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the TypeScript package, installed and built, with its runner."""
    skip_without("node", "npm")
    package = tmp_path_factory.mktemp("typescript") / "package"
    ignored = shutil.ignore_patterns("node_modules", "dist", "build")
    shutil.copytree(ROOT / "clients" / "typescript", package, ignore=ignored)
    run("npm", "ci", "--no-audit", "--no-fund", "--prefer-offline", cwd=package)
    run("npm", "run", "build", cwd=package)
    run("npm", "run", "build:test", cwd=package)
    return package


@pytest.fixture(scope="module")
def go(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runner of the Go module."""
    skip_without("go")
    module, program = ROOT / "clients" / "go", tmp_path_factory.mktemp("go") / "runner"
    run("go", "build", "-o", str(program), "./internal/conformance", cwd=module, CGO_ENABLED="0")
    return program


@pytest.fixture(scope="module")
def redis_url(valkey_server: EmbeddedServer) -> Iterator[str]:
    """URL of the embedded Valkey, with a manager running."""
    with Manager(valkey_server.url):
        yield valkey_server.url


def new_gateway(redis_url: str, *arguments: str) -> Gateway:
    return Gateway(
        redis_url,
        *arguments,
        env={"LISA_GATEWAY_SERVER__TOKEN": TOKEN},
        headers={"Authorization": f"Bearer {TOKEN}"},
    )


@pytest.fixture(scope="module")
def gateway(redis_url: str) -> Iterator[Gateway]:
    with new_gateway(redis_url) as running:
        yield running


def names(*, http: bool) -> list[Any]:
    return [
        pytest.param(one, id=one["name"]) for one in SCENARIOS if http or "http_only" not in one
    ]


@pytest.mark.parametrize("scenario", names(http=False))
def test_the_python_package_passes(
    scenario: dict[str, Any], redis_url: str, gateway: Gateway
) -> None:
    runner = PythonRunner(redis_url)
    try:
        Scenario(scenario, runner, gateway).run()
    finally:
        runner.close()


@pytest.mark.parametrize("scenario", names(http=True))
def test_the_typescript_client_passes(
    scenario: dict[str, Any], typescript: Path, redis_url: str, gateway: Gateway
) -> None:
    run_http(scenario, ["node", str(typescript / "build" / "runner.js")], redis_url, gateway)


def run_http(
    scenario: dict[str, Any], command: list[str], redis_url: str, gateway: Gateway
) -> None:
    """Run a scenario with a client of the gateway."""
    with ExitStack() as stack:

        def restart() -> None:
            gateway.stop()
            stack.enter_context(new_gateway(redis_url, "--port", port))

        if scenario.get("restarts"):
            port = str(free_port())
            gateway = stack.enter_context(new_gateway(redis_url, "--port", port))
        runner = ProcessRunner([*command, gateway.url, scenario.get("token", TOKEN)])
        try:
            Scenario(scenario, runner, gateway).run(restart)
        except BaseException:
            runner.kill()
            raise
        runner.close()


@pytest.mark.parametrize("scenario", names(http=True))
def test_the_go_client_passes(
    scenario: dict[str, Any], go: Path, redis_url: str, gateway: Gateway
) -> None:
    run_http(scenario, [str(go)], redis_url, gateway)
