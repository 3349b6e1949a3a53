"""Every demo runs as described in its README, also those of web frameworks and Django."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from lisa import Manager, Producer
from lisa.outbox import Relay
from tests.gateways import Gateway, state
from tests.generators import generator
from tests.programs import python, run
from tests.servers import ROOT, Processes, connect, wait_until

DEMOS = ROOT / "demos"


@pytest.fixture(autouse=True)
def environment(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demos use the tests' server, and Django a database of its own."""
    monkeypatch.setenv("LISA_REDIS_URL", redis_url)
    monkeypatch.setenv("SHOP_DATABASE", str(tmp_path / "shop.sqlite3"))


def test_every_demo_has_a_readme_and_is_listed() -> None:
    listed = set(re.findall(r"\]\((\w+)/\)", (DEMOS / "README.md").read_text()))
    folders = {path.name for path in DEMOS.iterdir() if path.is_dir()}
    assert listed == folders
    assert all((DEMOS / name / "README.md").is_file() for name in folders)


@pytest.mark.full
def test_manager_producer_and_consumer(redis_url: str, processes: Processes) -> None:
    env = {"LISA_REDIS_URL": redis_url}
    manager = str(DEMOS / "manager" / "manager.yml")
    processes.start("-m", "lisa.cli.manager", "--config", manager, env=env)
    command = ("-m", "lisa.cli.consumer", "--config", "consumer.yml", "handlers")
    consumer = processes.start(*command, env=env, cwd=DEMOS / "consumer")
    for arguments in (["hello"], ["later", "--delay", "1"]):
        python(DEMOS / "producer" / "produce.py", *arguments)
        consumer.wait_for(f"mystream: {arguments[0]!r}")


@pytest.mark.full
def test_programs_in_one_process() -> None:
    said = python(DEMOS / "producer_and_manager" / "main.py").stdout
    assert [line.split()[1] for line in said.splitlines()] == ["ready"] * 3
    said = python(DEMOS / "order_timeout" / "main.py").stdout
    cancelled = re.findall(r"order (\d): not paid", said)
    assert (sorted(cancelled), cancelled[-1]) == (["1", "3", "5"], "5")
    assert "order 2: paid, time-out cancelled" in said
    assert "garbage: {'ordr': 6}" in said


def test_lisa_demo_counts_what_the_handlers_saw() -> None:
    options = ("--messages", "2000", "--seconds", "2", "--json")
    figures = json.loads(python("-m", "lisa.cli.main", "demo", *options).stdout)
    assert figures["sent"] == 2000
    assert figures["early"] == figures["lost"] == figures["handled_after_cancel"] == 0
    assert figures["handled"] + figures["cancelled"] + figures["garbage"] == 2000
    assert min(figures[name] for name in ("cancelled", "rescheduled", "retried", "garbage")) > 0


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_a_tour_of_the_http_api(redis_url: str) -> None:
    with Manager(redis_url), Gateway(redis_url) as gateway:
        done = run(DEMOS / "http" / "tour.sh", gateway.url)
    codes = "201 200 200 200 200 200 200 200 200 201 200 400 200"
    assert re.findall(r"\((\d+)\)", done.stdout) == codes.split()
    outcomes = "accepted duplicate rescheduled retrying acked accepted cancelled"
    assert re.findall(r'"outcome":"(\w+)"', done.stdout) == outcomes.split()
    assert "delay_ms: not a duration" in done.stdout
    assert '"acked":1' in done.stdout


def test_fastapi(redis_url: str, processes: Processes, tmp_path: Path) -> None:
    """A paid order has no timer any more; an unpaid one is cancelled by it."""
    testing = pytest.importorskip("fastapi.testclient", reason="fastapi is not installed")
    database = tmp_path / "shop.sqlite3"
    env = {"LISA_REDIS_URL": redis_url, "SHOP_DATABASE": str(database)}
    app = generator("shop", DEMOS / "fastapi").app
    with testing.TestClient(app) as client, Producer(redis_url) as producer, Manager(redis_url):

        def post(path: str) -> str:
            return str(client.post(path).json()["order"])

        with Relay(f"sqlite:///{database}", redis_url):
            processes.start("-m", "lisa.cli.consumer", "handlers", env=env, cwd=DEMOS / "fastapi")
            paths = ["/orders/42"] * 2 + ["/orders/42/payment"] * 2 + ["/orders/43"]
            assert [post(path) for path in paths] == ["new", "new", "paid", "paid", "new"]
            wait_until(lambda: state(producer, "orders", "order-42") == "cancelled")
            wait_until(
                lambda: producer.reschedule("orders", "order-43", delay="0s") == "rescheduled"
            )
            wait_until(lambda: state(producer, "orders", "order-43") == "acked")
        assert post("/orders/43/payment") == "cancelled"


def test_flask() -> None:
    """Place an order twice and pay it twice."""
    pytest.importorskip("flask", reason="flask is not installed")
    shop = generator("shop", DEMOS / "flask")
    paths = ["/orders/42"] * 2 + ["/orders/42/payment"] * 2
    with shop.producer:
        said = [shop.app.test_client().post(path).get_json()["timeout"] for path in paths]
    assert said == ["accepted", "duplicate", "cancelled", "cancelled"]


def manage(*words: str, check: bool = True) -> Any:
    """Run a command of the Django project to its end."""
    return python("manage.py", *words, cwd=DEMOS / "django", check=check)


def shell(code: str) -> str:
    """Run a line of Python in the project; its last line of output."""
    code = f"from shop.models import Order; from shop import tasks; {code}"
    said: str = manage("shell", "-v", "0", "-c", code).stdout
    return said.splitlines()[-1]


def test_django_handlers_and_tasks(redis_url: str, processes: Processes, tmp_path: Path) -> None:
    """The project is found from any directory, as by a service whose unit names none."""
    pytest.importorskip("django", reason="django is not installed")
    manage("migrate", "--run-syncdb", "-v", "0")
    with Manager(redis_url), Producer(redis_url) as producer, connect(redis_url) as raw:
        args: dict[str, Any] = {"args": [], "kwargs": {}}
        bad = [
            producer.send("tasks.default", {"task": task, **args}, retry="0s")
            for task in ("os.getcwd", "shop.tasks.of_the_next_version")
        ]
        relay = (str(DEMOS / "django" / "manage.py"), "lisa_relay")
        processes.start(*relay, env={"LISA_REDIS_URL": redis_url}, cwd=tmp_path)
        consume = (str(DEMOS / "django" / "manage.py"), "lisa_consumer", "--", "--processes", "2")
        workers = processes.start(*consume, env={"LISA_REDIS_URL": redis_url}, cwd=tmp_path)
        unpaid, paid, later, *said = shell(
            "a = Order.place(minutes=0.05); b = Order.place(minutes=600); b.pay();"
            "from datetime import timedelta; from django.utils import timezone;"
            "task = tasks.send_apology.using(run_after=timezone.now() + timedelta(days=1));"
            "result = task.enqueue(1);"
            "print(a.pk, b.pk, result.id, result.status, task.get_backend().cancel(result))"
        ).split()
        assert said == ["READY", "True"]
        assert state(producer, "tasks.default", later) == "cancelled"
        wait_until(lambda: raw.hget("lisa:{tasks.default}:stats", "acked@lisa"))
        states = f"print([Order.objects.get(pk=pk).state for pk in ({unpaid}, {paid})])"
        assert shell(states) == "['apology', 'paid']", "handler, then the task it enqueued"
        wait_until(lambda: state(producer, "order-timeouts", f"order-{paid}") == "cancelled")
        reasons = ("is not a task of this worker", "has no task shop.tasks.of_the_next_version")
        where = "tasks.default"
        wait_until(lambda: [state(producer, where, one) for one in bad] == ["garbage"] * 2)
        for one, reason in zip(bad, reasons, strict=True):
            found = producer.get("tasks.default", one)
            assert found is not None
            assert found.attempts == 2, "another worker may have the task"
            assert reason in (found.reason or "")
        assert "a receiver of message" not in workers.output


@pytest.mark.full
def test_django_names_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("django", reason="django is not installed")
    for options, error in (
        (["--", "--nosuch"], "No such option"),
        (["shop"], "unexpected extra argument (shop)"),
    ):
        failed = manage("lisa_consumer", *options, check=False)
        assert failed.returncode == 2
        assert failed.stderr.startswith("Usage: lisa-consumer [OPTIONS] [TARGET]\n")
        assert error in failed.stderr
    # Without names of queues, Django accepts tasks for any, which no consumer would read.
    backend = "from lisa.django.tasks import *; LisaBackend('default', {'QUEUES': []})"
    failed = manage("shell", "-v", "0", "-c", backend, check=False)
    assert "TASKS['default']: QUEUES is empty; name the queues" in failed.stderr
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "wrong")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    for setting, words in (
        ("{'sever': 'redis://db'}", "the setting LISA has no key 'sever'; its keys are server,"),
        ("'redis://db:6379/0'", "the setting LISA is a dict, as in {'server': "),
    ):
        (tmp_path / "wrong.py").write_text(f"from shop.settings import *\nLISA = {setting}\n")
        use = "from lisa.django import producer"
        failed = manage("shell", "-v", "0", "-c", use, check=False)
        assert words in failed.stderr.splitlines()[-1]
