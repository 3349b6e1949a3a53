"""A backend for Django's tasks: `django.tasks` of Django 6, or the package django-tasks before.

    TASKS = {"default": {"BACKEND": "lisa.django.tasks.LisaBackend"}}

    @task()
    def send_receipt(order): ...

    send_receipt.using(run_after=timezone.now() + timedelta(days=1)).enqueue(42)

A task is a message of the topic `tasks.<queue>`; its id is the id of the result. Retries follow the
topic's options, so one task may run several times. Results are not kept. Within `atomic()`, a task
is sent after the commit, or never.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from django.core.exceptions import ImproperlyConfigured
from django.db import connection, transaction
from django.utils import timezone
from django.utils.module_loading import import_string

from lisa.core.model.errors import LisaError
from lisa.core.model.message import Message
from lisa.core.model.outcomes import Discard
from lisa.django import producer

if TYPE_CHECKING:
    from lisa.consumer import Consumer

try:
    from django.tasks import Task, TaskContext, TaskResult, TaskResultStatus, task_backends
    from django.tasks.backends.base import BaseTaskBackend
    from django.tasks.signals import task_enqueued, task_finished, task_started
except ImportError:  # before Django 6
    from django_tasks import TaskContext, TaskResult, TaskResultStatus, task_backends
    from django_tasks.backends.base import BaseTaskBackend
    from django_tasks.base import Task
    from django_tasks.signals import task_enqueued, task_finished, task_started

log = logging.getLogger("lisa.django")

PREFIX = "tasks."


class UnknownTask(LisaError):
    """A worker does not have the task. In a rolling deployment another worker may have it."""


class LisaBackend(BaseTaskBackend):  # type: ignore[misc]
    """Sends tasks as messages; `manage.py lisa_consumer` runs them.

    OPTIONS: `prefix` of the topics, by default "tasks."; `on_commit`, by default True: within
    `atomic()` of the default database, tasks are sent after the commit.
    """

    supports_defer = True
    supports_async_task = True

    def __init__(self, alias: str, params: Mapping[str, Any]) -> None:
        super().__init__(alias, params)
        if not self.queues:  # to Django, no queues mean any, but a consumer must know its topics
            raise ImproperlyConfigured(f"TASKS[{alias!r}]: QUEUES is empty; name the queues")
        self._prefix = self.options.get("prefix", PREFIX)

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        """Send a task; returns its result, whose id cancels it. Raises what `send` raises.

        Within `atomic()`, the task is sent after the commit. Only then it can be cancelled,
        `enqueued_at` of the result is set, and `task_enqueued` is sent.
        """
        self.validate_task(task)
        result = self._result(task, "", args, kwargs)
        waits = self.options.get("on_commit", True) and connection.in_atomic_block
        sent = (producer.on_commit() if waits else producer).send(
            self._prefix + task.queue_name,
            {"task": task.module_path, "args": result.args, "kwargs": result.kwargs},
            at=task.run_after,
            tz=timezone.get_current_timezone(),
        )
        object.__setattr__(result, "id", sent)
        if waits:
            transaction.on_commit(lambda: self._announce(result))
        else:
            self._announce(result)
        return result

    def _announce(self, result: Any) -> None:
        object.__setattr__(result, "enqueued_at", timezone.now())
        task_enqueued.send(type(self), task_result=result)

    def cancel(self, result: Any) -> bool:
        """Cancel a task that was sent; False if it has begun or is unknown."""
        topic = self._prefix + result.task.queue_name
        return producer.cancel(topic, result.id) == "cancelled"

    def topics(self) -> Iterator[str]:
        """The topics of all queues."""
        for queue in sorted(self.queues):
            yield self._prefix + queue

    def run(self, message: Message) -> None:
        """Run the task of a message; an exception retries it."""
        result = self._started(message)
        task = result.task
        context = [TaskContext(task_result=result)] if task.takes_context else []
        task.call(*context, *result.args, **result.kwargs)
        self._finish(result, TaskResultStatus.SUCCESSFUL)

    def gave_up(self, _topic: str, *, message: Message) -> None:
        """Announce a task that has failed for good; a receiver of `message_dead`.

        Django's signal names the task, so there is none for a task that this worker does not have.
        """
        try:
            result = self._result_of(message)
        except (UnknownTask, Discard) as error:
            log.warning("topic %s: gave up message %s: %s", message.topic, message.id, error)
            return
        self._finish(result, TaskResultStatus.FAILED)

    def _started(self, message: Message) -> Any:
        result = self._result_of(message)
        now = timezone.now()
        for name, value in (("started_at", now), ("last_attempted_at", now)):
            object.__setattr__(result, name, value)
        object.__setattr__(result, "status", TaskResultStatus.RUNNING)
        result.worker_ids.extend([message.topic] * message.attempt)  # Django counts attempts by it
        task_started.send(type(self), task_result=result)
        return result

    def _finish(self, result: Any, status: Any) -> None:
        object.__setattr__(result, "status", status)
        object.__setattr__(result, "finished_at", timezone.now())
        task_finished.send(type(self), task_result=result)

    def _result_of(self, message: Message) -> Any:
        body = message.body
        try:
            name, args, kwargs = body["task"], body["args"], body["kwargs"]
        except (KeyError, TypeError) as error:
            raise Discard(f"the body is not that of a task: {error!r}") from error
        try:
            task = import_string(name)
        except ImportError as error:
            raise UnknownTask(f"this worker has no task {name}: {error}") from error
        if not isinstance(task, Task):  # a message must not run any other function
            raise UnknownTask(f"{name} is not a task of this worker")
        return self._result(task, message.id, args, kwargs)

    def _result(self, task: Any, task_id: str, args: Any, kwargs: Any) -> Any:
        return TaskResult(
            task=task,
            id=task_id,
            status=TaskResultStatus.READY,
            enqueued_at=None,
            started_at=None,
            finished_at=None,
            last_attempted_at=None,
            args=args,
            kwargs=kwargs,
            backend=self.alias,
            errors=[],
            worker_ids=[],
        )


def handle_tasks(consumer: Consumer) -> None:
    """Subscribe a consumer to the queues of every `LisaBackend` of the project."""
    for alias in task_backends.settings:
        backend = task_backends[alias]
        if isinstance(backend, LisaBackend):
            for topic in backend.topics():
                consumer.subscribe(topic, backend.run)
                consumer.message_dead.connect(backend.gave_up, sender=topic)
