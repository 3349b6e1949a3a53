"""Sends and tasks that wait for the commit of `atomic()`."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

from lisa import InvalidMessage, Middleware, SendCall
from lisa.testing import RecordingProducer

pytest.importorskip("django", reason="django is not installed")

import django
from django.conf import settings
from django.db import connections, transaction
from django.http import HttpResponse
from django.test import Client, TestCase
from django.urls import path

DATABASE = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:", "ATOMIC_REQUESTS": True}
settings.configure(
    ALLOWED_HOSTS=["testserver"],
    DATABASES={"default": DATABASE, "other": DATABASE},
    INSTALLED_APPS=["lisa.django"],
    LOGGING_CONFIG=None,
    ROOT_URLCONF=__name__,
    TASKS={
        "default": {"BACKEND": "lisa.django.tasks.LisaBackend"},
        "now": {"BACKEND": "lisa.django.tasks.LisaBackend", "OPTIONS": {"on_commit": False}},
    },
    USE_TZ=True,
)
django.setup()

tasks: Any = import_module("lisa.django.tasks")  # which reads the settings


def greet(name: str) -> None:
    """A task."""


GREET: Any = tasks.Task(func=greet)


@pytest.fixture(autouse=True)
def producer(monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordingProducer]:
    """In the place of `lisa.django.producer`."""
    producer = RecordingProducer(middleware=[Refuses()])
    for module in ("lisa.django", "lisa.django.tasks"):
        monkeypatch.setattr(f"{module}.producer", producer, raising=False)
    yield producer
    for each in connections.all():  # Django keeps databases in memory open
        if each.connection is not None:
            each.connection.close()
            each.connection = None


class Refuses(Middleware):
    """Refuses the body "bad" when it is sent."""

    def send(self, call: SendCall, call_next: Any) -> Any:
        if call.bodies == ["bad"]:
            raise OSError("no")
        return call_next(call)


def bodies(producer: RecordingProducer) -> list[Any]:
    return [message.body for message in producer.sent]


def test_calls_are_made_after_the_commit(producer: RecordingProducer) -> None:
    with transaction.atomic():
        calls = producer.on_commit()
        sent = calls.send("orders", {"order": 1}, delay="30m")
        other = calls.send("orders", 2)
        calls.reschedule("orders", sent, delay="1h")
        calls.cancel("orders", other)
        with pytest.raises(InvalidMessage):
            calls.send("orders", object())
        assert producer.sent == []
    assert [(one.id, str(one.delay)) for one in producer.sent] == [
        (sent, "1:00:00"),
        (other, "0:00:00"),
    ]
    assert [one.id for one in producer.cancelled] == [other]


def test_rollbacks_and_savepoints(producer: RecordingProducer) -> None:
    calls = producer.on_commit()
    with pytest.raises(KeyError):
        roll_back(calls, 0)
    with transaction.atomic():
        with transaction.atomic():
            calls.send("orders", 1)
        with pytest.raises(KeyError):
            roll_back(calls, 2)
        calls.send("orders", 3)
    assert bodies(producer) == [1, 3]
    calls.send("orders", 4)
    assert bodies(producer) == [1, 3, 4], "at once outside a transaction"


def roll_back(calls: Any, body: object) -> None:
    with transaction.atomic():
        calls.send("orders", body)
        with transaction.atomic():
            calls.send("orders", body)
        raise KeyError


def test_the_database_is_chosen(producer: RecordingProducer) -> None:
    block = transaction.atomic("other")
    with block, transaction.atomic():
        producer.on_commit(block).send("orders", 1)
        producer.on_commit("other").send("orders", 2)
        with transaction.atomic():
            producer.on_commit(None).send("orders", 3)
        assert producer.sent == []
    assert bodies(producer) == [3, 1, 2], "the inner block commits first"


def test_an_error_after_the_commit(producer: RecordingProducer) -> None:
    with pytest.raises(OSError, match="no") as caught, transaction.atomic():
        producer.on_commit().send("orders", "bad", id="a")
    assert caught.value.__notes__ == [
        "The transaction is committed. Calls that failed: send orders a"
    ]


def test_a_request_in_a_transaction(producer: RecordingProducer) -> None:
    client = Client(raise_request_exception=False)
    assert client.get("/good").content == b"0"
    assert bodies(producer) == [1]
    assert client.get("/bad").status_code == 500
    assert bodies(producer) == [1]


def view(request: Any, name: str) -> HttpResponse:
    from lisa.django import producer

    producer.on_commit().send("orders", 1)
    if name == "bad":
        raise KeyError(name)
    recorded: Any = producer
    return HttpResponse(len(recorded.sent))


urlpatterns = [path("<name>", view)]


class InTestCase(TestCase):  # type: ignore[misc]
    def test_callbacks_can_be_captured(self) -> None:
        producer = RecordingProducer()
        with self.captureOnCommitCallbacks(execute=True):
            producer.on_commit().send("orders", 1)
            assert producer.sent == []
        assert bodies(producer) == [1]


@pytest.fixture
def announced() -> Iterator[list[Any]]:
    """The results of `task_enqueued`."""
    found: list[Any] = []

    def receive(task_result: Any, **_: object) -> None:
        found.append(task_result)

    tasks.task_enqueued.connect(receive)
    yield found
    tasks.task_enqueued.disconnect(receive)


def test_tasks_are_enqueued_after_the_commit(
    producer: RecordingProducer, announced: list[Any]
) -> None:
    with transaction.atomic():
        result = GREET.enqueue("a")
        assert result.id
        assert (producer.sent, announced, result.enqueued_at) == ([], [], None)
    assert [message.id for message in producer.sent] == [result.id]
    assert announced == [result]
    assert result.enqueued_at is not None
    assert GREET.get_backend().cancel(result)


def test_tasks_of_a_transaction_that_is_rolled_back_are_dropped(
    producer: RecordingProducer, announced: list[Any]
) -> None:
    with transaction.atomic():
        with pytest.raises(KeyError):
            enqueue_and_fail()
        GREET.enqueue("kept")
    assert [one.body["args"] for one in producer.sent] == [["kept"]]
    assert len(announced) == 1


def enqueue_and_fail() -> None:
    with transaction.atomic():
        GREET.enqueue("dropped")
        raise KeyError


def test_tasks_that_are_enqueued_at_once(producer: RecordingProducer, announced: list[Any]) -> None:
    """Outside a transaction, without a connection of the database; and by the option."""
    GREET.enqueue("a")
    assert connections["default"].connection is None
    with transaction.atomic():
        GREET.using(backend="now").enqueue("b")
        assert [one.body["args"] for one in producer.sent] == [["a"], ["b"]]
        assert len(announced) == 2
