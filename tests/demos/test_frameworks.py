"""The demos for web frameworks run: FastAPI, Flask, Django with its tasks."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lisa import Manager, Producer
from tests.servers import connect, wait_until

if TYPE_CHECKING:
    from types import ModuleType

    from tests.servers import Processes

DEMOS = Path(__file__).parent.parent.parent / "demos"


def load(name: str) -> ModuleType:
    """A demo's module, under a name of its own."""
    found = importlib.util.spec_from_file_location(f"demo_{name}", DEMOS / name / "shop.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module
    found.loader.exec_module(module)
    return module


def place_and_pay(client: Any) -> None:
    """Place an order twice and pay it twice, over HTTP."""
    paths = ["/orders/42"] * 2 + ["/orders/42/payment"] * 2
    said = [client.post(path).get_json() for path in paths]
    assert [one["timeout"] for one in said] == ["accepted", "duplicate", "cancelled", "cancelled"]


def test_fastapi(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    testing = pytest.importorskip("fastapi.testclient", reason="fastapi is not installed")
    monkeypatch.setenv("LISA_REDIS_URL", redis_url)
    monkeypatch.setattr("httpx.Response.get_json", lambda said: said.json(), raising=False)
    with testing.TestClient(load("fastapi").app) as client:
        place_and_pay(client)


def test_flask(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flask", reason="flask is not installed")
    monkeypatch.setenv("LISA_REDIS_URL", redis_url)
    shop = load("flask")
    with shop.producer:
        place_and_pay(shop.app.test_client())


class Shop:
    """The Django project, with a database of its own."""

    def __init__(self, url: str, directory: Path, processes: Processes) -> None:
        self.env = {"LISA_REDIS_URL": url, "SHOP_DATABASE": str(directory / "shop.sqlite3")}
        self._processes = processes

    def manage(self, *words: str) -> str:
        """Run a command of the project to its end."""
        done = subprocess.run(
            [sys.executable, "manage.py", *words],
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
            cwd=DEMOS / "django",
            env={**os.environ, **self.env},
        )
        return done.stdout.strip()

    def shell(self, code: str) -> str:
        """Run a line of Python in the project."""
        code = f"from shop.models import Order; from shop import tasks; {code}"
        return self.manage("shell", "-v", "0", "-c", code).splitlines()[-1]

    def consume(self, *options: str, cwd: Path = DEMOS / "django") -> None:
        """Start the handlers."""
        command = str(DEMOS / "django" / "manage.py"), "lisa_consumer"
        self._processes.start(*command, *options, env=self.env, cwd=cwd)


@pytest.fixture
def shop(redis_url: str, tmp_path: Path, processes: Processes) -> Shop:
    pytest.importorskip("django", reason="django is not installed")
    made = Shop(redis_url, tmp_path, processes)
    made.manage("migrate", "--run-syncdb", "-v", "0")
    return made


def test_django_runs_handlers_of_apps_and_tasks(shop: Shop, redis_url: str) -> None:
    with Manager(redis_url), Producer(redis_url) as producer, connect(redis_url) as raw:
        shop.consume("--", "--log-level", "info")
        unpaid, paid = shop.shell(
            "a = Order.place(minutes=0.05); b = Order.place(minutes=600); b.pay();print(a.pk, b.pk)"
        ).split()
        wait_until(lambda: raw.hget("lisa:{tasks.default}:stats", "acked@lisa"))
        states = f"print([Order.objects.get(pk=pk).state for pk in ({unpaid}, {paid})])"
        assert shop.shell(states) == "['apology', 'paid']", "handler, then the task it enqueued"
        found = producer.get("order-timeouts", f"order-{paid}")
        assert found is not None
        assert found.state == "cancelled"


def test_django_runs_tasks_later_and_cancels_them(shop: Shop, redis_url: str) -> None:
    later = (
        "from datetime import timedelta; from django.utils import timezone;"
        "task = tasks.send_apology.using(run_after=timezone.now() + timedelta(days=1));"
        "result = task.enqueue(1);"
        "print(result.id, result.status, task.get_backend().cancel(result))"
    )
    task_id, *said = shop.shell(later).split()
    assert said == ["READY", "True"]
    with Producer(redis_url) as producer:
        found = producer.get("tasks.default", task_id)
        assert found is not None
        assert found.state == "cancelled"


def test_django_runs_nothing_but_tasks(shop: Shop, redis_url: str) -> None:
    with Manager(redis_url), Producer(redis_url) as producer:
        bad = {"task": "os.getcwd", "args": [], "kwargs": {}}
        sent = producer.send("tasks.default", bad)
        shop.consume()
        wait_until(lambda: (one := producer.get("tasks.default", sent)) and one.state == "garbage")
        found = producer.get("tasks.default", sent)
        assert found is not None
        assert [group.reason for group in found.groups.values()] == ["os.getcwd is not a task"]


@pytest.mark.parametrize(
    ("options", "error"),
    [(["--", "--nosuch"], "No such option"), (["shop"], "unexpected extra argument (shop)")],
)
def test_a_usage_error_in_django_names_lisa_consumer(
    shop: Shop, options: list[str], error: str
) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        shop.manage("lisa_consumer", *options)
    assert failed.value.returncode == 2
    assert failed.value.stderr.startswith("Usage: lisa-consumer [OPTIONS] [TARGET]\n")
    assert error in failed.value.stderr


def test_django_tasks_name_their_queues(shop: Shop) -> None:
    """Without names, Django accepts tasks for any queue, which no consumer would read."""
    with pytest.raises(subprocess.CalledProcessError) as failed:
        shop.shell("from lisa.django.tasks import *; LisaBackend('default', {'QUEUES': []})")
    assert "TASKS['default']: QUEUES is empty; name the queues" in failed.value.stderr


def test_django_finds_the_project_from_any_directory(
    shop: Shop, redis_url: str, tmp_path: Path
) -> None:
    """As a service whose unit names no working directory."""
    with Manager(redis_url), Producer(redis_url) as producer:
        sent = producer.send("order-timeouts", {"order": 0})
        shop.consume("--", "--processes", "2", cwd=tmp_path)
        wait_until(lambda: (one := producer.get("order-timeouts", sent)) and one.state == "acked")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (
            "{'sever': 'redis://db:6379/0'}",
            "the setting LISA has no key 'sever'; its keys are server,",
        ),
        ("'redis://db:6379/0'", "the setting LISA is a dict, as in {'server': "),
    ],
)
def test_django_names_a_mistake_in_the_setting(
    shop: Shop, tmp_path: Path, setting: str, words: str
) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text(f"from shop.settings import *\nLISA = {setting}\n", "utf-8")
    shop.env |= {"DJANGO_SETTINGS_MODULE": "wrong", "PYTHONPATH": f"{tmp_path}:{DEMOS.parent}"}
    with pytest.raises(subprocess.CalledProcessError) as caught:
        shop.shell("Order.place(minutes=1)")
    assert words in caught.value.stderr.splitlines()[-1]
