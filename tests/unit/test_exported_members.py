"""The public names of `lisa`, and the cost of `import lisa`."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import lisa

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent.parent


def test_all_is_sorted_and_complete() -> None:
    assert list(lisa.__all__) == sorted(lisa.__all__)
    assert len(set(lisa.__all__)) == len(lisa.__all__)
    assert set(lisa.__all__) <= set(dir(lisa))


@pytest.mark.parametrize("name", lisa.__all__)
def test_each_name_exists_and_remains_the_same_object(name: str) -> None:
    assert getattr(lisa, name) is getattr(lisa, name)


@pytest.mark.parametrize("module", ["lisa.producer", "lisa.manager", "lisa.consumer"])
def test_every_exported_name_exists(module: str) -> None:
    package = importlib.import_module(module)
    names = list(package.__all__)
    assert names == sorted(names)
    assert all(hasattr(package, name) for name in names)


def test_names_from_the_design() -> None:
    for name in (
        "Producer",
        "AsyncProducer",
        "Manager",
        "Consumer",
        "Message",
        "Retry",
        "Discard",
        "LisaError",
        "InvalidMessage",
        "DuplicateMessage",
        "TopicFull",
        "ServerUnavailable",
        "ConfigError",
        "message_received",
        "message_acked",
        "message_retrying",
        "message_dead",
        "message_expired",
    ):
        assert name in lisa.__all__


INSIDE = {
    *("BaseMiddleware", "Body_co", "ConsumerSettings", "Delivered", "Numbers", "SignalSender"),
    *("Store", "Verdict"),
}
"""A type variable, and types that only Lisa itself passes or uses."""


def annotated(name: str) -> Iterator[str]:
    """What annotates a public function, or the public methods and constructor of a class."""
    value = getattr(lisa, name)
    functions = [value] if inspect.isfunction(value) else []
    if inspect.isclass(value) and not issubclass(value, BaseException):
        functions = [
            found
            for member, found in inspect.getmembers(value, inspect.isroutine)
            if inspect.isfunction(found) and (member == "__init__" or not member.startswith("_"))
        ]
    for function in functions:
        signature = inspect.signature(function)
        yield str(signature.return_annotation)
        yield from (str(one.annotation) for one in signature.parameters.values())


def lisas_names() -> set[str]:
    """The names of all classes and aliases of Lisa's modules."""
    sources = [path.read_text("utf-8") for path in (ROOT / "lisa").rglob("*.py")]
    return {
        name
        for source in sources
        for name in re.findall(r"^(?:class )?([A-Z]\w*[a-z]\w*)(?:\(|:| = )", source, re.MULTILINE)
    }


def test_types_that_users_annotate_with_are_exported() -> None:
    used = {
        word
        for name in lisa.__all__
        for text in annotated(name)
        for word in re.findall(r"[A-Z]\w*", text)
    }
    assert {"Message", "SendReport", "AsyncDelivery", "Address", "Lifespan"} <= used
    assert (used & lisas_names()) - INSIDE - set(lisa.__all__) == set()


def test_a_client_without_a_manager_exports_what_it_has(tmp_path: Path) -> None:
    """`from lisa import *` loads every name, so `__all__` must not name a missing one."""
    (tmp_path / "lisa").mkdir()
    for one in (ROOT / "lisa").iterdir():
        if one.name not in ("manager", "testing", "gateway", "embedded"):
            (tmp_path / "lisa" / one.name).symlink_to(one)
    (tmp_path / "program.py").write_text(
        "from lisa import *\nprint(send.__name__, 'Manager' in globals())\n"
        "try:\n    import lisa; lisa.Manager\n"
        "except ModuleNotFoundError as error:\n    print(error)\n"
    )
    found = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.splitlines() == [
        "send False",
        "lisa.manager is not part of lisa-delay-queue-client: pip install lisa-delay-queue",
    ]


def test_errors_are_one_family() -> None:
    names = ["InvalidMessage", "DuplicateMessage", "TopicFull", "ServerUnavailable", "ConfigError"]
    for name in [*names, "GroupRemoved"]:
        assert issubclass(getattr(lisa, name), lisa.LisaError)
    assert issubclass(lisa.InvalidMessage, ValueError)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Prodcuer"):
        _ = lisa.Prodcuer
    with pytest.raises(ImportError, match="Prodcuer"):
        importlib.import_module("lisa.Prodcuer")


def test_help_names_options_and_results() -> None:
    shown = {
        name: inspect.signature(getattr(lisa, name)) for name in ("send", "send_many", "cancel")
    }
    assert next(iter(shown["send"].parameters)) == "topic"
    assert "delay" in shown["send"].parameters
    assert [one.return_annotation for one in shown.values()] == ["str", "SendReport", "Cancelled"]
    assert inspect.signature(lisa.AsyncProducer.send).return_annotation == "str"
    assert inspect.iscoroutinefunction(lisa.AsyncProducer.send)
    assert "milliseconds" in (lisa.send.__doc__ or "")


def test_importing_lisa_loads_nothing_heavy() -> None:
    code = "import sys, lisa; print(*sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    heavy = {"redis", "apscheduler", "pydantic", "blinker", "msgspec", "yaml", "asyncio"}
    assert not heavy & set(found.stdout.split())


public: Any = lisa
"""Without types, to make mistakes."""


def on_a_loop(call: Callable[[Any], Coroutine[Any, Any, object]]) -> object:
    return asyncio.run(call(public.AsyncProducer()))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: public.Producer().send("a", 1, dealy="1s"), "Producer.send() got an unexpected"),
        (lambda: public.Producer().cancel("a"), "Producer.cancel() missing 1 required"),
        (lambda: on_a_loop(lambda one: one.send("a")), "AsyncProducer.send() missing 1"),
        (lambda: public.Producer(prefx="x"), "Producer.__init__() got an unexpected"),
        (lambda: public.AsyncProducer(prefx="x"), "AsyncProducer.__init__() got an unexpected"),
        (lambda: public.Consumer(patience="1s"), "Consumer.__init__() got an unexpected"),
        (lambda: public.AsyncConsumer(patience="1s"), "AsyncConsumer.__init__() got an unexpected"),
        (lambda: public.AsyncConsumer().health("a"), "AsyncConsumer.health() takes 1 positional"),
        (lambda: public.Consumer().on("a", gruop="g"), "Consumer.on() got an unexpected"),
        (lambda: public.AsyncConsumer().on("a", gruop="g"), "AsyncConsumer.on() got an unexpected"),
        (
            lambda: public.Consumer().subscribe("a", print, gruop="g"),
            "Consumer.on() got an unexpected",
        ),
        (
            lambda: list(public.Producer().send_stream("a", [1], dealy="1s")),
            "a send got an unexpected keyword argument 'dealy'; its options are at, at_local, ",
        ),
    ],
)
def test_errors_about_arguments_name_the_public_call(call: Callable[[], object], said: str) -> None:
    with pytest.raises(TypeError) as caught:
        call()
    assert str(caught.value).startswith(said)


def test_a_class_derived_from_a_consumer_may_change_its_methods() -> None:
    class Named:
        health = property(lambda _: "well")

    class Derived(Named, lisa.Consumer):
        def topics(self) -> list[str]:
            return [*super().topics(), "more"]

    derived: Any = Derived
    consumer = derived("redis://localhost")
    assert (consumer.health, consumer.topics()) == ("well", ["more"])
    with pytest.raises(TypeError, match=r"^Derived.__init__\(\) got an unexpected"):
        derived(prefx="x")


def test_the_constructors_keep_their_signature() -> None:
    for one in (lisa.Producer, lisa.AsyncProducer):
        names = list(inspect.signature(one).parameters)
        assert names == ["server", "prefix", "zone", "patience", "durability", "middleware"]
    for other in (lisa.Consumer, lisa.AsyncConsumer):
        names = list(inspect.signature(other).parameters)
        assert names[:5] == ["server", "group", "name", "concurrency", "prefix"]
