"""The wheel as users get it: built, installed into an empty environment, and run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from typing import Any

import httpx
import pytest

from lisa.embedded.server import free_port
from tests.servers import wait_until

ROOT = Path(__file__).parent.parent.parent
LUA = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "lua").rglob("*.lua"))


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output of a command that must succeed without the checkout on its path."""
    clean = {n: v for n, v in os.environ.items() if not n.startswith(("PYTHON", "LISA_"))}
    done = subprocess.run(
        command, cwd=cwd, env=clean, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment with only the wheel and its dependencies."""
    folder = tmp_path_factory.mktemp("empty")
    venv.create(folder / "venv", with_pip=False)
    binaries = folder / "venv" / "bin"
    pip = (sys.executable, "-m", "pip", "--python", binaries / "python", "install", "--quiet")
    run(*pip, wheel, cwd=folder)
    return binaries


def test_the_wheel_holds_the_scripts_the_types_and_the_licence_and_no_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert LUA
    assert [f"lisa/{name}" for name in LUA] == sorted(n for n in names if n.endswith(".lua"))
    assert "lisa/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"lisa"}


def test_the_wheel_cannot_install_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        sources = {name: files.read(name) for name in files.namelist() if name.endswith(".py")}
    assert [name for name, text in sources.items() if b'"pip"' in text or b'"npm"' in text] == []


def test_every_public_name_is_there_without_extras(installed: Path, tmp_path: Path) -> None:
    program = (
        "import lisa, pathlib; [getattr(lisa, name) for name in lisa.__all__];"
        "print(pathlib.Path(lisa.__file__).parent)"
    )
    where = Path(run(installed / "python", "-c", program, cwd=tmp_path).strip())
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


def test_without_its_extra_the_gateway_says_what_to_install(
    installed: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        [installed / "lisa-gateway"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={n: v for n, v in os.environ.items() if not n.startswith(("PYTHON", "LISA_"))},
    )
    assert done.returncode == 2
    assert "pip install 'lisa-delay-queue[gateway]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_with_its_extra_the_gateway_has_page_styles_and_api(
    wheel: Path, installed: Path, tmp_path: Path
) -> None:
    pip = (sys.executable, "-m", "pip", "--python", installed / "python", "install", "--quiet")
    run(*pip, f"{wheel}[gateway]", cwd=tmp_path)
    port, http_port = free_port(), free_port()
    clean = {n: v for n, v in os.environ.items() if not n.startswith(("PYTHON", "LISA_"))}
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
