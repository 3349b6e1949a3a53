"""Real PostgreSQL and MariaDB servers, from Debian's packages, for as long as a test needs them.

They listen on loopback, on a free port, run as an ordinary user, and end with the process that
started them, even if that process is killed.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lisa.embedded.server import free_port

KINDS = ("postgresql", "mariadb")
USER = "lisa"
PASSWORD = "s3cret-of-the-tests"
START_SECONDS = 60
JARS = {
    "postgresql": Path("/usr/share/java/postgresql.jar"),
    "mariadb": Path("/usr/share/java/mariadb-java-client.jar"),
}
PACKAGES = {
    "postgresql": "postgresql libpostgresql-jdbc-java",
    "mariadb": "mariadb-server libmariadb-java",
}


@dataclass(frozen=True)
class DatabaseServer:
    """One running server with an empty database."""

    kind: str
    port: int
    process: subprocess.Popen[bytes]
    directory: Path

    @property
    def url(self) -> str:
        """The database's JDBC URL."""
        return f"jdbc:{self.kind}://127.0.0.1:{self.port}/archive"

    def sqlalchemy_url(self, driver: str) -> str:
        """The database's URL for SQLAlchemy, with a driver such as `psycopg`."""
        return f"{self.kind}+{driver}://{USER}:{PASSWORD}@127.0.0.1:{self.port}/archive"

    @property
    def properties(self) -> dict[str, str]:
        """Connection properties for the URL."""
        return {"user": USER, "password": PASSWORD}

    def crash(self) -> None:
        """kill -9, without a chance to write anything."""
        self.process.kill()
        self.process.wait(10)

    def restart(self) -> DatabaseServer:
        """Restart with the same data on the same port."""
        return _run(self.kind, self.directory, self.port)

    def stop(self) -> None:
        """Stop the server and remove its data."""
        # PostgreSQL's fast shutdown; MariaDB knows only SIGTERM.
        self.process.send_signal(signal.SIGINT if self.kind == "postgresql" else signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.crash()
        shutil.rmtree(self.directory, ignore_errors=True)


def missing(kind: str, *files: Path) -> str | None:
    """What this machine lacks for that kind of server, and of the files; None if nothing."""
    lacks = [name for name in _programs(kind) if _find(kind, name) is None]
    lacks += [str(file) for file in files if not file.exists()]
    return f"{', '.join(lacks)} missing: apt-get install {PACKAGES[kind]}" if lacks else None


def start(kind: str) -> DatabaseServer:
    """Start a new server of that kind; it accepts connections on return."""
    directory = Path(tempfile.mkdtemp(prefix=f"lisa-{kind}-"))
    if os.geteuid() == 0:  # PostgreSQL refuses to run as root
        shutil.chown(directory, "nobody", "nogroup")
    try:
        (_make_postgresql if kind == "postgresql" else _make_mariadb)(directory)
        return _run(kind, directory, free_port())
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _programs(kind: str) -> tuple[str, ...]:
    return ("initdb", "postgres") if kind == "postgresql" else ("mariadb-install-db", "mariadbd")


def _find(kind: str, program: str) -> str | None:
    if kind == "postgresql":
        found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{program}"))
        return str(found[-1]) if found else shutil.which(program)
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/bin")


def _command(kind: str, program: str, *arguments: str) -> list[str]:
    return as_ordinary_user(str(_find(kind, program)), *arguments)


def as_ordinary_user(*command: str) -> list[str]:
    """The command as an ordinary user, killed when its parent process ends."""
    whole = ["setpriv", "--pdeathsig", "KILL"]
    if os.geteuid() == 0:
        whole += ["--reuid", "nobody", "--regid", "nogroup", "--clear-groups"]
    return [*whole, "--", *command]


def _call(directory: Path, command: Sequence[str]) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, cwd=directory
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"


def _make_postgresql(directory: Path) -> None:
    secret = directory / "password"
    secret.write_text(PASSWORD, "utf-8")
    secret.chmod(0o644)  # in a directory that other users cannot enter
    data = str(directory / "data")
    options = ("-D", data, "-U", USER, f"--pwfile={secret}", "-A", "scram-sha-256", "-E", "UTF8")
    _call(directory, _command("postgresql", "initdb", *options, "--locale=C.UTF-8", "-N"))
    made = subprocess.run(
        _command("postgresql", "postgres", "--single", "-D", data, "postgres"),
        input="CREATE DATABASE archive\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "ERROR" not in made.stderr, made.stderr


def _make_mariadb(directory: Path) -> None:
    (directory / "init.sql").write_text(
        "CREATE DATABASE IF NOT EXISTS archive;\n"
        f"CREATE USER IF NOT EXISTS '{USER}'@'%' IDENTIFIED BY '{PASSWORD}';\n"
        f"GRANT ALL ON archive.* TO '{USER}'@'%';\n",
        "utf-8",
    )
    where = (f"--datadir={directory / 'data'}", f"--tmpdir={directory}")
    options = ("--no-defaults", *where, "--skip-test-db")
    method = "--auth-root-authentication-method=normal"
    _call(directory, _command("mariadb", "mariadb-install-db", *options, method))


def _run(kind: str, directory: Path, port: int) -> DatabaseServer:
    data = str(directory / "data")
    if kind == "postgresql":
        settings = ("-c", "listen_addresses=127.0.0.1", "-c", "shared_buffers=64MB")
        # Without a Unix socket: its path may be too long.
        options = ("-D", data, "-p", str(port), "-k", "", *settings)
        command = _command(kind, "postgres", *options)
    else:
        files = ("--socket=socket", f"--pid-file={directory / 'pid'}", f"--tmpdir={directory}")
        more = ("--bind-address=127.0.0.1", "--innodb-buffer-pool-size=128M", "--skip-log-bin")
        init = f"--init-file={directory / 'init.sql'}"
        all_files = (f"--datadir={data}", *files, init)
        command = _command(kind, "mariadbd", "--no-defaults", *all_files, f"--port={port}", *more)
    with (directory / "log").open("ab") as log:
        before = log.tell()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=directory
        )
    server = DatabaseServer(kind, port, process, directory)
    deadline = time.monotonic() + START_SECONDS
    while not _ready(server, before):
        said = (directory / "log").read_bytes()[before:].decode("utf-8", "replace")
        assert process.poll() is None, said
        assert time.monotonic() < deadline, said
        time.sleep(0.05)
    return server


def _ready(server: DatabaseServer, before: int) -> bool:
    """Whether it accepts connections, by its log: it listens slightly earlier."""
    said = (server.directory / "log").read_bytes()[before:]
    word = b"ready to accept conn" if server.kind == "postgresql" else b"ready for connections"
    with suppress(OSError), socket.create_connection(("127.0.0.1", server.port), 1):
        return word in said
    return False
