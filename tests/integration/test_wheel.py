"""The distribution as users get it: files, installation into an empty environment, use."""

import json
import os
import re
import signal
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

import lisa
from lisa.embedded.server import EmbeddedServer, free_port
from tests.deploy.manifests import answers
from tests.servers import ROOT, wait_until
from tests.wheels import build, environment, install, pip, run, start, without_checkout

full = pytest.mark.full


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment with the wheel and nothing that only extras install."""
    binaries = environment(tmp_path_factory.mktemp("bare"))
    install(binaries, wheel)
    return binaries


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of another environment, with the extra `standard`."""
    binaries = environment(tmp_path_factory.mktemp("standard"))
    install(binaries, f"{wheel}[standard]")
    return binaries


def files(wheel: Path) -> list[str]:
    """The names of all files but the metadata."""
    names = zipfile.ZipFile(wheel).namelist()
    return [name for name in names if ".dist-info/" not in name]


def metadata(wheel: Path) -> tuple[str, str]:
    """Its fields, and the description."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (one for one in archive.namelist() if one.endswith("/METADATA"))
        fields, _, text = archive.read(name).decode().partition("\n\n")
    return fields, text


FILE = re.compile(r"\]\((?!https?://)")
"""A link that leads to no web site."""


def test_the_wheel_contains_the_package_and_nothing_else(wheel: Path) -> None:
    names = []
    for part, folder in (("lisa", ""), ("lua", "lisa/"), ("configs", "lisa/")):
        paths = [path for path in (ROOT / part).rglob("*") if path.suffix != ".pyc"]
        names += [f"{folder}{path.relative_to(ROOT)}" for path in paths if path.is_file()]
    assert sorted(files(wheel)) == sorted(names)
    assert "lisa/py.typed" in names
    assert f"\nVersion: {lisa.__version__}\n" in metadata(wheel)[0]
    archive = zipfile.ZipFile(wheel)
    (licence,) = (name for name in archive.namelist() if name.endswith("licenses/LICENSE"))
    assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()
    sources = [archive.read(name) for name in archive.namelist() if name[-3:] == ".py"]
    assert not any(b'"pip"' in source or b'"npm"' in source for source in sources), (
        "install nothing"
    )


def test_the_description_has_no_links_to_files_without_a_project_url(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields, text = metadata(wheel)
    assert "Description-Content-Type: text/markdown" in fields
    assert "Project-URL:" not in fields
    assert not FILE.search(text)
    assert "explained in the glossary." in " ".join(text.split())
    root = "https://git.example/lisa"
    monkeypatch.setenv("PROJECT_URL", f"{root}/")
    fields, text = metadata(build(tmp_path))
    assert f"\nProject-URL: Changelog, {root}/blob/main/CHANGELOG.md\n" in fields
    assert f"[glossary]({root}/blob/main/docs/reference/keys.md#glossary)" in text
    assert f"]({root}/raw/main/docs/images/page-overview.png)" in text
    assert not FILE.search(text)


@full
def test_a_source_distribution_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    source = build(tmp_path, "sdist")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    built = build(tmp_path, project=tmp_path / source.name.removesuffix(".tar.gz"))
    assert built.name == wheel.name
    assert sorted(files(built)) == sorted(files(wheel))


SENDS_AND_HANDLES = """
import sys, threading
from lisa import *
assert 'Manager' not in globals()
consumer, handled = Consumer(sys.argv[1]), threading.Event()
consumer.on("orders", lambda message: print(message.body["order"]) or handled.set())
with consumer, Producer(sys.argv[1]) as producer:
    producer.send("orders", {"order": 42})
    assert handled.wait(60)
"""


def test_a_bare_installation_sends_and_handles_and_names_the_extra_for_the_rest(
    bare: Path, redis_url: str, tmp_path: Path
) -> None:
    with lisa.Manager(redis_url):
        said = run(bare / "python", "-c", SENDS_AND_HANDLES, redis_url, cwd=tmp_path)
    assert said == "42\n"
    packages = {package["name"] for package in json.loads(pip(bare, "list", "--format=json"))}
    names = {name.replace("_", "-").lower() for name in packages}
    needed = {"blinker", "hiredis", "msgspec", "redis", "tzdata", "uuid-utils"}
    assert names == {"lisa-delay-queue", *needed}
    for command, extra in (
        ("lisa", "standard"),
        ("lisa-manager", "standard"),
        ("lisa-consumer", "standard"),
        ("lisa-gateway", "gateway"),
        ("lisa-relay", "standard"),
    ):
        done = start(bare / command, "--help", cwd=tmp_path)
        install = f"pip install 'lisa-delay-queue[{extra}]'"
        said = f"{command}: click is not installed: {install}\n"
        assert (done.returncode, done.stdout, done.stderr) == (2, "", said)
    for program, extra in (
        ("from lisa import Manager", "standard"),
        ("from lisa.testing import LisaTestKit", "test"),
        ("import lisa; lisa.Producer.from_config()", "standard"),
        ("import lisa; lisa.Consumer.from_config()", "standard"),
    ):
        done = start(bare / "python", "-c", program, cwd=tmp_path)
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1].endswith(f": pip install 'lisa-delay-queue[{extra}]'")


EVERY_NAME = "import lisa; [getattr(lisa, name) for name in lisa.__all__]; print(lisa.__file__)"


@full
def test_the_standard_installation_has_every_name_and_command(
    installed: Path, tmp_path: Path
) -> None:
    where = run(installed / "python", "-c", EVERY_NAME, cwd=tmp_path)
    assert where.startswith(f"{installed.parent}{os.sep}")
    for command in ("lisa", "lisa-manager", "lisa-consumer", "lisa-gateway", "lisa-relay"):
        assert "Usage" in run(installed / command, "--help", cwd=tmp_path)
    gateway = start(installed / "lisa-gateway", cwd=tmp_path)
    assert (gateway.returncode, len(gateway.stderr.splitlines())) == (2, 1)
    assert "pip install 'lisa-delay-queue[gateway]'" in gateway.stderr
    relay = start(installed / "lisa-relay", "--database", "sqlite:///x.db", cwd=tmp_path)
    assert (relay.returncode, len(relay.stderr.splitlines())) == (2, 1)
    assert "pip install 'lisa-delay-queue[sql]'" in relay.stderr
    arguments = ("demo", "--messages", "200", "--seconds", "2", "--json")
    told: dict[str, Any] = json.loads(run(installed / "lisa", *arguments, cwd=tmp_path))
    assert (told["sent"], told["early"], told["lost"]) == (200, 0, 0)
    assert told["handled"] > 0


def printed_by_init(binaries: Path, folder: Path, url: str) -> list[str]:
    """The commands that `lisa init` prints, up to those of systemd."""
    said = run(binaries / "lisa", "init", "shop", "--redis", url, cwd=folder)
    return re.findall(r"(?m)^  (\S.*)", said.partition("As services")[0])


def of_the_quick_start(_binaries: Path, _folder: Path, url: str) -> list[str]:
    """The commands of "Run Lisa in production"."""
    page = (ROOT / "docs" / "quick-start.md").read_text()
    page = page.partition("in production")[2].replace("redis://localhost:6379/0", url)
    return re.findall(r"(?m)^\$ (.*)", page.replace("8088", str(free_port())))


@full
@pytest.mark.parametrize("commands", [printed_by_init, of_the_quick_start])
def test_a_new_user_follows_the_commands_for_production(
    commands: Callable[[Path, Path, str], list[str]], installed: Path, tmp_path: Path
) -> None:
    """Every command is typed as it stands; the ones that keep running, in a terminal each."""
    clean = without_checkout()
    clean |= {"PATH": f"{installed}{os.pathsep}{clean['PATH']}", "PYTHONUNBUFFERED": "1"}
    folder, log, running = tmp_path, tmp_path / "log", list[subprocess.Popen[bytes]]()
    with EmbeddedServer() as server, log.open("w") as out:
        try:
            for command in commands(installed, tmp_path, server.url):
                if command.startswith("cd "):
                    folder /= command.removeprefix("cd ")
                    continue
                line = ["sh", "-c", f"exec {command}"]
                process = subprocess.Popen(line, cwd=folder, env=clean, stdout=out, stderr=out)
                if re.match(r"lisa-|lisa top", command):
                    running.append(process)
                else:
                    assert process.wait(600) == 0, command
            wait_until(lambda: "order {'order': 42} was not paid in time" in log.read_text())
            assert [one.poll() for one in running] == [None] * len(running)
            assert len(running) >= 2
            is_top = "lisa top" in str(running[-1].args)
            wait_until(lambda: not is_top or "p99 ms" in log.read_text())
        finally:
            for one in running:
                one.send_signal(signal.SIGINT)
            codes = [one.wait(60) for one in running]
    assert codes == [0] * len(running), "Ctrl-C is not an error"


@full
def test_with_its_extra_the_gateway_has_page_styles_and_api(
    wheel: Path, installed: Path, tmp_path: Path
) -> None:
    install(installed, f"{wheel}[gateway]")
    port, http_port = free_port(), free_port()
    command = ["up", "--port", str(port), "--http-port", str(http_port)]
    address = f"127.0.0.1:{http_port}"
    clean = without_checkout()
    with subprocess.Popen([installed / "lisa", *command], cwd=tmp_path, env=clean) as process:
        try:
            answers(address, "/healthz")
            page = httpx.get(f"http://{address}/").text
            assets = re.findall(r'(?:href|src)="(/[^"]+\.(?:css|js|svg)[^"]*)"', page)
            assert len(assets) >= 3
            for asset in (*assets, "/v1/docs"):
                answers(address, asset)
            sent = httpx.post(f"http://{address}/v1/topics/orders/messages", json={"body": 1})
            assert sent.status_code == 201
        finally:
            process.terminate()
