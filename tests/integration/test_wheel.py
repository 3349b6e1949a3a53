"""Both distributions as users get them: files, installation into an empty environment, use."""

import json
import os
import re
import signal
import subprocess
import tarfile
import tomllib
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
from tests.wheels import (
    CLIENT,
    COPY,
    Wheels,
    build,
    build_both,
    environment,
    install,
    merged,
    pip,
    run,
    start,
    without_checkout,
)

full = pytest.mark.full


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Wheels:
    return build_both(tmp_path_factory.mktemp("dist"))


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


def test_each_file_belongs_to_one_distribution(wheels: Wheels) -> None:
    names = []
    for part, folder in (("lisa", ""), ("lua", "lisa/"), ("configs", "lisa/")):
        paths = [path for path in (ROOT / part).rglob("*") if path.suffix != ".pyc"]
        names += [f"{folder}{path.relative_to(ROOT)}" for path in paths if path.is_file()]
    own = [name for name in files(wheels.full) if name.startswith("lisa/")]
    assert sorted(files(wheels.client) + own) == sorted(names)
    assert "lisa/py.typed" in files(wheels.client)
    rest = {name for name in files(wheels.full) if not name.startswith("lisa/")}
    assert rest == {f"{COPY}/{name}" for name in files(wheels.client)} | {"lisa-delay-queue.pth"}
    assert not COPY.isidentifier(), "no program can import the copy by its own name"
    for wheel in wheels:
        assert f"\nVersion: {lisa.__version__}\n" in metadata(wheel)[0]
        archive = zipfile.ZipFile(wheel)
        (licence,) = (one for one in archive.namelist() if one.endswith("licenses/LICENSE"))
        assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()
        sources = [archive.read(name) for name in archive.namelist() if name[-3:] == ".py"]
        assert not any(b'"pip"' in one or b'"npm"' in one for one in sources), "install nothing"


def test_the_description_has_no_links_to_files_without_a_project_url(
    wheels: Wheels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields, text = metadata(wheels.full)
    assert "Description-Content-Type: text/markdown" in fields
    assert "Project-URL:" not in fields
    assert not FILE.search(text)
    assert "explained in the glossary." in " ".join(text.split())
    root = "https://git.example/lisa"
    monkeypatch.setenv("PROJECT_URL", f"{root}/")
    fields, text = metadata(build(ROOT, tmp_path))
    assert f"\nProject-URL: Changelog, {root}/blob/main/CHANGELOG.md\n" in fields
    assert f"[glossary]({root}/blob/main/docs/reference/keys.md#glossary)" in text
    assert f"]({root}/raw/main/docs/images/page-overview.png)" in text
    assert not FILE.search(text)


def test_the_full_distribution_requires_the_client_of_its_version() -> None:
    full, client = (
        tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]
        for folder in (ROOT, CLIENT)
    )
    assert full["dependencies"][0] == f"lisa-delay-queue-client[settings]=={lisa.__version__}"
    needed = [*client["dependencies"], *client["optional-dependencies"]["settings"]]
    bounds = [
        {re.split(r"[^\w-]", one)[0]: re.sub(r"^[\w-]+(\[\w+\])?", "", one) for one in lines}
        for lines in (needed, full["dependencies"])
    ]
    shared = bounds[0].keys() & bounds[1].keys()
    assert {"redis", "click"} <= shared
    assert [name for name in shared if bounds[0][name] != bounds[1][name]] == []


@full
def test_a_source_distribution_builds_the_same_wheel(wheels: Wheels, tmp_path: Path) -> None:
    for kind, expected in zip((CLIENT, ROOT), wheels, strict=True):
        source = build(kind, tmp_path, "sdist")
        with tarfile.open(source) as archive:
            archive.extractall(tmp_path, filter="data")
        wheel = build(tmp_path / source.name.removesuffix(".tar.gz"), tmp_path)
        assert wheel.name == expected.name
        assert sorted(files(wheel)) == sorted(files(expected))


HANDLER = """
import lisa
lisa.message_received.connect(
    lambda topic, *, message: print("handled", message.body, flush=True), "orders", weak=False
)
"""
SENDS_AND_HANDLES = """
import sys, threading
from lisa import *
assert 'Manager' not in globals() or '--full' in sys.argv
consumer, handled = Consumer(sys.argv[1]), threading.Event()
consumer.on("orders", lambda message: print(message.body["order"]) or handled.set())
with consumer, Producer(sys.argv[1]) as producer:
    producer.send("orders", {"order": 42})
    assert handled.wait(60)
"""


def sends_and_handles(binaries: Path, url: str, folder: Path, *options: str) -> bool:
    """Whether a program in an environment does, with a manager in this process."""
    with lisa.Manager(url):
        said = run(binaries / "python", "-c", SENDS_AND_HANDLES, url, *options, cwd=folder)
        return said == "42\n"


@full
def test_the_client_alone(wheels: Wheels, client: Path, redis_url: str, tmp_path: Path) -> None:
    """It sends and handles, with seven packages, and names what else to install."""
    assert sends_and_handles(client, redis_url, tmp_path)
    packages = {one["name"] for one in json.loads(pip(client, "list", "--format=json"))}
    needed = {"blinker", "hiredis", "msgspec", "redis", "tzdata", "uuid-utils"}
    names = {name.replace("_", "-").lower() for name in packages}
    assert names == {"lisa-delay-queue-client", *needed}
    assert [one.name for one in client.glob("lisa*")] == ["lisa-consumer"]
    for program, package in (
        ("from lisa import Manager", "lisa-delay-queue"),
        ("import lisa.testing", "lisa-delay-queue"),
        ("import lisa; lisa.Producer.from_config()", "'lisa-delay-queue-client[settings]'"),
        ("import lisa; lisa.Consumer.from_config()", "'lisa-delay-queue-client[settings]'"),
        ("from lisa.cli import run_consumer as r; r()", "'lisa-delay-queue-client[settings]'"),
    ):
        done = start(client / "python", "-c", program, cwd=tmp_path)
        assert done.returncode != 0
        assert done.stderr.splitlines()[-1].endswith(f": pip install {package}")
    install(client, f"{wheels.client}[settings]")
    (tmp_path / "shop.py").write_text(HANDLER)
    command = [str(client / "lisa-consumer"), "shop", "--redis", redis_url]
    with lisa.Manager(redis_url), lisa.Producer(redis_url) as producer:
        producer.send("orders", {"order": 42})
        with subprocess.Popen(
            command, cwd=tmp_path, env=without_checkout(), stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            handled = process.stdout.readline()
            process.terminate()
    assert handled == "handled {'order': 42}\n"
    assert process.returncode == 0


EVERY_NAME = "import lisa; [getattr(lisa, name) for name in lisa.__all__]; print(lisa.__file__)"


@full
def test_without_extras_every_name_and_command_is_there(installed: Path, tmp_path: Path) -> None:
    where = run(installed / "python", "-c", EVERY_NAME, cwd=tmp_path)
    assert where.startswith(f"{installed.parent}{os.sep}")
    for command in ("lisa", "lisa-manager", "lisa-consumer", "lisa-gateway"):
        assert "Usage" in run(installed / command, "--help", cwd=tmp_path)
    gateway = start(installed / "lisa-gateway", cwd=tmp_path)
    assert (gateway.returncode, len(gateway.stderr.splitlines())) == (2, 1)
    assert "pip install 'lisa-delay-queue[gateway]'" in gateway.stderr
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
    wheels: Wheels, installed: Path, tmp_path: Path
) -> None:
    install(installed, f"{wheels.full}[gateway]")
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


@full
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
    assert COPY in run(installed / "python", "-c", EVERY_NAME, cwd=tmp_path)
    assert sends_and_handles(installed, redis_url, tmp_path, "--full")

    # The client's files return with its next installation, and stay when the rest is removed.
    install(installed, "--force-reinstall", "--no-deps", wheels.client)
    assert COPY not in run(installed / "python", "-c", EVERY_NAME, cwd=tmp_path)
    pip(installed, "uninstall", "--yes", "lisa-delay-queue")
    assert sends_and_handles(installed, redis_url, tmp_path)
