"""The manager as a whole, in this process and as the real `lisa-manager`."""

from __future__ import annotations

import itertools
import json
import signal
import threading
import time
import urllib.error
import urllib.request
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from lisa.core.model.envelope import new_id
from lisa.core.model.errors import ConfigError, LisaError
from lisa.core.store import presence
from lisa.core.store.presence import ConsumerPresence
from lisa.core.store.store import SCHEMA_VERSION
from lisa.embedded.server import free_port
from lisa.manager import Manager
from lisa.manager.loop import LEAVE_S
from lisa.manager.reclaimer import POLL_S
from tests.roles import Cast
from tests.servers import PATIENCE, failing_disk, least, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import redis

    from lisa.core.model.stream import Entry
    from lisa.embedded import EmbeddedServer
    from tests.servers import Process, Processes

NEVER = timedelta(days=1)
"""A schedule that has no part in a test: what happens does not come from the safety net."""

HOST = "127.0.0.1"


@pytest.fixture
def cast(redis_url: str) -> Iterator[Cast]:
    cast = Cast(redis_url)
    yield cast
    cast.store.close()


def lateness_ms(cast: Cast, count: int, *, within_s: float = 20.0) -> list[float]:
    """Read and open `count` messages; the lateness of each."""
    found: list[float] = []
    ends = time.monotonic() + within_s
    while len(found) < count:
        assert time.monotonic() < ends, f"only {len(found)} of {count} came"
        entries = cast.read(block_ms=200)
        if entries:
            now_us = cast.open(entries).now_us
            found += [now_us / 1e3 - entry.due_ms for entry in entries]
    return sorted(found)


class TestInThisProcess:
    def test_messages_are_delivered_when_due_without_any_cron(
        self, cast: Cast, redis_url: str
    ) -> None:
        topics = {"orders": {"group": "g"}}
        with Manager(redis_url, topics=topics, move=NEVER, process_pending=NEVER):

            def median_ms() -> float:
                for delay_ms in range(100, 1_100, 10):
                    cast.send(delay_ms=delay_ms)
                late = lateness_ms(cast, 100)
                assert late[0] >= 0
                return late[50]

            # Half the lateness that ticks every second would cause.
            assert least(median_ms, 250) < 250

    def test_an_earlier_message_wakes_the_promoter(self, cast: Cast, redis_url: str) -> None:
        with Manager(redis_url, topics={"orders": {"group": "g"}}, move=NEVER):
            later = cast.send(delay_ms=3_600_000)
            time.sleep(0.3)
            cast.send(delay_ms=200)
            assert lateness_ms(cast, 1)[0] < 60_000  # not at the due time of the other
            assert cast.state(later) == "waiting"

    def test_a_topic_unknown_until_now_is_found_by_its_first_message(
        self, cast: Cast, redis_url: str
    ) -> None:
        with Manager(redis_url, move=NEVER) as manager:
            wait_until(lambda: manager.health()["status"] == "ok")
            numbers = itertools.count()

            def late_ms() -> float:
                other = cast.on(f"brand-new-{next(numbers)}").declare()
                other.send(delay_ms=100)
                return lateness_ms(other, 1)[0]

            limit_ms = POLL_S * 1e3 / 2  # the list of topics is read at this interval
            assert least(late_ms, limit_ms) < limit_ms

    def test_a_dead_consumers_message_is_redelivered_despite_the_cron(
        self, cast: Cast, redis_url: str
    ) -> None:
        options = {"ack_timeout": "500ms", "retry_delays": [timedelta(milliseconds=200)]}
        topics = {"orders": {"group": "g", **options}}
        with Manager(redis_url, topics=topics, process_pending=NEVER, move=NEVER):
            cast.send()
            time.sleep(0.3)  # meanwhile the manager has looked and found nothing in flight
            began = time.monotonic()
            cast.take()
            again = cast.await_entries()
            took = time.monotonic() - began
        assert [entry.attempt for entry in again] == [2]
        assert took >= 0.7

    def test_a_paused_topic_rests_and_resumes_at_once(self, cast: Cast, redis_url: str) -> None:
        with Manager(redis_url, topics={"orders": {"group": "g"}}, move=NEVER):
            cast.configure(paused="1")
            sent = cast.send(delay_ms=50)
            time.sleep(0.3)
            assert cast.state(sent) == "waiting"
            cast.configure(paused="0")
            assert [entry.id for entry in cast.await_entries()] == [sent]

    def test_a_consumer_that_waits_gets_its_group_at_once(self, cast: Cast, redis_url: str) -> None:
        with Manager(redis_url) as manager:
            wait_until(lambda: manager.health()["status"] == "ok")
            mails = cast.on("mails", "lisa")
            record = ConsumerPresence(name="c", topic="mails")
            cast.store.drive(presence.announce_consumer(cast.store, record))
            cast.store.ask("PUBLISH", cast.store.keys.wake, "mails")
            wait_until(
                lambda: cast.store.drive(cast.store.groups("mails")) == ("lisa",),
            )
            mails.send()
            assert len(mails.await_entries()) == 1

    def test_several_managers_move_nothing_twice(self, cast: Cast, redis_url: str) -> None:
        topics = {"orders": {"group": "g"}}
        managers = [Manager(redis_url, topics=topics) for _ in range(3)]
        for manager in managers:
            manager.start()
        try:
            wait_until(lambda: len(cast.store.drive(presence.managers(cast.store))) == 3)
            sent = sorted(cast.send(delay_ms=300) for _ in range(300))
            got: list[Entry] = []

            def all_came() -> bool:
                got.extend(cast.take())
                return len(got) >= 300

            wait_until(all_came)
            time.sleep(0.2)
            got += cast.take()
            assert sorted(entry.id for entry in got) == sent
            assert cast.stats()["promoted"] == 300
        finally:
            for manager in managers:
                manager.stop()
        assert cast.store.drive(presence.managers(cast.store)) == []

    def test_one_topics_broken_key_does_not_delay_others(
        self, cast: Cast, redis_url: str, client: redis.Redis
    ) -> None:
        topics = {name: {"group": "g"} for name in ("aaa", "orders", "zzz")}
        with Manager(redis_url, topics=topics, move=NEVER) as manager:
            for name in ("aaa", "zzz"):
                client.set(cast.store.keys.topic(name).waiting, "not a sorted set")
                client.publish(cast.store.keys.wake, name)
            wait_until(lambda: "WRONGTYPE" in json.dumps(manager.health()))

            def worst_ms() -> float:
                for delay_ms in range(100, 600, 10):
                    cast.send(delay_ms=delay_ms)
                    client.publish(cast.store.keys.wake, "aaa")
                return lateness_ms(cast, 50)[-1]

            assert least(worst_ms, 500) < 500
            assert manager.health()["status"] == "ok"

    def test_leases_last_an_ack_timeout_longer_than_a_refusal_of_writes(
        self, own_server: EmbeddedServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Consumers could not renew them. One line of the log reports the outage."""
        ack_timeout_s = 1.0
        cast = Cast(own_server.url).declare(ack_timeout="1000")
        with Manager(own_server.url, move=NEVER):
            sent = cast.send()
            wait_until(cast.take)
            with failing_disk(own_server):
                time.sleep(3 * ack_timeout_s)
                ended = time.monotonic()
            wait_until(lambda: cast.state(sent) != "in_flight")
            assert time.monotonic() - ended >= ack_timeout_s
        assert len([one for one in caplog.records if "trying again" in one.message]) <= 2
        cast.store.close()

    def test_topics_are_declared_again_on_an_emptied_server(
        self, cast: Cast, redis_url: str, client: redis.Redis, caplog: pytest.LogCaptureFixture
    ) -> None:
        with Manager(redis_url, topics={"orders": {"group": "g", "max_ready": 5}}):
            client.flushall()
            wait_until(lambda: cast.store.drive(cast.store.options("orders")).max_ready == 5)
            wait_until(lambda: cast.store.drive(cast.store.groups("orders")) == ("g",))
            cast.send(delay_ms=50)
            assert len(cast.await_entries()) == 1
        assert caplog.text.count("has lost its messages") == 1

    def test_topics_are_declared_again_although_another_role_wrote_the_schema_first(
        self, cast: Cast, redis_url: str, client: redis.Redis, caplog: pytest.LogCaptureFixture
    ) -> None:
        with Manager(redis_url, topics={"orders": {"group": "g", "max_ready": 5}}):
            wait_until(lambda: client.hlen(cast.store.keys.managers) == 1)
            wait_until(lambda: cast.store.drive(cast.store.options("orders")).max_ready == 5)
            with client.pipeline(transaction=True) as together:
                together.flushall()
                together.set(cast.store.keys.schema, SCHEMA_VERSION)
                together.execute()
            wait_until(lambda: cast.store.drive(cast.store.options("orders")).max_ready == 5)
            wait_until(lambda: cast.store.drive(cast.store.groups("orders")) == ("g",))
        assert caplog.text.count("has lost its messages") == 1

    def test_a_group_that_was_removed_stays_so(self, cast: Cast, redis_url: str) -> None:
        from lisa.core.transitions.undeclare import Undeclare

        with Manager(redis_url, topics={"orders": {"groups": ["g", "h"]}}):
            cast.store.call(Undeclare("orders", "h", [], True))
            time.sleep(1.5)  # the manager has refreshed its topics by then
            assert cast.store.drive(cast.store.groups("orders")) == ("g",)
            cast.send(delay_ms=50)
            assert len(cast.await_entries()) == 1

    def test_a_newer_layout_is_refused_at_start(
        self, cast: Cast, redis_url: str, client: redis.Redis
    ) -> None:
        client.set(cast.store.keys.schema, "99")
        with pytest.raises(ConfigError, match="schema 99"):
            Manager(redis_url).start()

    def test_it_stops_without_waiting_for_a_search_of_all_keys(
        self, redis_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        searches, is_searching, ends = itertools.count(), threading.Event(), threading.Event()

        def search(_: object) -> None:
            if next(searches):  # not the one at the start
                is_searching.set()
                ends.wait(PATIENCE.total_seconds())

        monkeypatch.setattr("lisa.manager.engine.SEARCH", timedelta(milliseconds=100))
        monkeypatch.setattr("lisa.manager.registry.Registry.search", search)
        manager = Manager(redis_url).start()
        try:
            assert is_searching.wait(PATIENCE.total_seconds())
            stopping = threading.Thread(target=manager.stop)
            stopping.start()
            stopping.join(PATIENCE.total_seconds() / 2)
            assert not stopping.is_alive()
        finally:
            ends.set()
            manager.stop()

    def test_it_starts_once(self, redis_url: str) -> None:
        manager = Manager(redis_url)
        manager.start()
        manager.stop()
        manager.stop()
        with pytest.raises(LisaError, match="only once"):
            manager.start()

    def test_a_wrong_password_is_a_clear_error(self, own_server: EmbeddedServer) -> None:
        from tests.servers import connect

        with connect(own_server.url) as client:
            client.config_set("requirepass", "secret")
        try:
            with pytest.raises(ConfigError, match="password"):
                Manager(own_server.url).start()
            with pytest.raises(ConfigError, match="password"):
                Manager(own_server.url.replace("://", "://:wrong@")).start()
        finally:
            with connect(own_server.url.replace("://", "://:secret@")) as client:
                client.config_set("requirepass", "")


def daemon(processes: Processes, url: str, *options: str) -> Process:
    process = processes.start("-m", "lisa.cli.manager", "--redis", url, *options)
    process.wait_for("is reachable")
    return process


def health(port: int) -> tuple[int, dict[str, object]]:
    address = f"http://{HOST}:{port}/healthz"
    try:
        with urllib.request.urlopen(address, timeout=5) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


class TestDaemon:
    def test_sigterm_ends_it_quickly_with_exit_code_0(
        self, cast: Cast, redis_url: str, processes: Processes
    ) -> None:
        process = daemon(processes, redis_url)
        process.wait_for("runs on")
        began = time.monotonic()
        assert process.stop() == 0
        assert time.monotonic() - began < LEAVE_S / 2  # it waits for no thread until time is up
        assert "stopped" in process.output
        assert "Traceback" not in process.output
        assert cast.store.drive(presence.managers(cast.store)) == []

    def test_it_delivers_and_logs_json(
        self, cast: Cast, redis_url: str, processes: Processes
    ) -> None:
        process = daemon(processes, redis_url, "--log-format", "json")
        cast.declare()

        def worst_ms() -> float:
            for delay_ms in range(100, 600, 10):
                cast.send(delay_ms=delay_ms)
            late = lateness_ms(cast, 50)
            assert late[0] >= 0
            return late[-1]

        assert least(worst_ms, 500) < 500
        assert process.stop() == 0
        records = [json.loads(line) for line in process.output.splitlines()]
        assert {record["level"] for record in records} == {"info"}

    def test_sighup_reads_the_options_again(
        self, cast: Cast, redis_url: str, processes: Processes, tmp_path: Path
    ) -> None:
        file = tmp_path / "manager.yml"
        text = "lisa-delay-queue:\n  groups:\n    - {{topic: orders, group: g, max-length: {}}}\n"
        file.write_text(text.format(5), encoding="utf-8")
        process = daemon(processes, redis_url, "--config", str(file))
        process.wait_for("runs on")
        file.write_text(text.format(6), encoding="utf-8")
        process.signal(signal.SIGHUP)
        process.wait_for("reloaded: topic orders: max_ready 5 -> 6")
        wait_until(lambda: cast.store.drive(cast.store.options("orders")).max_ready == 6)
        file.write_text(text.format("many"), encoding="utf-8")
        process.signal(signal.SIGHUP)
        process.wait_for("the previous one stays active")
        assert cast.store.drive(cast.store.options("orders")).max_ready == 6
        file.write_text(text.format(6) + "    - {topic: mails, group: m}\n", encoding="utf-8")
        process.signal(signal.SIGHUP)
        process.wait_for("reloaded: topic mails: new")
        wait_until(lambda: cast.store.drive(cast.store.groups("mails")) == ("m",))
        file.write_text(text.format(6) + "  enabled: false\n  log-level: debug\n", encoding="utf-8")
        process.signal(signal.SIGHUP)
        process.wait_for("reloaded: enabled, log-level changed: restart to apply")
        assert process.stop() == 0

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_stopped_while_it_starts_it_exits_with_0(
        self, processes: Processes, tmp_path: Path, number: signal.Signals
    ) -> None:
        """As process 1 of a container it would not notice a signal without a handler."""
        (tmp_path / "slow.py").write_text("import time; print('importing'); time.sleep(60)")
        process = processes.start("-m", "lisa.cli.manager", "--handlers", "slow")
        process.wait_for("importing")
        process.signal(number)
        assert process.wait() == 0

    def test_sighup_while_it_starts_reads_the_file_again(
        self, redis_url: str, processes: Processes, tmp_path: Path
    ) -> None:
        (tmp_path / "slow.py").write_text(
            "import pathlib, time\n"
            "print('importing')\n"
            "while not pathlib.Path('go').exists(): time.sleep(0.01)\n"
        )
        process = processes.start(
            "-m", "lisa.cli.manager", "--redis", redis_url, "--handlers", "slow"
        )
        process.wait_for("importing")
        process.signal(signal.SIGHUP)
        (tmp_path / "go").touch()
        process.wait_for("reloaded: nothing changed")
        assert process.stop() == 0

    def test_healthz_while_the_server_starts_fails_and_returns(
        self, own_server: EmbeddedServer, processes: Processes
    ) -> None:
        port = free_port()
        cast = Cast(own_server.url)
        cast.declare()
        process = daemon(processes, own_server.url, "--http", f"{HOST}:{port}")
        wait_until(lambda: health(port)[0] == 200)
        _, report = health(port)
        assert report["status"] == "ok"
        own_server.kill()
        wait_until(lambda: health(port)[0] == 503)
        for _ in range(20):  # and stays
            status, report = health(port)
            assert (status, report["status"]) == (503, "failing")
            time.sleep(0.05)
        own_server.restart()
        wait_until(lambda: health(port)[0] == 200)
        assert process.stop() == 0
        assert process.output.count("trying again") == 1  # once per change of state

    def test_healthz_fails_while_the_server_refuses_writes(
        self, own_server: EmbeddedServer, processes: Processes
    ) -> None:
        port = free_port()
        process = daemon(processes, own_server.url, "--http", f"{HOST}:{port}")
        wait_until(lambda: health(port)[0] == 200)
        with failing_disk(own_server):
            wait_until(lambda: health(port)[0] == 503)
            assert "refuses writes" in json.dumps(health(port)[1]["redis"])
        wait_until(lambda: health(port)[0] == 200)
        assert process.stop() == 0
        assert process.output.count("trying again") == 1

    def test_receivers_in_handler_modules_get_the_manager_s_signals(
        self, cast: Cast, redis_url: str, processes: Processes, tmp_path: Path
    ) -> None:
        (tmp_path / "alarm.py").write_text(
            "from lisa.core.model.signals import message_dead\n"
            "@message_dead.connect_via('orders')\n"
            "def alarm(topic, *, message): print(f'dead: {message.id} {message.body}')\n",
            encoding="utf-8",
        )
        cast.declare(ack_timeout="100", retry_delays="")
        process = daemon(processes, redis_url, "--handlers", "alarm")
        message_id = new_id()
        cast.send({"order": 7}, message_id=message_id)
        wait_until(cast.take)
        process.wait_for(f"dead: {message_id} {{'order': 7}}")
        assert process.stop() == 0

    def test_disabled_is_reported_with_exit_code_0(
        self, processes: Processes, tmp_path: Path
    ) -> None:
        file = tmp_path / "manager.yml"
        file.write_text("lisa-delay-queue:\n  enabled: false\n", encoding="utf-8")
        process = processes.start("-m", "lisa.cli.manager", "--config", str(file))
        assert process.wait() == 0
        assert process.output.count("\n") == 1
        assert "enabled is false" in process.output

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (("--config", "none.yml"), "none.yml"),
            (("--redis", "http://x"), "redis://"),
            (("--http", "nowhere"), "HOST:PORT"),
            (("--handlers", "no_such_module"), "no_such_module"),
            (("--handlers", "../alarm.py"), "write pkg.module"),
            (("--prefix", "a{b"), "prefix"),
        ],
    )
    def test_a_wrong_configuration_is_one_line_and_exit_2(
        self, processes: Processes, arguments: tuple[str, ...], said: str
    ) -> None:
        process = processes.start("-m", "lisa.cli.manager", *arguments)
        assert process.wait() == 2
        assert process.output.count("\n") == 1
        assert said in process.output
