"""The stage of a run: the server, the proxy before it, and a process for every role."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lisa.core.model.keys import Keys
from lisa.core.redis.address import Address
from lisa.core.redis.connection import Connection
from lisa.core.store.store import SyncStore
from lisa.embedded import EmbeddedServer
from lisa.embedded.server import free_port
from lisa.testing.clocked_server import library
from tests.servers import ROOT, connect, redis_server
from tests.torture.ledger import Ledger, Orders
from tests.torture.proxy import Proxy
from tests.torture.world import LANES, TOPICS, consumer_config, manager_config

if TYPE_CHECKING:
    from collections.abc import Sequence

    import redis

    from tests.torture.__main__ import Options

SWIFT = ("bulk", "two")
STURDY = ("batch", "async", "hard", "hang", "fickle", "windows", *LANES)
FICKLE_SHARE = 0.1
HTTP_PER_S = 15.0  # each costs a hundred times as much as one in a batch
LEAVES_WITHIN_S = 30.0

ARCHIVED_TOPIC = "bulk"
ARCHIVED_LOSES_S = 20.0
"""How much the server loses in a run that restores, far more than its setting allows: archiving
takes seconds."""

SPARK = ("--master", "local[1]", "--spark-conf", "spark.sql.shuffle.partitions=1")


def now_us() -> int:
    """This machine's clock, which is also the server's."""
    return time.time_ns() // 1000


def leash() -> list[str]:
    """A command prefix that ends a process with this one, even if killed; empty without setpriv."""
    found = shutil.which("setpriv")
    return [found, "--pdeathsig", "KILL"] if found else []


def plain_environment(*path: str) -> dict[str, str]:
    """This process's environment without Lisa's settings; imports search `path` first."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("LISA_")}
    return env | {"PYTHONPATH": os.pathsep.join([*path, str(ROOT)]), "PYTHONUNBUFFERED": "1"}


def shifted(shift_s: int) -> dict[str, str]:
    """The environment of a process whose clock is off. Raises ServerUnavailable."""
    if not shift_s:
        return {}
    return {
        "LD_PRELOAD": str(library()),
        "FAKETIME": f"{shift_s:+}",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_DISABLE_SHM": "1",
        "NO_FAKE_STAT": "1",
    }


def unpacked(build: str, out: Path) -> Path:
    """The directory from which Python imports an earlier build.

    build: a directory, a wheel, or a commit, from which a wheel is built.
    out: a new directory for what is unpacked.
    """
    wheel = Path(build)
    if wheel.is_dir():
        return wheel.resolve()
    if not wheel.is_file():
        source = out.with_name(f"{out.name}-source")
        source.mkdir()
        archive = (source / "source.tar").resolve()
        git = ["git", "-C", str(ROOT), "archive", f"--output={archive}", build]
        subprocess.run(git, check=True)
        subprocess.run(["tar", "-xf", archive.name], cwd=source, check=True)
        hatch = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "dist"]
        subprocess.run(hatch, cwd=source, check=True, capture_output=True)
        [wheel] = (source / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(out)
    return out


# What a killed server loses, by its persistence setting, and since when at the latest

PUT_OFF_S = 2.0  # how long the server may postpone a write during an fsync
SAVE_EVERY_S = 5.0


class Tail:
    """Under `always`: no confirmed write is ever lost.

    begin: call when all topics are declared, which must not be lost.
    step: call several times a second while the server runs. Raises redis.RedisError.
    before_kill: since when (us) a kill right now may lose confirmed writes; None: no loss.
    after_kill: make the loss as large as the setting allows.
    """

    def begin(self) -> None: ...

    def step(self) -> None: ...

    def before_kill(self) -> int | None:
        return None

    def after_kill(self) -> None: ...


class PowerCut(Tail):
    """Under `everysec`.

    A kill alone loses little: written data survives its process. So it simulates a power cut: the
    last additions to the append-only file, as many as may be lost, are cut off.
    """

    def __init__(self, directory: Path, loses_s: float) -> None:
        self._directory = directory / "appendonlydir"
        self._loses_s = loses_s
        self._sizes: deque[tuple[float, Path, int]] = deque()

    def step(self) -> None:
        now = time.monotonic()
        with suppress(FileNotFoundError):  # the file is being rewritten
            if newest := self._newest():
                self._sizes.append((now, newest, newest.stat().st_size))
        while len(self._sizes) > 1 and self._sizes[1][0] < now - self._loses_s:
            self._sizes.popleft()

    def before_kill(self) -> int | None:
        most_s = self._loses_s + PUT_OFF_S
        while self._sizes and self._sizes[0][0] < time.monotonic() - most_s:
            self._sizes.popleft()  # not checked since for lack of time: that would be too much
        return now_us() - round(most_s * 1e6)

    def after_kill(self) -> None:
        if self._sizes:
            _, file, size = self._sizes[0]
            if self._newest() == file and file.stat().st_size > size:
                os.truncate(file, size)
            self._sizes.clear()

    def _newest(self) -> Path | None:
        files = self._directory.glob("*.incr.aof")
        return max(files, key=lambda file: file.stat().st_mtime, default=None)


class Snapshots(Tail):
    """Under `snapshot`: one is started every few seconds."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._began: int | None = None
        self._held = now_us()
        self._next = math.inf

    def begin(self) -> None:
        began = now_us()
        self._client.save()
        self._held, self._next = began, 0.0

    def step(self) -> None:
        info = self._client.info("persistence")
        if self._began is not None and not info["rdb_bgsave_in_progress"]:
            if info["rdb_last_bgsave_status"] == "ok" and info["rdb_last_save_time"]:
                self._held = self._began
            self._began = None
        if self._began is None and time.monotonic() >= self._next:
            began = now_us()
            self._next = time.monotonic() + SAVE_EVERY_S
            self._client.bgsave()
            self._began = began

    def before_kill(self) -> int | None:
        self.step()
        return self._held

    def after_kill(self) -> None:
        self._began = None
        self._next = 0.0


# Processes


class Process(subprocess.Popen[bytes]):
    role = ""
    number = 0
    began = 0.0


@dataclass
class Role:
    """A named role in the run, filled by one process at a time.

    command: the arguments of `python`.
    build: the directory of an earlier build; None: this checkout.
    """

    name: str
    command: Sequence[str]
    build: Path | None
    shift_s: int = 0
    now: Process | None = None
    is_wanted: bool = True

    @property
    def kind(self) -> str:
        return self.name.partition("-")[0]

    def is_alive(self) -> bool:
        return self.now is not None and self.now.poll() is None

    def tell_to_leave(self) -> None:
        self.is_wanted = False
        if self.now is not None:
            self.now.send_signal(signal.SIGCONT)
            self.now.send_signal(signal.SIGTERM)


class Stage:
    """All processes of a run. Events are written to `stage.jsonl`.

    `is_up`: the server can be asked; it is neither killed nor stopped.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.out = options.out.resolve()
        for name in ("ledgers", "logs"):
            (self.out / name).mkdir(parents=True, exist_ok=True)
        self._events = Ledger(self.out / "stage.jsonl")
        has_file = options.persistence != "snapshot"
        self.server = EmbeddedServer(
            directory=self.out / "server",
            appendonly=has_file,
            extra=("--appendfsync", options.persistence) if has_file else (),
            binary=redis_server() if options.program == "redis" else None,
        )
        self.roles: dict[str, Role] = {}
        self.is_up = False
        earlier = self.out / "earlier"
        self.earlier = unpacked(options.earlier, earlier) if options.earlier else None
        self._numbers = count(1)
        self._processes: list[Process] = []

    def open(self) -> None:
        self.server.start()
        self.is_up = True
        self.client = connect(self.server.url)
        self.store = SyncStore(Connection(Address(self.server.url)), Keys())
        self.tail = Tail()
        if self.options.persistence == "everysec":
            loses_s = ARCHIVED_LOSES_S if self.options.restore else 1.0
            self.tail = PowerCut(self.server.directory, loses_s)
        elif self.options.persistence == "snapshot":
            self.tail = Snapshots(self.client)
        self.proxy = Proxy(self.server.port, ("manager", "consumer", "producer", "gateway"))
        self._gateway_port = free_port()
        journaled = [ARCHIVED_TOPIC] if self.options.restore else []
        configs = {
            "manager": manager_config(*journaled, is_current=self.earlier is None),
            "swift": consumer_config(SWIFT),
            "sturdy": consumer_config(STURDY),
        }
        for name, text in configs.items():
            (self.out / "logs" / f"{name}.yml").write_text(text, encoding="utf-8")
        for names in self.options.roles.values():
            for name in names:
                self.roles[name] = Role(name, self._command_of(name), self.earlier)

    def close(self) -> None:
        for process in self._processes:
            process.kill()  # a stopped one, too
            process.wait()
        if hasattr(self, "proxy"):
            with suppress(ProcessLookupError):
                self.signal_server(signal.SIGCONT)
            self.proxy.close()
            self.store.close()
            self.client.close()
        self.server.stop()

    def note(self, event: str, **fields: Any) -> None:
        self._events.write([json.dumps({"at": now_us(), "event": event, **fields})])
        self._events.commit()

    # The roles

    def _command_of(self, name: str) -> list[str]:
        """Consumers and producers alternate between two kinds."""
        kind, _, number = name.partition("-")
        if kind in ("producer", "puller"):
            module = "web" if kind == "puller" or number == "http" else "sender"
            return ["-m", f"tests.torture.{module}"]
        if kind == "archive":
            return self.pipeline("archive", "--to", "--interval", "2s", "--on-gap", "record")
        url = self.proxy.url(kind)
        command = ["-m", f"lisa.cli.{kind}", "--redis", url]
        if kind == "gateway":
            return [*command, "--port", str(self._gateway_port)]
        if kind == "manager":
            return [*command, "--config", "manager.yml"]
        which = "swift" if int(number) % 2 else "sturdy"
        return [*command, "--config", f"{which}.yml", f"tests.torture.handlers:{which}"]

    def pipeline(self, command: str, where: str, *arguments: str) -> list[str]:
        """Arguments for `lisa pipeline archive` or `restore`: the topic's journal as Parquet."""
        archive = (where, str(self.out / "archive"), "--topic", ARCHIVED_TOPIC)
        url = ("--redis", self.server.url)
        return ["-m", "lisa.cli.main", "pipeline", command, *archive, *arguments, *url, *SPARK]

    def _orders(self, role: Role, number: int) -> Orders:
        """What a process of the run's own programs is told."""
        options, kind = self.options, role.kind
        folder = "sent" if kind == "producer" else "handled"
        if kind == "producer":
            which = role.name.partition("-")[2]
            kind = "http" if which == "http" else "bulk" if int(which) % 2 else "fickle"
        n, share = options.producers // 2, options.rate * FICKLE_SHARE
        rates = {
            "fickle": share / n,
            "bulk": (options.rate - share) / (options.producers - n),
            "http": min(options.rate, HTTP_PER_S),
        }
        return Orders(
            number=number,
            kind=kind,
            ledger=str(self.out / "ledgers" / f"{folder}-{number}.tsv"),
            clock_port=self.server.port,
            door_port=self.proxy.port("gateway" if kind == "puller" else "consumer"),
            gateway=f"http://127.0.0.1:{self._gateway_port}",
            redis=self.proxy.url("producer"),
            seed=options.seed * 1_000_003 + number,
            rate=rates.get(kind, 0),
            longest_s=options.longest_s,
            shift_s=role.shift_s,
            has_schedules=not options.restore,
            is_current=self.earlier is None,
            waits_ms=options.waits_ms,
        )

    def start(self, role: Role) -> None:
        number = next(self._numbers)
        path = [str(role.build)] if role.build else []
        orders = json.dumps(self._orders(role, number)._asdict())
        env = {**plain_environment(*path), **shifted(role.shift_s), "TORTURE_ORDERS": orders}
        role.now = self.process(role.command, role.name, env=env)
        role.now.number = number
        is_earlier = role.build is not None
        self.note("start", role=role.name, number=number, shift=role.shift_s, earlier=is_earlier)

    def process(
        self,
        command: Sequence[str],
        name: str,
        output: Path | None = None,
        env: dict[str, str] | None = None,
    ) -> Process:
        """Start `python COMMAND`, perhaps for an operator; it ends with the stage at the latest.

        name: of the log for its messages, and without `output` also for its output.
        """
        log = self.out / "logs" / f"{name}.log"
        with (output or log).open("ab") as out, log.open("ab") as errors:
            process = Process(
                [*leash(), sys.executable, *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                env=env or plain_environment(),
                cwd=log.parent,
                start_new_session=True,
            )
        process.role, process.began = name, time.monotonic()
        self._processes.append(process)
        return process

    def ended(self, process: Process, how: str) -> None:
        age_s = time.monotonic() - process.began
        who = {"role": process.role, "number": process.number}
        self.note("end", **who, how=how, code=process.poll(), age_s=age_s)

    def start_roles(self, *kinds: str) -> None:
        for role in self.roles.values():
            if role.kind in kinds:
                self.start(role)

    def restart_those_that_died(self) -> None:
        """Restart roles that ended early: that is a defect, but the run continues."""
        for role in self.roles.values():
            if role.is_wanted and role.now is not None and not role.is_alive():
                self.ended(role.now, "by itself")
                self.start(role)

    def end_roles(self, kind: str) -> None:
        """Have roles of a kind end in order."""
        roles = [role for role in self.roles.values() if role.kind == kind]
        leaving = [role.now for role in roles if role.now is not None and role.is_alive()]
        for role in roles:
            role.tell_to_leave()
        for process in leaving:
            with suppress(subprocess.TimeoutExpired):
                process.wait(LEAVES_WITHIN_S)
            process.kill()
            process.wait()
            self.ended(process, "told to")

    @property
    def is_gateway_open(self) -> bool:
        """Whether the gateway, if any, accepts connections: its process starts slowly."""
        if not self.options.gateway:
            return True
        with suppress(OSError), socket.create_connection(("127.0.0.1", self._gateway_port), 1):
            return True
        return False

    # The server

    def kill_server(self) -> None:
        """Send SIGKILL; data that was not on disk, by the server's setting, is lost."""
        since = self.tail.before_kill()
        self.is_up = False
        self.server.kill()
        until = now_us()
        self.tail.after_kill()
        if since is not None:
            self.note("loss", since=since, until=until)

    def restart_server(self) -> None:
        self.server.restart()
        self.is_up = True

    def signal_server(self, number: signal.Signals) -> None:
        self.is_up = number == signal.SIGCONT
        os.kill(self.server.pid, number)

    def standing(self) -> Counter[str]:
        """The number of messages by state, over all topics. Raises redis.RedisError."""
        calls = []
        for topic in TOPICS:
            keys = self.store.keys.topic(topic.name)
            calls.append(("waiting", "ZCARD", keys.waiting))
            for group in topic.groups:
                own = keys.group(group)
                calls += [
                    ("ready", "HLEN", own.entries),
                    ("parked", "HLEN", keys.lanes(group).parked),
                    ("retry", "ZCARD", own.retry),
                    ("garbage", "ZCARD", own.garbage),
                    ("ready streams", "XLEN", own.ready),
                ]
        pipe = self.client.pipeline(transaction=False)
        for _, *command in calls:
            pipe.execute_command(*command)
        found: Counter[str] = Counter()
        for (name, *_), n in zip(calls, pipe.execute(), strict=True):
            found[name] += int(n)
        return found
