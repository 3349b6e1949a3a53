"""The outbox in Django projects."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, make_url

from lisa import Producer
from lisa.outbox import Outbox, Relay, Tables
from lisa.outbox.inbox_rows import ROLLED_BACK
from tests.outbox.conftest import Database
from tests.programs import python
from tests.servers import ROOT, Processes, wait_until

pytest.importorskip("django", reason="django is not installed")

SETTINGS = """
from pathlib import PosixPath
import pymysql
pymysql.install_as_MySQLdb()
SECRET_KEY = "of-tests"
USE_TZ = True
INSTALLED_APPS = ["lisa.django", "lisa.django.outbox"]
DATABASES = {{"default": {database!r}}}
LISA = {{"server": {server!r}}}
LISA_OUTBOX = {names!r}
"""
ENGINES = {"postgresql": "postgresql", "mariadb": "mysql", "sqlite": "sqlite3"}
OPTIONS = {
    "postgresql": {"sslmode": "prefer", "connect_timeout": 5},
    "mariadb": {"init_command": "SET sql_mode = 'STRICT_TRANS_TABLES'", "connect_timeout": 5},
    "sqlite": {"timeout": 20, "transaction_mode": "IMMEDIATE"},
}
NAMES = {"outbox": "shop_operations_to_forward", "inbox": "shop_deliveries_handled"}
TABLES = Tables(outbox=NAMES["outbox"], inbox=NAMES["inbox"])
START = """
import django
django.setup()
from django.db import transaction
from django.core.management import call_command
from lisa.django import outbox
"""
RELAY = ("-m", "django", "lisa_relay", "--", "--log-format", "json")
MIGRATE = "call_command('migrate', verbosity=0)\n"


class Project:
    """A project without a module of its own; `run` returns what is printed."""

    def __init__(self, folder: Path, database: Database, server: str) -> None:
        self._folder, self._server = folder, server
        url = make_url(database.url)
        self._database = {
            "ENGINE": f"django.db.backends.{ENGINES[database.kind]}",
            "NAME": Path(str(url.database)) if database.kind == "sqlite" else url.database,
            "USER": url.username or "",
            "PASSWORD": url.password or "",
            "HOST": url.host or "",
            "PORT": str(url.port or ""),
            "OPTIONS": OPTIONS[database.kind],
        }
        self.set(NAMES)

    def set(self, names: object) -> None:
        """Set LISA_OUTBOX."""
        told = SETTINGS.format(database=self._database, server=self._server, names=names)
        (self._folder / "shop_settings.py").write_text(told)

    @property
    def env(self) -> dict[str, str]:
        path = os.pathsep.join([str(self._folder), str(ROOT)])
        return {**os.environ, "DJANGO_SETTINGS_MODULE": "shop_settings", "PYTHONPATH": path}

    def run(self, code: str, *, check: bool = True) -> str:
        done = python("-c", START + code, env=self.env, check=check)
        said: str = done.stdout if check else done.stderr
        return said


@pytest.fixture
def project(tmp_path: Path, database: Database, redis_url: str) -> Project:
    return Project(tmp_path, database, redis_url)


def states(producer: Producer, said: str) -> dict[str, str | None]:
    """The states of messages, from lines of a name and an id."""
    found = dict[str, str | None]()
    for name, message_id in (line.split(" ") for line in said.splitlines()):
        status = producer.get("orders", message_id)
        found[name] = None if status is None else str(status.state)
    return found


OPERATIONS = """
def show(name, **options):
    print(name, outbox.send("orders", {"order": name}, delay="1h", **options))

show("alone")
with transaction.atomic():
    show("committed", key="42")
    try:
        with transaction.atomic():
            show("savepoint")
            raise LookupError
    except LookupError:
        pass
    show("cancelled", id="order-1")
    show("moved", id="order-2")
try:
    with transaction.atomic():
        show("rolled-back")
        outbox.cancel("orders", "order-2")
        raise LookupError
except LookupError:
    pass
with transaction.atomic():
    outbox.cancel("orders", "order-1")
    outbox.reschedule("orders", "order-2", delay="3h", using="default")
"""


def test_operations_are_those_of_committed_transactions(
    project: Project, engine: Engine, redis_url: str
) -> None:
    said = project.run(MIGRATE + OPERATIONS)
    relay = Relay(engine.url, redis_url, tables=TABLES)
    assert sum(iter(relay.step, 0)) == 6
    relay.stop()
    with Producer(redis_url) as producer:
        assert states(producer, said) == {
            "alone": "waiting",
            "committed": "waiting",
            "savepoint": None,
            "cancelled": "cancelled",
            "moved": "waiting",
            "rolled-back": None,
        }
        moved: Any = producer.get("orders", "order-2")
        alone: Any = producer.get("orders", said.split(maxsplit=2)[1])
        assert moved.due_ms - alone.due_ms > 3_600_000
        assert alone.body == {"order": "alone"}


def test_migrations_follow_the_setting(project: Project, engine: Engine) -> None:
    """The tables are those that an outbox without Django uses, and models match the migrations."""
    project.run(MIGRATE + "call_command('makemigrations', check=True)")
    with engine.begin() as connection:
        outbox = Outbox(tables=TABLES)
        outbox.send(connection, "orders", 42)
        connection.execute(TABLES.inbox.insert().values(digest=b"\xff" * 16, expires_ms=2**41))
        (row,) = connection.execute(TABLES.outbox.select()).all()
        assert (row.seq, row.try_ms, row.reason) == (1, 0, None)
    code = (
        "from lisa.django.outbox.models import *\n"
        "print(OutboxOperation.objects.get().topic, HandledDelivery.objects.get().digest.hex())"
    )
    assert project.run(code).split() == ["orders", "ff" * 16]


def test_the_command_runs_a_relay(
    project: Project, engine: Engine, redis_url: str, processes: Processes
) -> None:
    said = project.run(MIGRATE + "print('sent', outbox.send('orders', 42, delay='1h'))")
    relay = processes.start(*RELAY, env=project.env)
    first = relay.wait_for(f" {NAMES['outbox']} to ").splitlines()[0]
    assert json.loads(first)["level"] == "info", "options reach lisa-relay"
    with Producer(redis_url) as producer:
        wait_until(lambda: states(producer, said) == {"sent": "waiting"} or not relay.alive)
    relay.signal(signal.SIGTERM)
    assert relay.wait() == 0


DELIVERIES = """
import threading
from contextlib import nullcontext
from django.db import IntegrityError, connections
from lisa import Message, Retry
from lisa.consumer.handlers import on_message_sync
from lisa.consumer.inflight import Held
from lisa.django import consumer
from lisa.django.outbox.models import HandledDelivery, OutboxOperation

def deliver(message_id="a", **fields):
    message = Message(id=message_id, topic="orders", group="lisa", body=1, due_ms=1, **fields)
    plan = consumer._handlers.plan("orders", "lisa")
    return on_message_sync(plan, Held("1-1", message, b"", 0, 0.0, 0.0), None)

def show(outcome):
    said = "success" if outcome is None else outcome.reason.partition("(")[0]
    print(said, OutboxOperation.objects.count(), HandledDelivery.objects.count(), sep="|")
"""

HANDLED_ONCE = (
    DELIVERIES
    + """
def fail(error):
    raise error

def catch(inner=nullcontext):
    for _ in range(2):
        try:
            with inner():
                HandledDelivery.objects.create(digest=b"twice", expires_ms=2**41)
        except IntegrityError:
            pass

def is_rolled_back():
    connections["default"].cursor().execute("ROLLBACK")

acts = iter([lambda: fail(ValueError("no")), lambda: False, lambda: Retry("later"),
             lambda: fail(IntegrityError("own")), lambda: transaction.rollback(),
             catch, lambda: transaction.set_rollback(True), is_rolled_back,
             lambda: catch(transaction.atomic)])

@consumer.on("orders", once_in="default")
def handle(message):
    outbox.send("mails", message.id)
    return next(acts, lambda: None)()

HandledDelivery.objects.create(digest=b"expired", expires_ms=1)
for _ in range(10):
    show(deliver())
show(deliver(token="tokentok"))
show(deliver("b"))
"""
)


def test_the_effect_of_a_handler_happens_once(project: Project) -> None:
    assert project.run(MIGRATE + HANDLED_ONCE).splitlines() == [
        "ValueError: no|0|1",
        "the handler returned False|0|0",  # the expired row is gone
        "later|0|0",
        "IntegrityError: own|0|0",
        "TransactionManagementError: This is forbidden when an 'atomic' block is active.|0|0",
        *[f"ConfigError: {ROLLED_BACK}an inner atomic|0|0"] * 3,
        "success|1|2",
        "success|1|2",
        "success|2|3",
        "success|3|4",
    ]


AT_THE_SAME_TIME = (
    DELIVERIES
    + """
@consumer.on("orders", once_in="default")
def handle(message):
    calls.append(1)
    outbox.send("mails", message.id)
    began.set()
    assert go_on.wait(60)
    assert len(calls) > 1 or message.id == "succeeds"

def run(message_id):
    outcomes.append(deliver(message_id))
    connections.close_all()

for name in ("succeeds", "fails"):
    began, go_on, calls, outcomes = threading.Event(), threading.Event(), [], []
    first, second = (threading.Thread(target=run, args=[name], daemon=True) for _ in range(2))
    first.start()
    assert began.wait(60)
    second.start()
    second.join(0.2)
    assert len(calls) == 1 and second.is_alive()
    go_on.set()
    first.join()
    second.join()
    print(outcomes.count(None), len(calls), OutboxOperation.objects.count())
"""
)


def test_a_delivery_waits_for_another_one(project: Project) -> None:
    assert project.run(MIGRATE + AT_THE_SAME_TIME).splitlines() == ["2 1 1", "1 2 2"]


REFUSED = (
    DELIVERIES
    + """
import asyncio
from lisa import ConfigError

async def handle_async(message): ...
def handle(message): ...

consumer.on("orders", handle, once_in="default")
for handler, alias, options in (
    (handle_async, "default", {}),
    (handle, "other", {}),
    (handle, "default", {}),
    (handle, "default", {"batch": 9}),
    (handle, object(), {}),
):
    try:
        consumer.on("orders", handler, once_in=alias, **options)
    except ConfigError as error:
        print(error)
from django.apps import apps
apps.is_installed = lambda name: False
try:
    consumer.on("mails", handle, once_in="default")
except ConfigError as error:
    print(error)
"""
)


def test_handlers_that_cannot_have_a_transaction_are_refused(tmp_path: Path) -> None:
    database = Database("sqlite", f"sqlite:///{tmp_path / 'shop.db'}", "")
    said = Project(tmp_path, database, "redis://localhost").run(REFUSED).splitlines()
    expected = (
        "the handler __main__.handle_async is `async def`, and transactions of Django are not",
        "once_in='other' is none of DATABASES: default",
        "another handler has once_in= already",
        "a batch handler cannot have once_in=",
        "once_in=<object object",
        "once_in='default' needs the table of lisa.django.outbox; add the app to INSTALLED_APPS",
    )
    for line, wanted in zip(said, expected, strict=True):
        assert wanted in line


def test_mistakes_are_named(tmp_path: Path, redis_url: str) -> None:
    project = Project(
        tmp_path, Database("sqlite", f"sqlite:///{tmp_path / 'shop.db'}", ""), redis_url
    )
    project.set({"outbocks": "shop"})
    said = project.run("", check=False)
    assert "ConfigError: the setting LISA_OUTBOX is a dict of names of tables" in said
    project.set(NAMES)
    said = project.run("outbox.send('orders', object())", check=False)
    assert "InvalidMessage" in said
    missing = "import sys; sys.modules['sqlalchemy'] = None; from lisa.django import outbox"
    said = python("-c", missing, env=project.env, check=False).stderr
    assert "pip install 'lisa-delay-queue[sql]'" in said
