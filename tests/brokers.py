"""Real RabbitMQ and NATS servers, from Debian's packages, for as long as a test needs them.

They listen on loopback, on free ports, run as an ordinary user, and end with the process that
started them, even if that process is killed.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from lisa.embedded.server import free_port
from tests.databases import as_ordinary_user

START_SECONDS = 120
PROGRAMS = {
    # Debian's /usr/sbin/rabbitmq-server runs for root and for the system's own user only.
    "rabbitmq": ("/usr/lib/rabbitmq/bin/rabbitmq-server", "epmd", "setpriv"),
    "nats": ("nats-server", "setpriv"),
}
PACKAGES = {"rabbitmq": "rabbitmq-server", "nats": "nats-server"}


def missing(kind: str) -> str | None:
    """What this machine lacks for that kind of server; None if nothing."""
    lacks = [name for name in PROGRAMS[kind] if _find(name) is None]
    return f"{', '.join(lacks)} missing: apt-get install {PACKAGES[kind]}" if lacks else None


@contextmanager
def nats() -> Iterator[str]:
    """Host and port of a new NATS server with JetStream."""
    port = free_port()
    with _directory("nats") as directory:
        options = ("-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(directory / "data"))
        with _running(directory, "nats-server", *options, port=port):
            yield f"127.0.0.1:{port}"


@contextmanager
def rabbitmq() -> Iterator[str]:
    """Host and port of a new RabbitMQ node without plugins; the user is `guest`.

    Erlang's port mapper has a port of its own and runs in the foreground: a node that finds none
    starts one that outlives it.
    """
    port, mapper_port = free_port(), free_port()
    with _directory("rabbitmq") as directory, ExitStack() as stack:
        settings = f"listeners.tcp.1 = 127.0.0.1:{port}\ndisk_free_limit.absolute = 1MB\n"
        (directory / "rabbitmq.conf").write_text(settings)
        (directory / "plugins").write_text("[].")
        (directory / "env").write_text("")  # instead of the one in /etc
        environment = {
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(mapper_port),
            "HOME": str(directory),  # of Erlang's cookie
            "LANG": "C.UTF-8",
            "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/bin:/bin",
            "RABBITMQ_CONFIG_FILE": str(directory / "rabbitmq.conf"),
            "RABBITMQ_CONF_ENV_FILE": str(directory / "env"),
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "plugins"),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_LOG_BASE": str(directory),
            "RABBITMQ_MNESIA_BASE": str(directory / "data"),
            "RABBITMQ_NODENAME": f"lisa-{port}@localhost",
            "RABBITMQ_PID_FILE": str(directory / "pid"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": (
                "-kernel inet_dist_use_interface {127,0,0,1} +S 1:1"
            ),
            "RUNNING_UNDER_SYSTEMD": "true",  # the script becomes the node, rather than its parent
        }
        mapper = ("epmd", "-address", "127.0.0.1", "-port", str(mapper_port))
        stack.enter_context(_running(directory, *mapper, port=mapper_port, env=environment))
        node = PROGRAMS["rabbitmq"][0]
        stack.enter_context(_running(directory, node, port=port, env=environment))
        yield f"127.0.0.1:{port}"


def _find(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/bin")


@contextmanager
def _directory(kind: str) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix=f"lisa-{kind}-"))
    if os.geteuid() == 0:
        shutil.chown(directory, "nobody", "nogroup")
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _running(
    directory: Path, program: str, *options: str, port: int, env: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Run a program that listens on the port."""
    said = directory / f"{Path(program).name}.log"
    with said.open("ab") as log:
        process = subprocess.Popen(
            as_ordinary_user(str(_find(program)), *options),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=directory,
            env=env,
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _listens(port):
            assert process.poll() is None, said.read_text(errors="replace")
            assert time.monotonic() < deadline, said.read_text(errors="replace")
            time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.wait(10)


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
