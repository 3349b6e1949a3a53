"""How operators run and see relays: `lisa-relay`, the relay of `lisa-manager`, `lisa outbox`."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from sqlalchemy import Engine, create_engine, select, update

from lisa import Producer
from lisa.cli.main import main
from lisa.core.store import presence
from lisa.embedded import EmbeddedServer
from lisa.embedded.server import free_port
from lisa.outbox import Outbox, Relay, Tables
from tests.exposition import Exposed
from tests.outbox.conftest import Database
from tests.servers import Processes, open_store, wait_until

TABLES = Tables()


@pytest.fixture
def shop(database: Database, engine: Engine) -> Engine:
    """A database with an empty outbox."""
    TABLES.metadata.create_all(engine)
    return engine


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Engine]:
    """A SQLite database with an empty outbox, for what does not differ by database."""
    engine = create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    TABLES.metadata.create_all(engine)
    yield engine
    engine.dispose()


def send(engine: Engine, *ids: str, topic: str = "orders") -> None:
    """Send messages in one transaction."""
    with engine.begin() as connection:
        for message_id in ids:
            Outbox().send(connection, topic, 1, id=message_id, delay="1h")


def set_aside(engine: Engine, message_id: str) -> None:
    """What a relay does with an operation that Redis can never take."""
    table = TABLES.outbox
    with engine.begin() as connection:
        first = select(table.c.seq).where(table.c.message_id == message_id).order_by("seq").limit(1)
        own = table.c.seq == connection.execute(first).scalar_one()
        connection.execute(update(table).where(own).values(try_ms=None, reason="refused"))


def rows(engine: Engine) -> list[tuple[str, str, int | None, str | None]]:
    """Each row: its message, operation, `try_ms` and reason."""
    table = TABLES.outbox
    columns = table.c.message_id, table.c.operation, table.c.try_ms, table.c.reason
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(select(*columns).order_by(table.c.seq))]


def is_known(redis_url: str, message_id: str) -> bool:
    with Producer(redis_url) as producer:
        return producer.get("orders", message_id) is not None


def lisa(*arguments: str, code: int = 0, stdin: str = "") -> str:
    done = CliRunner().invoke(main, arguments, input=stdin)
    assert done.exit_code == code, done.output
    return done.output


def health(http: str) -> dict[str, Any]:
    try:
        return dict(httpx.get(f"http://{http}/healthz").json())
    except httpx.TransportError:  # not started yet
        return {}


def test_a_relay_runs_until_sigterm(
    shop: Engine, database: Database, redis_url: str, processes: Processes
) -> None:
    http = f"127.0.0.1:{free_port()}"
    send(shop, "a", "b")
    process = processes.start(
        *("-m", "lisa.cli.relay", "--redis", redis_url, "--http", http),
        env={"LISA_RELAY__DATABASE": database.url},
    )
    wait_until(lambda: is_known(redis_url, "a") and is_known(redis_url, "b"))
    wait_until(lambda: health(http).get("status") == "ok")
    store = open_store(redis_url)
    wait_until(lambda: store.drive(presence.relays(store)))
    (record,) = store.drive(presence.relays(store))
    assert record.table.endswith(" lisa_outbox")
    assert "s3cret" not in record.table
    page = Exposed(httpx.get(f"http://{http}/metrics").text)
    done = page.value("lisa_relay_operations_total", operation="send", result="forwarded")
    assert (done, page.value("lisa_up")) == (2, 1)
    process.signal(signal.SIGTERM)
    assert process.wait() == 0, process.output
    assert "s3cret" not in process.output
    assert store.drive(presence.relays(store)) == []
    assert rows(shop) == []


def test_health_fails_while_the_database_fails(
    small: Engine, redis_url: str, processes: Processes, tmp_path: Path
) -> None:
    http, file = f"127.0.0.1:{free_port()}", tmp_path / "shop.db"
    database = f"sqlite:///{file}"
    options = ("--redis", redis_url, "--database", database, "--http", http)
    processes.start("-m", "lisa.cli.relay", *options)
    wait_until(lambda: health(http).get("status") == "ok")
    TABLES.metadata.drop_all(small)
    wait_until(lambda: health(http)["status"] == "failing")
    assert "no such table" in str(health(http)["error"])
    store = open_store(redis_url)
    wait_until(lambda: "no such table" in store.drive(presence.relays(store))[0].error)
    TABLES.metadata.create_all(small)
    wait_until(lambda: health(http)["status"] == "ok")


def test_while_redis_is_away_health_fails_and_the_backlog_is_counted(
    small: Engine, processes: Processes
) -> None:
    http = f"127.0.0.1:{free_port()}"

    def value(name: str) -> float | None:
        return Exposed(httpx.get(f"http://{http}/metrics").text).value(name)

    with EmbeddedServer() as server:
        options = ("--redis", server.url, "--database", str(small.url), "--http", http)
        processes.start("-m", "lisa.cli.relay", *options)
        wait_until(lambda: health(http).get("status") == "ok")
        server.kill()
        send(small, "a", "b")
        wait_until(lambda: health(http)["status"] == "failing")
        wait_until(lambda: value("lisa_relay_backlog_rows") == 2)
        assert value("lisa_up") == 0
        server.restart()
        wait_until(lambda: rows(small) == [])
        wait_until(lambda: health(http)["status"] == "ok")
        assert value("lisa_up") == 1


def test_a_manager_runs_a_relay_by_setting(
    small: Engine, redis_url: str, processes: Processes, tmp_path: Path
) -> None:
    http = f"127.0.0.1:{free_port()}"
    (tmp_path / "manager.yml").write_text(
        "lisa-delay-queue:\n  manager-server: {relay: true}\n"
        f"  relay: {{database: 'sqlite:///{tmp_path / 'shop.db'}'}}\n"
    )
    send(small, "a")
    process = processes.start(
        *("-m", "lisa.cli.manager", "--config", "manager.yml", "--redis", redis_url),
        *("--http", http),
    )
    wait_until(lambda: is_known(redis_url, "a"))
    wait_until(lambda: health(http).get("relay", {}).get("status") == "ok")
    page = Exposed(httpx.get(f"http://{http}/metrics").text)
    done = page.value("lisa_relay_operations_total", operation="send", result="forwarded")
    assert (done, page.value("lisa_up"), page.value("lisa_managers_alive")) == (1, 1, 1)
    process.signal(signal.SIGTERM)
    assert process.wait() == 0, process.output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "no database: give --database"),
        (("--database", "nonsense"), "not a URL such as"),
        (("--database", "oracle://x/y"), "no driver for the database oracle"),
        (("--database", "sqlite:///x.db", "--notify"), "notify needs PostgreSQL"),
    ],
)
def test_wrong_options_are_one_line(
    redis_url: str, processes: Processes, options: tuple[str, ...], said: str
) -> None:
    process = processes.start("-m", "lisa.cli.relay", "--redis", redis_url, *options)
    assert process.wait() == 2
    assert process.output.count("\n") == 1
    assert said in process.output


def test_a_password_among_the_options_raises_a_warning(
    redis_url: str, processes: Processes
) -> None:
    database = "oracle://u:hunter2@h/x"
    process = processes.start("-m", "lisa.cli.relay", "--redis", redis_url, "--database", database)
    assert process.wait() == 2
    assert "can read the password in --database" in process.output
    assert "hunter2" not in process.output


Ask = Callable[..., Any]


@pytest.fixture
def ask(database: Database, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Runs `lisa outbox` on the database; the JSON that it prints."""
    monkeypatch.setenv("LISA_RELAY__DATABASE", database.url)

    def run(*arguments: str, code: int = 0) -> Any:
        done = CliRunner().invoke(main, ["outbox", *arguments, "--json"])
        assert done.exit_code == code, done.output
        return json.loads(done.stdout)

    return run


def test_rows_set_aside_are_listed_and_retried_or_discarded(
    shop: Engine, redis_url: str, ask: Ask
) -> None:
    send(shop, "bad", "good", "bad", "worse")
    with shop.begin() as connection:
        Outbox().cancel(connection, "orders", "bad")
    set_aside(shop, "bad")
    set_aside(shop, "worse")
    found = ask("list")
    named = [(row["operation"], row["message_id"], row["behind"], row["reason"]) for row in found]
    assert named == [("send", "bad", 2, "refused"), ("send", "worse", 0, "refused")]
    assert all(0 <= row["age_ms"] < 3_600_000 for row in found)
    assert len(ask("list", "--limit", "1")) == 1
    counted = ask("count")
    assert (counted["rows"], counted["set_aside"]) == (3, 2)
    said = lisa("outbox", "list")
    assert "refused" in said
    assert "worse" in said
    bad, worse = (row["seq"] for row in found)
    assert ask("discard", str(bad), "--yes") == {"discarded": 1, "not_set_aside": []}
    again = [("good", "s", 0, None), ("bad", "s", 0, None), ("worse", "s", None, "refused")]
    assert rows(shop) == [*again, ("bad", "c", 0, None)]
    assert ask("retry", str(worse), "999", code=1) == {"retried": 1, "not_set_aside": [999]}
    assert ask("list") == []
    relay = Relay(shop.url, redis_url)
    wait_until(lambda: relay.step() == 0 and rows(shop) == [])
    relay.stop()
    assert is_known(redis_url, "good")
    assert is_known(redis_url, "worse")


def test_all_rows_set_aside_are_retried_or_discarded(shop: Engine, ask: Ask) -> None:
    ids = [f"m{number}" for number in range(1_200)]
    send(shop, *ids, "good")
    table = TABLES.outbox
    bad = update(table).where(table.c.message_id != "good").values(try_ms=None, reason="refused")
    with shop.begin() as connection:
        connection.execute(bad)
    assert ask("retry", "--all") == {"retried": 1_200, "not_set_aside": []}
    assert {row[2:] for row in rows(shop)} == {(0, None)}
    with shop.begin() as connection:
        connection.execute(bad)
    assert ask("discard", "--all", "--yes") == {"discarded": 1_200, "not_set_aside": []}
    assert rows(shop) == [("good", "s", 0, None)]


def test_what_lisa_outbox_refuses(small: Engine, tmp_path: Path) -> None:
    url = str(small.url)
    assert "give either SEQ or --all" in lisa("outbox", "retry", "--database", url, code=2)
    assert "give either SEQ or --all" in lisa(
        "outbox", "discard", "1", "--all", "--database", url, code=2
    )
    lisa("outbox", "discard", "1", "--database", url, code=1, stdin="n\n")
    assert "no database: give --database" in lisa("outbox", "list", code=2)
    missing = f"sqlite:///{tmp_path / 'other.db'}"
    assert "no such table" in lisa("outbox", "count", "--database", missing, code=3)


def test_the_age_of_the_backlog_leaves_out_rows_set_aside(small: Engine, ask_small: Ask) -> None:
    send(small, "old", "new")
    table = TABLES.outbox
    with small.begin() as connection:
        connection.execute(update(table).where(table.c.message_id == "old").values(created_ms=0))
    assert ask_small("count")["age_s"] > 1_000_000
    set_aside(small, "old")
    assert ask_small("count")["age_s"] < 3_600


@pytest.fixture
def ask_small(small: Engine, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """As `ask`, on `small`."""
    monkeypatch.setenv("LISA_RELAY__DATABASE", str(small.url))
    return lambda *arguments: json.loads(lisa("outbox", *arguments, "--json"))


def test_relays_are_listed_and_judged_by_the_doctor(redis_url: str) -> None:
    store = open_store(redis_url)

    def checks() -> list[dict[str, Any]]:
        done = CliRunner().invoke(main, ["doctor", "--redis", redis_url, "--json"])
        return [one for one in json.loads(done.stdout)["checks"] if one["check"] == "relays"]

    def announce(**about: Any) -> None:
        record = presence.RelayPresence(name="r", table="sqlite:///x lisa_outbox", **about)
        store.drive(presence.announce_relay(store, record))

    assert checks() == []
    announce(backlog=3)
    (check,) = checks()
    assert (check["verdict"], check["found"]) == ("ok", "1 alive")
    announce(backlog=3, age_ms=90_000, set_aside=2)
    (check,) = checks()
    assert check["verdict"] == "warn"
    assert check["found"] == (
        "sqlite:///x lisa_outbox: Relay is behind: 3 rows wait, the oldest for 1m 30s; "
        "sqlite:///x lisa_outbox: Rows set aside: 2; see lisa outbox list"
    )
    (record,) = json.loads(lisa("relays", "--redis", redis_url, "--json"))
    assert (record["name"], record["alive"], record["set_aside"]) == ("r", True, 2)
    assert "1m 30s" in lisa("relays", "--redis", redis_url)
