"""`lisa pipeline serve`: commands in its session do what they do alone."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from lisa import Producer
from lisa.embedded import EmbeddedServer
from tests.servers import JVM_PATIENCE, ROOT, Process, Processes, connect, flush, runs, wait_until
from tests.spark.worlds import SMALL

NOON = datetime(2040, 5, 1, 12, tzinfo=UTC)
SEARCH = ("search", "--archive", "archive", "--field", "$.order>1", "--out")


class Serving:
    """A server, started in one directory, and its clients in another."""

    def __init__(self, processes: Processes, folder: Path, runtime: Path, url: str) -> None:
        self.processes, self.url = processes, url
        self.folder = folder / "client"
        self.folder.mkdir()
        (folder / "server").mkdir()
        self._servers = folder / "server"
        self._runtime = runtime
        self.server = self.start()

    @property
    def socket(self) -> Path:
        return self._runtime / "lisa" / "pipeline.sock"

    def start(self) -> Process:
        """Start a server; its environment does not name the Redis server."""
        self.server = self.processes.start(
            *("-m", "lisa.cli.main", "pipeline", "serve", *SMALL),
            env={"XDG_RUNTIME_DIR": str(self._runtime)},
            cwd=self._servers,
        )
        self.server.wait_for("ready: Spark", timeout=JVM_PATIENCE)
        return self.server

    def environment(self, **more: str) -> Mapping[str, str]:
        return {"XDG_RUNTIME_DIR": str(self._runtime), "LISA_REDIS_URL": self.url, **more}

    def run(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, with the server's environment and more."""
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        clean = {name: value for name, value in os.environ.items() if not name.startswith("LISA_")}
        return subprocess.run(
            [sys.executable, "-m", "lisa.cli.main", "pipeline", words[0], *SMALL, *words[1:]],
            env={**clean, "PYTHONPATH": path, **self.environment(**environment)},
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=JVM_PATIENCE.total_seconds(),
        )

    def start_client(self, *words: str) -> Process:
        return self.processes.start(
            *("-m", "lisa.cli.main", "pipeline", *words, *SMALL),
            env=self.environment(),
            cwd=self.folder,
        )

    def start_slow(self, job: str) -> Process:
        """Start a job that sends a row per second to a topic of its name."""
        return self.start_client(
            *("schedule", "slow.csv", "--topic", job, "--max-rate", "1", "--job", job)
        )

    def sent(self, topic: str) -> int:
        with connect(self.url) as client:
            return int(client.zcard(f"lisa:{{{topic}}}:waiting"))

    def ids(self) -> list[str]:
        """The ids that a search in the server's session finds."""
        found = self.run("search", "--archive", "archive", "--no-live", "--json")
        assert found.returncode == 0, found.stderr
        return sorted(one["id"] for one in json.loads(found.stdout)["messages"])


@pytest.fixture(scope="module")
def serving(
    valkey_server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    url = flush(valkey_server.url)
    with connect(url) as client:
        client.hset("lisa:{orders}:options", "journal", "1")
    with Producer(url) as producer:
        for order in range(4):
            producer.send("orders", {"order": order}, id=f"m{order}", at=NOON + timedelta(order))
    folder = tmp_path_factory.mktemp("serve")
    processes = Processes(folder)
    runtime = tempfile.mkdtemp(prefix="lisa-", dir="/tmp")  # a socket's path is short
    try:
        one = Serving(processes, folder, Path(runtime), url)
        (one.folder / "slow.csv").write_text("n\n" + "".join(f"{n}\n" for n in range(1_000)))
        archived = one.run("archive", "--to", "archive", "--once", "--json")
        assert archived.returncode == 0, archived.stderr
        assert json.loads(archived.stdout.splitlines()[-1])["events"] == 4
        yield one
    finally:
        processes.end()
        shutil.rmtree(runtime)
        flush(url)


def without_progress(text: str) -> list[str]:
    """Lines of output; click prints an empty one if a command is interrupted."""
    progress = re.compile(r"lisa pipeline \w+: \d+ s")
    return [one for one in text.splitlines() if one and not progress.match(one)]


def result(done: subprocess.CompletedProcess[str]) -> tuple[int, str, list[str]]:
    """What two runs must have in common."""
    return done.returncode, done.stdout, without_progress(done.stderr)


def descendants(pid: int) -> set[int]:
    """The process and all below it."""
    lines = subprocess.run(
        ["ps", "-eo", "pid=,ppid="], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    parents = {int(one): int(parent) for one, parent in map(str.split, lines)}
    found, more = {pid}, True
    while more:
        below = {one for one, parent in parents.items() if parent in found} - found
        found |= below
        more = bool(below)
    return found


def test_commands_do_what_they_do_alone(serving: Serving) -> None:
    """A client imports no Spark; paths, environment and settings are those of the client."""
    program = (
        "import sys\nfrom lisa.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: print([one for one in ('pyspark', 'pyarrow') if one in sys.modules])"
    )
    client = serving.processes.start(
        *("-c", program, "pipeline", "search", "--archive", "archive", "--no-live", "--json"),
        *SMALL,
        env=serving.environment(),
        cwd=serving.folder,
    )
    assert client.wait(timeout=JVM_PATIENCE) == 0, client.output
    assert '"id":"m3"' in client.output
    assert client.output.endswith("[]\n")
    (serving.folder / "rows.csv").write_text(
        "id,body,due\na,x,2040-01-01T00:00:00\nb,x,2040-01-01T00:00:00\nc,,2040-01-01T00:00:00\n"
    )
    words = ("schedule", "rows.csv", "--topic", "new", "--refused", "bad", "--report", "done.json")
    zone = ("--spark-conf", "spark.sql.session.timeZone=Asia/Tokyo")
    done = serving.run(*words, *zone, LISA_PREFIX="other")
    assert done.returncode == 1, done.stderr
    assert "lisa: runs without" not in done.stderr
    assert "all 1 refused rows are in bad" in done.stderr
    assert json.loads((serving.folder / "done.json").read_text())["topics"]["new"]["accepted"] == 2
    assert len(list((serving.folder / "bad").glob("*.jsonl"))) == 1
    tokyo = datetime(2040, 1, 1, tzinfo=UTC) - timedelta(hours=9)
    with connect(serving.url) as raw:
        dues = {due for _, due in raw.zrange("other:{new}:waiting", 0, -1, withscores=True)}
    assert dues == {tokyo.timestamp() * 1000}
    # Usage errors come from the client; the others from the server's session.
    lost = serving.run("search", "--archive", "nowhere", "--no-live")
    where = serving.folder / "nowhere"
    said = f"lisa: there is no archive in file:{where}; `lisa pipeline archive --to` creates one"
    assert result(lost) == (2, "", [said])
    warned = serving.run("search", "--no-live", "--redis", "redis://:secret@127.0.0.1:1/0")
    assert warned.returncode == 2
    assert warned.stderr.count("warning: every user") == 1
    unanswered = serving.run("search", LISA_REDIS_URL="redis://127.0.0.1:1/0")
    assert unanswered.returncode == 3, unanswered.stderr
    assert not [one for one in serving.server.output.splitlines() if "Traceback" in one]


def test_a_command_that_needs_another_session_says_so(serving: Serving) -> None:
    memory = "spark.driver.memory"
    other: list[tuple[tuple[str, ...], dict[str, str], str]] = [
        (("--master", "local[3]"), {}, "--master is local[2] there"),
        (("--spark-conf", f"{memory}=900m"), {}, f"was started with another {memory}"),
        ((), {"AWS_ACCESS_KEY_ID": "x"}, "it was started with another AWS_ACCESS_KEY_ID"),
        (("--id", "/dev/fd/9"), {}, "an open file of its own process"),
    ]
    for words, environment, said in other:
        # `search` finds this usage error before it would start a session.
        done = serving.run("search", "--no-live", *words, **environment)
        assert done.returncode == 2
        first, second = done.stderr.splitlines()
        assert first.startswith("lisa: runs without `lisa pipeline serve`: ")
        assert said in first
        assert "nothing to search" in second
    done = serving.run("search", "--no-live", "--no-server", "--master", "local[3]")
    assert done.stderr.count("\n") == 1
    assert "nothing to search" in done.stderr
    second_server = serving.run("serve")
    assert second_server.returncode == 2
    assert second_server.stderr == (
        f"lisa: `lisa pipeline serve` runs already (process {serving.server.pid}, "
        f"{serving.socket})\n"
    )


def test_commands_share_the_cores_and_further_ones_wait(serving: Serving) -> None:
    slow = [serving.start_slow(job) for job in ("one", "two")]
    wait_until(lambda: serving.sent("one") and serving.sent("two"), timeout=JVM_PATIENCE)
    third = serving.start_client("search", "--archive", "archive", "--no-live")
    third.wait_for("lisa: waits for 2 other commands", timeout=JVM_PATIENCE)
    third.signal(signal.SIGINT)
    assert third.wait() == 1
    assert "lisa: aborted" in third.output
    fourth = serving.start_client("search", "--archive", "archive", "--no-live")
    fourth.wait_for("lisa: waits for 2 other commands", timeout=JVM_PATIENCE)
    # Ctrl-C ends one command; its place is free, and the other command continues.
    slow[0].signal(signal.SIGINT)
    assert slow[0].wait(timeout=JVM_PATIENCE) == 1
    assert without_progress(slow[0].output) == ["lisa: aborted"]
    assert fourth.wait(timeout=JVM_PATIENCE) == 0, fourth.output
    assert "m3" in fourth.output
    before = serving.sent("two")
    wait_until(lambda: serving.sent("two") > before, timeout=JVM_PATIENCE)
    # A client that is killed ends its command, too.
    assert slow[1].alive
    slow[1].kill()
    serving.server.wait_for("schedule: SIGTERM", timeout=JVM_PATIENCE)
    assert serving.ids() == ["m0", "m1", "m2", "m3"]


@pytest.mark.parametrize("kills", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_end_of_the_server_ends_its_commands_and_its_jvm(
    serving: Serving, *, kills: bool
) -> None:
    """After kill -9, too. Compares the whole output of a search with and without a server."""
    if not serving.server.alive:
        serving.start()
    warm = serving.run(*SEARCH, "warm", "--format", "csv") if kills else None
    job = f"slow-{kills}"
    slow = serving.start_slow(job)
    wait_until(lambda: serving.sent(job), timeout=JVM_PATIENCE)
    family = descendants(serving.server.pid)
    assert len(family) > 3
    serving.server.signal(signal.SIGKILL if kills else signal.SIGTERM)
    assert slow.wait(timeout=JVM_PATIENCE) == 1
    code = serving.server.wait(timeout=JVM_PATIENCE)
    wait_until(lambda: not [pid for pid in family if runs(pid)], timeout=JVM_PATIENCE)
    if warm is None:
        # The client and the command write to the same terminal, in any order.
        assert sorted(without_progress(slow.output)) == [
            "lisa: `lisa pipeline serve` stops, and cancels this command",
            "lisa: aborted",
        ]
        assert code == 0
        assert not serving.socket.exists()
        return
    assert "lisa: `lisa pipeline serve` died while it ran this command" in slow.output
    assert serving.socket.exists()
    cold = serving.run(*SEARCH, "cold", "--format", "csv")
    assert warm.stdout.count("\n") > 2
    code, output, said = result(cold)
    assert result(warm) == (code, output, [one.replace("cold", "warm") for one in said])
    assert code == 0
    assert content(serving.folder / "warm") == content(serving.folder / "cold")


def content(folder: Path) -> Any:
    return sorted(one.read_text("utf-8") for one in folder.glob("*.csv"))
