"""Each client passes the same scenarios: TypeScript, Go, and the Python package."""

import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser

from lisa import Manager
from lisa.embedded import EmbeddedServer
from lisa.embedded.server import free_port
from tests.browser.conftest import browser
from tests.clients.conformance import SCENARIOS, ProcessRunner, Scenario
from tests.clients.python_runner import PythonRunner
from tests.gateways import NO_TLS, Gateway
from tests.servers import ROOT, flush

__all__ = ["browser"]
"""A fixture of another package."""

pytestmark = pytest.mark.timeout(180)
full = pytest.mark.full  # builds a client

GO = ROOT / "clients" / "go"
TOKEN = "a-token-of-the-conformance-tests"

_UNREACHABLE = re.compile(r"ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ECONNRESET|ETIMEDOUT")


def skip_unless(tool: str, command: str, least: tuple[int, int]) -> None:
    """Skip the test if a tool is missing or too old."""
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not on PATH (Debian: apt-get install npm golang-go)")
    version = subprocess.run([tool, command], capture_output=True, text=True, check=True).stdout
    found = re.search(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) < least:
        pytest.skip(f"{tool} is too old: {version.strip()}, needs {least[0]}.{least[1]}")


def run(*command: str, cwd: Path) -> str:
    """Run a command and return its output; skips the test if npm's registry is unreachable."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "CGO_ENABLED": "0"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=150,
    )
    if done.returncode and (fault := _UNREACHABLE.search(done.stdout)):
        pytest.skip(f"{' '.join(command)}: the registry is unreachable: {fault[0]}")
    assert done.returncode == 0, done.stdout
    return done.stdout


def examples(package: Path, language: str) -> list[str]:
    """The programs of a package's README."""
    text = (package / "README.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def typescript(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the TypeScript package, built with its runner and the programs of its README."""
    skip_unless("node", "--version", (20, 0))
    skip_unless("npm", "--version", (9, 0))
    package = tmp_path_factory.mktemp("typescript") / "package"
    ignored = shutil.ignore_patterns("node_modules", "dist", "build")
    shutil.copytree(ROOT / "clients" / "typescript", package, ignore=ignored)
    (package / "test" / "readme.ts").write_text("\n".join(examples(package, "ts")))
    run("npm", "ci", "--no-audit", "--no-fund", "--prefer-offline", cwd=package)
    run("npm", "run", "build", cwd=package)
    run("npm", "run", "build:test", cwd=package)
    return package


@pytest.fixture(scope="module")
def go(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runner of the Go module."""
    skip_unless("go", "version", (1, 22))
    program = tmp_path_factory.mktemp("go") / "runner"
    run("go", "build", "-o", str(program), "./internal/conformance", cwd=GO)
    return program


@pytest.fixture(scope="module")
def redis_url(valkey_server: EmbeddedServer) -> Iterator[str]:
    """URL of the embedded Valkey, emptied once for this file, with a manager running."""
    with Manager(flush(valkey_server.url)):
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
    """The scenarios of a client; the first of an HTTP client is its sample."""
    sample = [pytest.mark.sample] if http else []
    return [
        pytest.param(one, id=one["name"], marks=() if number else sample)
        for number, one in enumerate(SCENARIOS)
        if http or "http_only" not in one
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


@full
@pytest.mark.parametrize("scenario", names(http=True))
def test_the_typescript_client_passes(
    scenario: dict[str, Any], typescript: Path, redis_url: str, gateway: Gateway
) -> None:
    run_http(scenario, ["node", str(typescript / "build" / "runner.js")], redis_url, gateway)


@full
def test_the_typescript_client_refuses_bad_arguments_and_answers(typescript: Path) -> None:
    run("node", "--test", "build/client.test.js", cwd=typescript)


class Shop(SimpleHTTPRequestHandler):
    """A web server as the client's README describes it: it passes /v1 on with a token."""

    def __init__(self, *arguments: Any, upstream: str, **options: Any) -> None:
        self._upstream = upstream
        super().__init__(*arguments, **options)

    def do_POST(self) -> None:
        kept = {name: value for name, value in self.headers.items() if name != "Connection"}
        answer = httpx.post(
            self._upstream + self.path,
            content=self.rfile.read(int(self.headers["Content-Length"])),
            headers={**kept, "Authorization": f"Bearer {TOKEN}"},
            verify=NO_TLS,
        )
        self.send_response(answer.status_code)
        self.send_header("Content-Type", answer.headers["Content-Type"])
        self.send_header("Content-Length", str(len(answer.content)))
        self.end_headers()
        self.wfile.write(answer.content)

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002  the base class's
        """Keep quiet."""


@contextmanager
def shop(folder: Path, upstream: str) -> Iterator[str]:
    """The address of a web server for the files of a folder."""
    handler = partial(Shop, directory=str(folder), upstream=upstream)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


SEND = """async () => {
  const { Client } = await import("/dist/index.js");
  const client = new Client({ url: location.origin });
  const [topic, delay_ms] = ["from-a-browser", 3600000];
  await client.send(topic, { body: { order: 42 }, id: "order-42", delay_ms });
  await client.send(topic, { body: new Uint8Array([1, 255]), id: "b", delay_ms });
}"""


@full
def test_the_typescript_client_sends_from_a_browser(
    typescript: Path, browser: Browser, gateway: Gateway
) -> None:
    (typescript / "index.html").write_text("<!doctype html><title>Shop</title>", encoding="utf-8")
    with shop(typescript, gateway.url) as url:
        page = browser.new_page()
        page.goto(url)
        page.evaluate(SEND)
        page.close()
    topic = "/v1/topics/from-a-browser/messages"
    assert gateway.client.get(f"{topic}/order-42").json()["body"] == {"order": 42}
    assert gateway.client.get(f"{topic}/b").json()["body_base64"] == "Af8="


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
        timeout_ms = str(scenario.get("timeout_ms", 10_000))
        runner = ProcessRunner([*command, gateway.url, scenario.get("token", TOKEN), timeout_ms])
        try:
            Scenario(scenario, runner, gateway).run(restart)
        except BaseException:
            runner.kill()
            raise
        runner.close()


@full
@pytest.mark.parametrize("scenario", names(http=True))
def test_the_go_client_passes(
    scenario: dict[str, Any], go: Path, redis_url: str, gateway: Gateway
) -> None:
    run_http(scenario, [str(go)], redis_url, gateway)


@full
def test_the_go_module_is_formatted_and_the_programs_of_its_readme_compile(
    go: Path, tmp_path: Path
) -> None:
    assert go.exists()
    module = tmp_path / "module"
    shutil.copytree(GO, module)
    for number, program in enumerate(examples(GO, "go")):
        folder = module / f"example{number}"
        folder.mkdir()
        (folder / "main.go").write_text(program)
    assert run("gofmt", "-l", ".", cwd=module) == ""
    run("go", "vet", "./...", cwd=module)


@full
def test_the_go_client_refuses_bad_arguments_and_answers(go: Path) -> None:
    assert go.exists()
    run("go", "test", ".", cwd=GO)


def test_the_lock_file_names_the_public_registry() -> None:
    lock = json.loads((ROOT / "clients" / "typescript" / "package-lock.json").read_text())
    packages = [one for name, one in lock["packages"].items() if name]
    assert packages
    for one in packages:
        assert one["resolved"].startswith("https://registry.npmjs.org/")
