"""`lisa-consumer` as a real process."""

import importlib
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner, Result

from lisa import Producer
from lisa.cli.consumer import main
from lisa.core.daemon import logs, process_signals
from lisa.embedded.server import free_port
from tests.consumers import Bench, presences
from tests.programs import NEVER_IMPORTED
from tests.servers import ROOT, Process, Processes, wait_until

TOPIC = "orders"
TWO_LINES = """
from lisa import message_received

def show(topic, *, message): print(f"{topic} got {message.body}", flush=True)
for topic in ("mystream", "topic2"): message_received.connect(show, sender=topic)
"""
ONE = """
from lisa.consumer import Consumer
consumer = Consumer()
@consumer.on("orders")
def handle(message): print(f"handled {message.topic} {message.group} {message.body}")
"""

SLOW = """
import time
from lisa import Consumer
consumer = Consumer()
@consumer.on("orders")
def handle(message):
    print(f"handling {message.body}")
    time.sleep(0.5)
    print(f"handled {message.body}")
"""

UNREAD = """
import logging, os
from lisa import Consumer
os.dup2(os.pipe()[1], 2)  # a log that nobody reads
consumer = Consumer()
@consumer.on("orders")
def handle(message):
    for _ in range(20):
        logging.warning("x" * 10_000)
    print(f"handled {message.body}")
"""

Start = Callable[..., Process]
ON_APP_LOOP = (
    SLOW.replace("Consumer", "AsyncConsumer")
    .replace("def handle", "async def handle")
    .replace("time.sleep", "await __import__('asyncio').sleep")
)

FORKS = """
import multiprocessing, time
from lisa import AsyncConsumer, Consumer
consumer = {consumer}()
@consumer.on("orders")
def handle(message):
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=[60], daemon=True)
    child.start()
    child.terminate()
    child.join(5)
    child.kill()
    print(f"handled {{message.body}}, child ended with {{child.exitcode}}")
"""


CONFIGS = ROOT / "configs"
"""The files on the original's page."""


@pytest.fixture
def start(bench: Bench, processes: Processes, tmp_path: Path) -> Callable[..., Process]:
    """Starts `lisa-consumer` for a module `shop` with that text."""

    def run(module: str, *arguments: str, server: str = bench.url, **env: str) -> Process:
        (tmp_path / "shop.py").write_text(module)
        command = ("-m", "lisa.cli.consumer", *(["--redis", server] if server else []))
        return processes.start(*command, *arguments, "shop", env=env)

    return run


@pytest.mark.parametrize(
    ("module", "options", "numbers"),
    [
        (ON_APP_LOOP, [], [signal.SIGHUP]),
        pytest.param(ON_APP_LOOP, [], [signal.SIGINT], marks=pytest.mark.full),
        # A shell repeats the SIGHUP of its terminal; systemd may send one along with SIGTERM.
        (SLOW, [], [signal.SIGHUP, signal.SIGHUP, signal.SIGTERM]),
        (SLOW, ["--processes", "2"], [signal.SIGHUP, signal.SIGTERM, signal.SIGHUP]),
    ],
)
def test_a_stopped_consumer_finishes_its_handlers_and_exits_with_0(
    bench: Bench, start: Start, module: str, options: list[str], numbers: list[signal.Signals]
) -> None:
    bench.declare(TOPIC)
    process = start(module, *options)
    [sent] = bench.send(TOPIC, [42])
    process.wait_for("handling 42")
    for number in numbers:
        process.signal(number)
    assert process.wait() == 0
    assert "handled 42" in process.output
    assert "Traceback" not in process.output
    assert bench.settled_as(TOPIC, sent) == "acked"
    assert presences(bench) == []


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.full)]
)
def test_a_consumer_that_is_stopped_while_it_starts_exits_with_0(
    start: Start, number: signal.Signals
) -> None:
    """As process 1 of a container it would not notice a signal without a handler."""
    process = start(NEVER_IMPORTED)
    process.wait_for("importing")
    process.signal(number)
    assert process.wait() == 0


def test_children_do_not_import_a_file_named_like_a_package(
    bench: Bench, processes: Processes, tmp_path: Path
) -> None:
    bench.declare(TOPIC)
    (tmp_path / "redis.py").touch()
    (tmp_path / "shop.py").write_text(SLOW)
    command = ("-P", "-m", "lisa.cli.consumer", "--redis", bench.url, "--processes", "2", "shop")
    process = processes.start(*command)
    bench.send(TOPIC, [42])
    process.wait_for("handled 42")
    assert process.stop() == 0


def test_a_log_that_nobody_reads_delays_neither_handlers_nor_the_end(
    bench: Bench, start: Start
) -> None:
    bench.declare(TOPIC)
    process = start(UNREAD)
    sent = bench.send(TOPIC, [1, 2, 3])
    process.wait_for("handled", times=3)
    wait_until(lambda: [bench.settled_as(TOPIC, one) for one in sent] == ["acked"] * 3)
    assert process.stop() == 0


def test_a_server_given_in_code_is_kept_and_health_is_served(bench: Bench, start: Start) -> None:
    """The environment names another server; only the flag takes precedence over the module."""
    bench.declare(TOPIC)
    other = "redis://127.0.0.1:1/0"
    in_code = ONE.replace("Consumer()", f'Consumer("{bench.url}")')
    process = start(in_code, server="", LISA_REDIS_URL=other)
    bench.send(TOPIC, [1])
    process.wait_for("handled orders lisa 1")
    assert f"the configuration names {other}" in process.output
    process.kill()
    bench.declare(TOPIC, "b")
    address = f"127.0.0.1:{free_port()}"
    elsewhere = ONE.replace("Consumer()", f'Consumer("{other}")')
    process = start(elsewhere, "--http", address, "--group", "b")
    bench.send(TOPIC, [2])
    process.wait_for("handled orders b 2")
    assert "the configuration names" not in process.output
    health = httpx.get(f"http://{address}/healthz", timeout=60).json()
    assert health["status"] == "ok"
    assert health["topics"]["orders/b"]["state"] == "running"


def test_the_original_s_three_files_start_the_three_roles(
    bench: Bench, start: Start, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every message arrives, although the manager starts last."""
    monkeypatch.setenv("LISA_REDIS_URL", bench.url)
    env = {"LISA_REDIS_URL": bench.url}
    consumer = start(TWO_LINES, "--config", str(CONFIGS / "consumer.yml"), server="", **env)
    with Producer.from_config(CONFIGS / "producer.yml") as producer:
        for topic in ("mystream", "topic2"):
            producer.send(topic, "now")
            producer.send(topic, "later", delay="1s")
    manager = str(CONFIGS / "manager.yml")
    processes.start("-m", "lisa.cli.manager", "--config", manager, env=env)
    for number, topic in enumerate(("mystream", "topic2"), 1):
        consumer.wait_for(f"{topic} got now")
        consumer.wait_for(f"{topic} got later")
        wait_until(lambda topic=topic: presences(bench, topic))  # type: ignore[misc]
        assert presences(bench, topic)[0].name.startswith(f"consumer-{number}-")


LIFESPAN = """
from contextlib import contextmanager
from lisa import Consumer
@contextmanager
def database():
    raise ConnectionError("no database")
    yield
consumer = Consumer(lifespan=database)
consumer.subscribe("orders", print)
"""


def test_a_lifespan_that_fails_ends_it_with_exit_code_1(bench: Bench, start: Start) -> None:
    """With exit code 2 systemd would not start it again once its database has started."""
    bench.declare(TOPIC)
    process = start(LIFESPAN)
    assert process.wait() == 1
    reason = "the consumer's lifespan failed at startup: ConnectionError: no database"
    assert f"lisa-consumer: {reason}" in process.output
    several = start(LIFESPAN, "--processes", "2")
    several.wait_for("ended with code 1; another one starts")
    assert several.stop() == 0


@pytest.mark.parametrize("consumer", ["Consumer", "AsyncConsumer"])
def test_a_child_that_a_handler_forked_ends_at_sigterm(
    bench: Bench, start: Start, consumer: str
) -> None:
    """`multiprocessing.Pool` terminates such children. The consumer itself keeps running."""
    bench.declare(TOPIC)
    process = start(FORKS.format(consumer=consumer))
    for body in (1, 2):
        bench.send(TOPIC, [body])
        process.wait_for(f"handled {body}, child ended with {-signal.SIGTERM}")
    assert "stopping" not in process.output
    assert process.stop() == 0


@pytest.fixture
def in_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs the command here, which takes a fiftieth of the time of a process."""
    monkeypatch.setattr(process_signals, "exit_on_signals", lambda _: None)
    monkeypatch.setattr(logs, "configure", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def run(module: str, *arguments: str) -> Result:
        (tmp_path / "shop.py").write_text(module)
        sys.modules.pop("shop", None)
        importlib.invalidate_caches()
        try:
            return CliRunner().invoke(main, arguments)
        finally:
            sys.modules.pop("shop", None)
            shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)

    return run


@pytest.mark.parametrize(
    ("module", "arguments", "said"),
    [
        (ONE, [], "no target"),
        (ONE, ["nowhere"], "no module 'nowhere'"),
        (ONE, ["shop:"], "must be pkg.module or pkg.module:name"),
        (ONE, ["../shop"], "must be pkg.module or pkg.module:name"),
        (ONE, ["shop:Consumer"], "is a type, not a lisa.Consumer"),
        (TWO_LINES, ["shop:consumer"], "module shop has no 'consumer'"),
        (ONE + "other = Consumer()\n", ["shop"], "several consumers (consumer, other)"),
        ("x = 1\n", ["shop"], "neither a consumer nor a receiver"),
        ("from lisa.consumer import Consumer\nc = Consumer()\n", ["shop"], "nothing to consume"),
        (ONE, ["--concurrency", "0", "shop"], "concurrency"),
        (ONE, ["--group", "no spaces", "shop"], "group 'no spaces' is not allowed"),
        (ONE, ["--redis", "http://x", "shop"], "is not a server address"),
        (ONE, ["--config", "absent.yml", "shop"], "absent.yml"),
        (ONE, ["--http", "nonsense", "shop"], "HOST:PORT"),
        (ONE, ["shop"], "several groups (a, b): name one with group="),
    ],
)
def test_a_usage_error_is_one_line_with_exit_code_2(
    bench: Bench, in_process: Callable[..., Result], module: str, arguments: list[str], said: str
) -> None:
    for group in ("a", "b"):
        bench.declare(TOPIC, group)
    found = in_process(module, "--redis", bench.url, *arguments)
    assert found.exit_code == 2, found.output
    line = found.stderr.strip().splitlines()[-1]
    assert line.startswith("lisa-consumer: ")
    assert said in line


def test_disabled_and_errors_of_the_application(
    in_process: Callable[..., Result], tmp_path: Path
) -> None:
    (tmp_path / "off.yml").write_text("lisa-delay-queue:\n  enabled: false\n")
    found = in_process(ONE, "--config", "off.yml")
    assert found.exit_code == 0
    assert found.output == ("lisa-consumer: enabled is false in the configuration; nothing to do\n")
    found = in_process("import not_installed_anywhere\n", "shop")
    assert isinstance(found.exception, ModuleNotFoundError), "its own error is shown"
