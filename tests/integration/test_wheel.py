"""`lisa-delay-queue` as users get it: built, installed into an empty environment, and run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

import lisa
from lisa.embedded.server import EmbeddedServer, free_port
from tests.servers import wait_until
from tests.wheels import (
    COPY,
    Wheels,
    build_both,
    environment,
    install,
    merged,
    pip,
    run,
    start,
    without_checkout,
)

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parent.parent.parent
LUA = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "lua").rglob("*.lua"))


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Wheels:
    return build_both(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def wheel(wheels: Wheels) -> Path:
    return wheels.full


@pytest.fixture(scope="module")
def client(wheels: Wheels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment with only the client and its dependencies."""
    binaries = environment(tmp_path_factory.mktemp("empty"))
    install(binaries, wheels.client)
    return binaries


@pytest.fixture(scope="module")
def installed(wheels: Wheels, client: Path) -> Path:
    """The same environment with both distributions; later tests do not see the client alone."""
    install(client, wheels.full)
    return client


HANDLER = """
import logging
from lisa import message_received

@message_received.connect_via("orders")
def handle(topic, *, message):
    logging.getLogger("shop").warning("handled %s", message.body)
"""
SENDS_AND_HANDLES = """
import sys, threading, lisa
consumer, handled = lisa.Consumer(sys.argv[1]), threading.Event()
consumer.on("orders", lambda message: print(message.body["order"]) or handled.set())
with consumer, lisa.Producer(sys.argv[1]) as producer:
    producer.send("orders", {"order": 42})
    assert handled.wait(60)
"""


def sends_and_handles(binaries: Path, url: str, folder: Path) -> bool:
    """Whether a program in an environment does, with a manager in this process."""
    with lisa.Manager(url):
        return run(binaries / "python", "-c", SENDS_AND_HANDLES, url, cwd=folder) == "42\n"


def test_the_client_alone_sends_and_handles(client: Path, redis_url: str, tmp_path: Path) -> None:
    assert sends_and_handles(client, redis_url, tmp_path)


def test_the_client_exports_every_name_that_it_has(client: Path, tmp_path: Path) -> None:
    program = "from lisa import *; print(send.__name__, 'Manager' in globals())"
    assert run(client / "python", "-c", program, cwd=tmp_path) == "send False\n"


def test_the_client_installs_six_packages_and_no_other_command(client: Path) -> None:
    packages = {one["name"] for one in json.loads(pip(client, "list", "--format=json"))}
    needed = {"blinker", "hiredis", "msgspec", "redis", "tzdata", "uuid-utils"}
    assert {name.replace("_", "-").lower() for name in packages} == {
        "lisa-delay-queue-client",
        *needed,
    }
    assert [one.name for one in client.glob("lisa*")] == ["lisa-consumer"]


@pytest.mark.parametrize(
    ("program", "package"),
    [
        ("from lisa import Manager", "lisa-delay-queue"),
        ("import lisa.testing", "lisa-delay-queue"),
        ("import lisa; lisa.Producer.from_config()", "'lisa-delay-queue-client[settings]'"),
        ("import lisa; lisa.Consumer.from_config()", "'lisa-delay-queue-client[settings]'"),
        (
            "from lisa.cli import run_consumer; run_consumer()",
            "'lisa-delay-queue-client[settings]'",
        ),
    ],
)
def test_the_client_names_what_to_install(
    client: Path, tmp_path: Path, program: str, package: str
) -> None:
    done = start(client / "python", "-c", program, cwd=tmp_path)
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].endswith(f": pip install {package}")


def test_with_its_extra_the_client_runs_lisa_consumer(
    wheels: Wheels, client: Path, redis_url: str, tmp_path: Path
) -> None:
    install(client, f"{wheels.client}[settings]")
    (tmp_path / "shop.py").write_text(HANDLER)
    log = tmp_path / "log"
    command = [str(client / "lisa-consumer"), "shop", "--redis", redis_url]
    with (
        lisa.Manager(redis_url),
        lisa.Producer(redis_url) as producer,
        log.open("w") as out,
        subprocess.Popen(command, cwd=tmp_path, env=without_checkout(), stderr=out) as process,
    ):
        try:
            producer.send("orders", {"order": 42})
            wait_until(lambda: "handled {'order': 42}" in log.read_text())
        finally:
            process.terminate()
    assert process.returncode == 0


EVERY_NAME = """
import lisa, pathlib
[getattr(lisa, name) for name in lisa.__all__]
print(pathlib.Path(lisa.__file__).parent)
"""


def test_every_public_name_is_there_without_extras(installed: Path, tmp_path: Path) -> None:
    where = Path(run(installed / "python", "-c", EVERY_NAME, cwd=tmp_path).strip())
    assert where.is_relative_to(installed.parent)
    assert sorted(str(path.relative_to(where)) for path in (where / "lua").rglob("*.lua")) == LUA


@pytest.mark.parametrize("command", ["lisa", "lisa-manager", "lisa-consumer", "lisa-gateway"])
def test_its_commands_print_their_usage(installed: Path, tmp_path: Path, command: str) -> None:
    assert "Usage" in run(installed / command, "--help", cwd=tmp_path)


def test_its_demo_runs(installed: Path, tmp_path: Path) -> None:
    arguments = ("demo", "--messages", "200", "--seconds", "2", "--json")
    told: dict[str, Any] = json.loads(run(installed / "lisa", *arguments, cwd=tmp_path))
    assert told["sent"] == 200
    assert told["early"] == 0
    assert told["lost"] == 0
    assert told["handled"] > 0


def printed_by_init(binaries: Path, folder: Path, url: str) -> list[str]:
    """The commands that `lisa init` prints, up to those of systemd."""
    said = run(binaries / "lisa", "init", "shop", "--redis", url, cwd=folder)
    return re.findall(r"^  (\S.*)", said.partition("As services")[0], re.MULTILINE)


def of_the_quick_start(_binaries: Path, _folder: Path, url: str) -> list[str]:
    """The commands of "Run Lisa in production"."""
    page = (ROOT / "docs" / "quick-start.md").read_text()
    commands = re.findall(r"^\$ (.*)", page.partition("in production")[2], re.MULTILINE)
    return [
        one.replace("redis://localhost:6379/0", url).replace("8088", str(free_port()))
        for one in commands
    ]


@pytest.mark.parametrize("commands", [printed_by_init, of_the_quick_start])
def test_a_new_user_follows_the_commands_for_production(
    commands: Callable[[Path, Path, str], list[str]], installed: Path, tmp_path: Path
) -> None:
    """Every command is typed as it stands; the ones that keep running, in a terminal each."""
    clean = without_checkout()
    clean |= {"PATH": f"{installed}{os.pathsep}{clean['PATH']}", "PYTHONUNBUFFERED": "1"}
    folder, log, running = tmp_path, tmp_path / "log", []
    with EmbeddedServer() as server, log.open("w") as out:
        try:
            for command in commands(installed, tmp_path, server.url):
                if command.startswith("cd "):
                    folder /= command.removeprefix("cd ")
                elif re.match(r"lisa-|lisa top", command):
                    line = ["sh", "-c", f"exec {command}"]
                    running.append(
                        subprocess.Popen(line, cwd=folder, env=clean, stdout=out, stderr=out)
                    )
                else:
                    done = subprocess.run(["sh", "-c", command], cwd=folder, env=clean, check=False)
                    assert done.returncode == (1 if "doctor" in command else 0), command
            wait_until(lambda: "order {'order': 42} was not paid in time" in log.read_text())
            assert [one.poll() for one in running] == [None] * len(running)
            assert len(running) >= 2
            wait_until(
                lambda: "lisa top" not in str(running[-1].args) or "p99 ms" in log.read_text()
            )
        finally:
            for one in running:
                one.send_signal(signal.SIGINT)
            codes = [one.wait(30) for one in running]
    assert codes == [0] * len(running), "Ctrl-C is not an error"


def test_without_its_extra_the_gateway_says_what_to_install(
    installed: Path, tmp_path: Path
) -> None:
    done = start(installed / "lisa-gateway", cwd=tmp_path)
    assert done.returncode == 2
    assert "pip install 'lisa-delay-queue[gateway]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_with_its_extra_the_gateway_has_page_styles_and_api(
    wheel: Path, installed: Path, tmp_path: Path
) -> None:
    install(installed, f"{wheel}[gateway]")
    port, http_port = free_port(), free_port()
    clean = without_checkout()
    command = ["up", "--port", str(port), "--http-port", str(http_port)]
    process = subprocess.Popen([installed / "lisa", *command], cwd=tmp_path, env=clean)
    url = f"http://127.0.0.1:{http_port}"
    try:
        wait_until(lambda: _answers(f"{url}/healthz"))
        page = httpx.get(f"{url}/").text
        assets = re.findall(r'(?:href|src)="(/[^"]+\.(?:css|js|svg)[^"]*)"', page)
        assert len(assets) >= 3
        for asset in assets:
            assert httpx.get(url + asset).status_code == 200, asset
        assert httpx.get(f"{url}/v1/docs").status_code == 200
        sent = httpx.post(f"{url}/v1/topics/orders/messages", json={"body": 1})
        assert sent.status_code == 201
    finally:
        process.terminate()
        process.wait(20)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


def test_an_upgrade_from_one_wheel_keeps_everything_working(
    wheels: Wheels, installed: Path, redis_url: str, tmp_path: Path
) -> None:
    """Pip deletes the client's files that it has just installed, as files of the old version."""
    pip(installed, "uninstall", "--yes", "lisa-delay-queue", "lisa-delay-queue-client")
    install(installed, "--no-deps", merged(wheels, "0.1.0", tmp_path))
    assert run(installed / "lisa", "--version", cwd=tmp_path) == "lisa, version 0.1.0\n"
    offline = ("--no-index", "--find-links", wheels.full.parent)
    install(installed, "--upgrade", *offline, wheels.full)
    said = run(installed / "lisa", "--version", cwd=tmp_path)
    assert said == f"lisa, version {lisa.__version__}\n"
    for command in ("lisa-manager", "lisa-consumer", "lisa-gateway"):
        assert "Usage" in run(installed / command, "--help", cwd=tmp_path)
    where = run(installed / "python", "-c", EVERY_NAME, cwd=tmp_path)
    assert COPY in where
    assert sends_and_handles(installed, redis_url, tmp_path)

    # The client's files return with its next installation, and stay when the rest is removed.
    install(installed, "--force-reinstall", "--no-deps", wheels.client)
    assert COPY not in run(installed / "python", "-c", EVERY_NAME, cwd=tmp_path)
    pip(installed, "uninstall", "--yes", "lisa-delay-queue")
    assert sends_and_handles(installed, redis_url, tmp_path)
