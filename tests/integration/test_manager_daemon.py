"""The manager as a whole, in this process and as the real `lisa-manager`.

Numbers such as L5 are known defects of the original's manager; Lisa has none of them.
"""

import itertools
import json
import logging
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from click.testing import CliRunner

from lisa.cli.manager import main
from lisa.core.model.envelope import new_id
from lisa.core.model.errors import ConfigError, LisaError
from lisa.core.store import presence
from lisa.core.store.presence import ConsumerPresence
from lisa.core.store.store import SCHEMA_VERSION
from lisa.core.transitions.groups import Undeclare
from lisa.embedded import EmbeddedServer
from lisa.embedded.server import free_port
from lisa.manager import Manager
from lisa.manager.loop import LEAVE_S
from lisa.manager.reclaimer import POLL_S
from tests.programs import NEVER_IMPORTED
from tests.roles import Cast
from tests.servers import PATIENCE, Process, Processes, connect, failing_disk, least, wait_until

NEVER = timedelta(days=1)
"""A schedule that has no part in a test: what happens does not come from the safety net."""
OFTEN = timedelta(milliseconds=200)
HOST = "127.0.0.1"
ORDERS = {"orders": {"group": "g"}}


@pytest.fixture
def cast(redis_url: str) -> Cast:
    return Cast(redis_url)


def lateness_ms(cast: Cast, count: int) -> list[float]:
    """Read and open `count` messages; the lateness of each."""
    found: list[float] = []

    def came() -> bool:
        entries = cast.read(block_ms=200)
        if entries:
            now_us = cast.open(entries).now_us
            found.extend(now_us / 1e3 - entry.due_ms for entry in entries)
        return len(found) >= count

    wait_until(came)
    assert min(found) >= 0
    return sorted(found)


class TestInThisProcess:
    def test_messages_are_delivered_when_due_without_any_cron(
        self, cast: Cast, redis_url: str
    ) -> None:
        """Also those of topics that are unknown until their first message."""
        with Manager(redis_url, topics=ORDERS, move=NEVER, process_pending=NEVER) as manager:
            later = cast.send(delay_ms=3_600_000)

            def median_ms() -> float:
                for delay_ms in range(100, 600, 10):
                    cast.send(delay_ms=delay_ms)
                return lateness_ms(cast, 50)[25]

            # Half the lateness that ticks every second would cause.
            assert least(median_ms, 250) < 250
            assert cast.state(later) == "waiting"
            wait_until(lambda: manager.health()["status"] == "ok")
            numbers = itertools.count()

            def late_ms() -> float:
                other = cast.on(f"brand-new-{next(numbers)}").declare()
                other.send(delay_ms=100)
                return lateness_ms(other, 1)[0]

            limit_ms = POLL_S * 1e3 / 2  # the list of topics is read at this interval
            assert least(late_ms, limit_ms) < limit_ms

    def test_l11_groups_are_made_at_once_and_begin_with_the_first_message(
        self, cast: Cast, redis_url: str
    ) -> None:
        early = cast.on("early", "first")
        sent = early.send(delay_ms=20)  # before any manager, any group, any consumer
        time.sleep(0.05)
        with Manager(redis_url, topics={"early": {"groups": ["first", "second"]}}):
            for group in (early, early.on("early", "second")):
                wait_until(partial(cast.ask, "EXISTS", group.own.ready))
                assert [entry.id for entry in group.await_entries()] == [sent]
            mails = cast.on("mails", "lisa")
            record = ConsumerPresence(name="c", topic="mails")  # a consumer waits for its group
            cast.drive(presence.announce_consumer(cast.store, record))
            cast.ask("PUBLISH", cast.store.keys.wake, "mails")
            wait_until(lambda: mails.groups() == ("lisa",))
            mails.send()
            assert len(mails.await_entries()) == 1

    def test_l5_one_topics_error_stops_no_other_topic(
        self, cast: Cast, redis_url: str, client: redis.Redis
    ) -> None:
        broken, after = cast.on("aaa", "g").declare(), cast.on("zzz").declare(ack_timeout="100")
        for key in (broken.keys.waiting, broken.own.ready, broken.keys.expiry):
            client.delete(key)
            client.set(key, "of the wrong type")
        late = after.send(delay_ms=100)
        topics = {"aaa": {}, "zzz": {"garbage_keep": "1ms"}}
        often: Any = dict.fromkeys(("move", "clean", "process_pending", "sweep"), OFTEN)
        with Manager(redis_url, topics=topics, **often) as manager:
            wait_until(after.take)  # promoted
            wait_until(lambda: after.state(late) == "retry")  # reclaimed
            dead = after.send()
            (entry,) = after.await_entries()
            after.discard(entry)
            wait_until(lambda: after.state(dead) == "purged")  # swept
            assert "WRONGTYPE" in json.dumps(manager.health())
            assert manager.health()["status"] == "ok"

    @pytest.mark.parametrize("key", ["waiting", "retry"])
    def test_l19_an_error_is_logged_once_also_if_a_key_breaks_while_its_topic_is_idle(
        self, cast: Cast, client: redis.Redis, caplog: pytest.LogCaptureFixture, key: str
    ) -> None:
        caplog.set_level(logging.INFO, "lisa.manager")
        cast.declare()
        broken = {"waiting": cast.keys.waiting, "retry": cast.own.retry}[key]
        with Manager(cast.url, topics=["orders"], move=OFTEN) as manager:
            wait_until(lambda: manager.health()["status"] == "ok")
            client.set(broken, "of the wrong type")
            wait_until(lambda: "promoter: topic orders: " in caplog.text)
            client.delete(broken)
            wait_until(lambda: "promoter: topic orders works again" in caplog.text)
        (said,) = [line for line in caplog.messages if line.startswith("promoter: topic orders: ")]
        assert "WRONGTYPE" in said

    def test_leases_last_an_ack_timeout_longer_than_a_refusal_of_writes(
        self, own_server: EmbeddedServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Consumers could not renew them. One line of the log reports the outage."""
        ack_timeout_s = 0.5
        cast = Cast(own_server.url).declare(ack_timeout="500")
        with Manager(own_server.url, move=NEVER):
            sent = cast.send()
            wait_until(cast.take)
            with failing_disk(own_server):
                time.sleep(3 * ack_timeout_s)
                ended = time.monotonic()
            wait_until(lambda: cast.state(sent) != "in_flight")
            assert time.monotonic() - ended >= ack_timeout_s
        assert len([one for one in caplog.records if "trying again" in one.message]) <= 2

    def test_topics_are_declared_again_on_an_emptied_server(
        self, cast: Cast, redis_url: str, client: redis.Redis, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Also if another role writes the schema first."""
        with Manager(redis_url, topics={"orders": {"group": "g", "max_ready": 5}}):
            wait_until(lambda: client.hlen(cast.store.keys.managers) == 1)
            wait_until(lambda: cast.options().max_ready == 5)
            with client.pipeline(transaction=True) as together:
                together.flushall()
                together.set(cast.store.keys.schema, SCHEMA_VERSION)
                together.execute()
            wait_until(lambda: cast.options().max_ready == 5 and cast.groups() == ("g",))
            wait_until(lambda: "has lost its messages" in caplog.text)
            client.flushall()
            wait_until(lambda: cast.groups() == ("g",))
            cast.send(delay_ms=50)
            assert len(cast.await_entries()) == 1
        assert caplog.text.count("has lost its messages") == 2

    def test_threads_that_announce_a_manager_at_once_report_no_loss(
        self, redis_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """As those of a cluster's nodes at the start."""
        real = presence.announce_manager

        def announce(*args: Any) -> Any:
            is_new = yield from real(*args)
            if is_new:
                other = threading.Thread(target=engine.beat)
                other.start()
                other.join(20)
            return is_new

        with Manager(redis_url) as manager:
            engine = manager._engine
            wait_until(lambda: engine._is_announced)
            engine._is_announced = False
            engine.store.drive(presence.leave_manager(engine.store, engine.name))
            monkeypatch.setattr(presence, "announce_manager", announce)
            engine.beat()
        assert "has lost its messages" not in caplog.text

    def test_a_group_that_was_removed_stays_so(self, cast: Cast, redis_url: str) -> None:
        with Manager(redis_url, topics={"orders": {"groups": ["g", "h"]}}) as manager:
            wait_until(lambda: cast.groups() == ("g", "h"))
            cast.store.call(Undeclare("orders", "h", [], True))
            for marker in ("m1", "m2"):  # the manager has refreshed its topics since
                cast.drive(cast.store.register([marker]))
                wait_until(lambda marker=marker: marker in str(manager.health()["topics"]))  # type: ignore[misc]
            assert cast.groups() == ("g",)

    def test_it_stops_without_waiting_for_a_search_of_all_keys(
        self, redis_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        is_searching, ends = threading.Event(), threading.Event()

        def search(_: object, is_over: Callable[[], bool]) -> None:
            is_searching.set()
            wait_until(lambda: is_over() or ends.is_set())

        monkeypatch.setattr("lisa.manager.registry.Registry.search", search)
        manager = Manager(redis_url).start()
        stopping = threading.Thread(target=manager.stop)
        try:
            assert is_searching.wait(PATIENCE.total_seconds())
            stopping.start()
            stopping.join(PATIENCE.total_seconds() / 2)
            assert not stopping.is_alive()
        finally:
            ends.set()
            manager.stop()
        with pytest.raises(LisaError, match="only once"):
            manager.start()

    def test_a_newer_schema_and_a_wrong_password_are_clear_errors(
        self, cast: Cast, redis_url: str, client: redis.Redis, own_server: EmbeddedServer
    ) -> None:
        client.set(cast.store.keys.schema, "99")
        with pytest.raises(ConfigError, match="schema 99"):
            Manager(redis_url).start()
        with connect(own_server.url) as own:
            own.config_set("requirepass", "secret")
            for url in (own_server.url, own_server.url.replace("://", "://:wrong@")):
                with pytest.raises(ConfigError, match="password"):
                    Manager(url).start()
            own.config_set("requirepass", "")


def daemon(processes: Processes, url: str, *options: str) -> Process:
    process = processes.start("-m", "lisa.cli.manager", "--redis", url, *options)
    process.wait_for("is reachable")
    return process


def health(port: int) -> tuple[int, dict[str, Any]]:
    answer = httpx.get(f"http://{HOST}:{port}/healthz", timeout=60)
    return answer.status_code, answer.json()


ALARM = """
from lisa.core.model.signals import message_dead
@message_dead.connect_via('orders')
def alarm(topic, *, message):
    # In one piece, as log lines are.
    print(f'dead: {message.id} {message.body} {len(message.token)}\\n', end='')
"""
GROUPS = "lisa-delay-queue:\n  groups:\n    - {{topic: orders, group: g, max-length: {}}}\n"
REFUSED = [
    (["--config", "none.yml"], "none.yml"),
    (["--redis", "http://x"], "redis://"),
    (["--http", "nowhere"], "HOST:PORT"),
    (["--handlers", "no_such_module"], "no_such_module"),
    (["--handlers", "../alarm.py"], "write pkg.module"),
    (["--prefix", "a{b"], "prefix"),
]


class TestDaemon:
    def test_handlers_get_signals_and_sigterm_ends_it_with_exit_code_0(
        self, cast: Cast, redis_url: str, processes: Processes, tmp_path: Path
    ) -> None:
        (tmp_path / "alarm.py").write_text(ALARM)
        cast.declare(ack_timeout="100", retry_delays="")
        process = daemon(processes, redis_url, "--handlers", "alarm", "--log-format", "json")
        process.wait_for("runs on")
        message_id = new_id()
        cast.send({"order": 7}, message_id=message_id)
        wait_until(cast.take)
        process.wait_for(f"dead: {message_id} {{'order': 7}} 8")
        began = time.monotonic()
        assert process.stop() == 0
        assert time.monotonic() - began < LEAVE_S / 2  # it waits for no thread until time is up
        lines = [line for line in process.output.splitlines() if not line.startswith("dead: ")]
        records = [json.loads(line) for line in lines]
        assert "stopped" in records[-1]["message"]
        assert "error" not in {record["level"] for record in records}
        assert cast.store.drive(presence.managers(cast.store)) == []

    def test_sighup_reads_the_options_again(
        self, cast: Cast, redis_url: str, processes: Processes, tmp_path: Path
    ) -> None:
        """Also one that arrives while it starts."""
        (tmp_path / "slow.py").write_text(
            "import pathlib, time\n"
            "print('importing')\n"
            "while not pathlib.Path('go').exists(): time.sleep(0.01)\n"
        )
        file = tmp_path / "manager.yml"
        file.write_text(GROUPS.format(5))
        process = processes.start(
            *("-m", "lisa.cli.manager", "--redis", redis_url),
            *("--handlers", "slow", "--config", str(file)),
        )
        process.wait_for("importing")
        process.signal(signal.SIGHUP)
        (tmp_path / "go").touch()
        process.wait_for("reloaded: nothing changed")

        def reload(text: str, said: str) -> None:
            file.write_text(text)
            process.signal(signal.SIGHUP)
            process.wait_for(said)

        reload(GROUPS.format(6), "reloaded: topic orders: max_ready 5 -> 6")
        wait_until(lambda: cast.options().max_ready == 6)
        reload(GROUPS.format("many"), "the previous one stays active")
        assert cast.options().max_ready == 6
        mails = "    - {topic: mails, group: m}\n"
        reload(GROUPS.format(6) + mails, "reloaded: topic mails: new")
        wait_until(lambda: cast.on("mails").groups() == ("m",))
        others = "  enabled: false\n  log-level: debug\n"
        reload(GROUPS.format(6) + others, "reloaded: enabled, log-level changed: restart to apply")
        assert process.stop() == 0

    @pytest.mark.parametrize(
        "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full)]
    )
    def test_stopped_while_it_starts_it_exits_with_0(
        self, processes: Processes, tmp_path: Path, number: signal.Signals
    ) -> None:
        """As process 1 of a container it would not notice a signal without a handler."""
        (tmp_path / "slow.py").write_text(NEVER_IMPORTED)
        process = processes.start("-m", "lisa.cli.manager", "--handlers", "slow")
        process.wait_for("importing")
        process.signal(number)
        assert process.wait() == 0

    def test_healthz_fails_while_the_server_is_away_or_refuses_writes(
        self, own_server: EmbeddedServer, processes: Processes
    ) -> None:
        port = free_port()
        process = daemon(processes, own_server.url, "--http", f"{HOST}:{port}")
        wait_until(lambda: health(port)[0] == 200)
        assert health(port)[1]["status"] == "ok"
        own_server.kill()
        wait_until(lambda: health(port)[0] == 503)
        for _ in range(20):  # and stays
            status, report = health(port)
            assert (status, report["status"]) == (503, "failing")
            time.sleep(0.05)
        own_server.restart()
        wait_until(lambda: health(port)[0] == 200)
        with failing_disk(own_server):
            wait_until(lambda: health(port)[0] == 503)
            assert "refuses writes" in json.dumps(health(port)[1]["redis"])
        wait_until(lambda: health(port)[0] == 200)
        assert process.stop() == 0
        assert process.output.count("trying again") == 2  # once per change of state

    def test_a_wrong_configuration_is_one_line_and_exit_2(self, tmp_path: Path) -> None:
        off = tmp_path / "off.yml"
        off.write_text("lisa-delay-queue:\n  enabled: false\n")
        for arguments, said in REFUSED:
            done = CliRunner().invoke(main, arguments)
            assert (done.exit_code, done.output.count("\n")) == (2, 1), done.output
            assert said in done.output
        done = CliRunner().invoke(main, ["--config", str(off)])
        assert (done.exit_code, done.output.count("\n")) == (0, 1), done.output
        assert "enabled is false" in done.output
