"""`lisa up`: server, manager and gateway in one process tree that stops as a whole."""

import json
import re
import shlex
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from lisa.cli.main import main
from lisa.embedded.server import free_port
from tests.gateways import NO_TLS
from tests.servers import Processes, runs, wait_until


def healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/healthz", verify=NO_TLS).status_code == 200
    except httpx.TransportError:
        return False


def descendants(pid: int) -> set[int]:
    found = set[int]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(stat.read_text(encoding="utf-8").rpartition(")")[2].split()[1])
            if parent == pid:
                child = int(stat.parent.name)
                found |= {child} | descendants(child)
    return found


@pytest.mark.parametrize(
    "ending",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=pytest.mark.full),
        pytest.param(signal.SIGKILL, marks=pytest.mark.full),
    ],
)
def test_up_gives_a_page_and_leaves_no_process(
    processes: Processes, tmp_path: Path, ending: signal.Signals
) -> None:
    (tmp_path / "redis.py").touch()  # not imported instead of the package
    port, http_port = free_port(), free_port()
    process = processes.start(
        "-P", "-m", "lisa.cli.main", "up", "--port", str(port), "--http-port", str(http_port)
    )
    url = f"http://127.0.0.1:{http_port}"
    wait_until(lambda: healthy(url))
    assert httpx.get(f"{url}/v1/topics", verify=NO_TLS).status_code == 200
    assert "Lisa" in httpx.get(f"{url}/", verify=NO_TLS).text
    printed = [line for line in process.output.splitlines() if not line.startswith("20")]
    assert f"try      lisa send orders hello --delay 2s --redis redis://127.0.0.1:{port}" in printed
    assert max(map(len, printed)) < 80
    check_curl_commands(url)
    family = descendants(process.pid)
    assert len(family) >= 3
    process.signal(ending)
    assert process.wait() == (-9 if ending is signal.SIGKILL else 0)
    wait_until(lambda: not any(runs(pid) for pid in family))


@pytest.mark.parametrize("option", ["--port", "--http-port"])
def test_a_taken_port_is_reported_with_a_free_one(option: str) -> None:
    ports = {"--port": free_port(), "--http-port": free_port()}
    with socket.create_server(("127.0.0.1", ports[option])):
        arguments = [word for name, port in ports.items() for word in (name, str(port))]
        done = CliRunner().invoke(main, ["up", *arguments])
    assert done.exit_code == 2
    assert f"cannot listen on port {ports[option]}: Address already in use" in done.stderr
    found = re.search(rf"lisa up {option} (\d+)", done.stderr)
    assert found is not None
    with socket.create_server(("127.0.0.1", int(found[1]))):
        assert len(done.stderr.splitlines()) == 1


README = Path(__file__).parents[2] / "README.md"


def check_curl_commands(url: str) -> None:
    """Those of the README work."""
    lines = re.findall(r"^\$ (curl [^#\n]*)", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(lines) == 2
    if shutil.which("curl") is None:
        return
    send, pull = [shlex.split(line.replace("http://127.0.0.1:8080", url)) for line in lines]
    sent = json.loads(subprocess.run(send, capture_output=True, check=True).stdout)
    assert sent["outcome"] == "accepted"
    begun = time.time() * 1000
    (found,) = json.loads(subprocess.run(pull, capture_output=True, check=True).stdout)[
        "deliveries"
    ]
    assert found["id"] == sent["id"]
    assert found["body"] == {"order": 42}
    assert begun < found["due_ms"] <= time.time() * 1000
