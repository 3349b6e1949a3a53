"""The pipeline's jobs on the suite's session, for one server and one folder."""

import re
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import redis
from click.testing import CliRunner, Result
from pyspark.sql import DataFrame, SparkSession

from lisa import FoundMessage, Producer
from lisa.cli.main import main
from lisa.core.model.keys import Keys
from lisa.core.store.store import SyncStore
from lisa.pipeline.archive import Archive, open_archive
from lisa.pipeline.archive.writing import FileWriter
from lisa.pipeline.jobs.archive import ArchiveResult, archive
from lisa.pipeline.jobs.audit import Audit, audit
from lisa.pipeline.jobs.restore import Restoration, restore
from lisa.pipeline.jobs.schedule import Scheduled, schedule
from lisa.pipeline.server import Server
from tests.spark.stories import Event, check, frame
from tests.spark.worlds import World, frozen

TOPIC = "orders"
KEYS = Keys().topic(TOPIC)


def run_command(*words: str, code: int = 0) -> Result:
    """Run `lisa pipeline` in this process, to an exit code.

    A program of its own takes ten seconds to start; one test of each job runs one.
    """
    done = CliRunner().invoke(main, ["pipeline", *words])
    assert done.exit_code == code, done.output
    return done


@dataclass
class Jobs:
    """Runs jobs; the topic is `orders`, and the archive is in files, unless told otherwise."""

    spark: SparkSession
    command: Callable[..., Result]
    url: str
    client: redis.Redis
    folder: Path
    closing: ExitStack

    def __post_init__(self) -> None:
        self.server = Server(self.url)
        self.where = str(self.folder / "archive")
        self._numbers = count()

    @cached_property
    def producer(self) -> Producer:
        return self.closing.enter_context(Producer(self.url))

    @cached_property
    def store(self) -> SyncStore:
        return self.closing.enter_context(self.server.open())

    def world(self, topic: str = TOPIC, *groups: str) -> World:
        """A topic whose messages change their states by single transitions."""
        made = World(self.store, self.url, topic, groups or ["lisa"])
        self.closing.callback(made.close)
        return made

    def new_path(self) -> str:
        """A path in the folder that does not exist yet."""
        return str(self.folder / f"new-{next(self._numbers)}")

    def schedule(self, rows: DataFrame, **options: Any) -> Scheduled:
        return schedule(rows, **{"url": self.url, "topic": TOPIC, **options})

    def message(self, message_id: str, topic: str = TOPIC) -> FoundMessage:
        """A message that must exist."""
        found = self.producer.get(topic, message_id)
        assert found is not None, message_id
        return found

    def scores(self, key: str = KEYS.waiting) -> dict[str, int]:
        """The members of a sorted set; by default the waiting messages with their due times."""
        rows: Any = self.client.zrange(key, 0, -1, withscores=True)
        return {name.decode(): int(score) for name, score in rows}

    def archive(self, where: str | None = None, **options: Any) -> ArchiveResult:
        """Run the archive job to the end of all journals."""
        return archive(
            self.spark, where or self.where, **{"url": self.url, "once": True, **options}
        )

    def opened(self, where: str | None = None) -> Archive:
        return open_archive(self.spark, where or self.where)

    def writer(self, **options: Any) -> FileWriter:
        return FileWriter(self.spark, self.where, **options)

    def frame(self, events: Iterable[Event]) -> DataFrame:
        return frame(self.spark, events)

    def check(self, events: list[Event]) -> None:
        """Assert that the archive has exactly these events, and their messages."""
        check(self.spark, self.where, events)

    def frozen(self, *topics: str) -> Any:
        """An archive of the journals at this moment, without running the job."""
        return frozen(self.spark, self.server, topics or [TOPIC], self.new_path())

    def restore(self, of: Archive, to: str | None = None, **options: Any) -> Restoration:
        return restore(self.spark, of, self.server, to or self.new_path(), **options)

    def audit(
        self, of: Archive | Callable[[], Archive], *, offline: bool = False, **options: Any
    ) -> Audit:
        server = None if offline else self.server
        return audit(self.spark, of if callable(of) else lambda: of, server, **options)


def send(
    jobs: Jobs, content: str | bytes | None, *options: str, name: str = "orders.csv", code: int = 0
) -> Result:
    """Schedule a file of the folder, with this content."""
    source = jobs.folder / name
    if content is not None:
        source.write_bytes(content if isinstance(content, bytes) else content.encode())
    given = ("--topic", TOPIC, "--redis", jobs.url)
    return jobs.command("schedule", str(source), *given, *options, code=code)


def errors(done: Result) -> list[str]:
    """The lines on stderr, without those of progress, which a slow machine adds."""
    lines = done.stderr.splitlines()
    return [line for line in lines if not re.match(r"lisa pipeline schedule: \d+ s", line)]


def bodies_of(
    jobs: Jobs, content: str | None, *options: str, name: str = "orders.csv"
) -> list[Any]:
    """Schedule a file; returns the bodies of all messages, in the order of due."""
    send(jobs, content, "--job", "j", *options, name=name)
    return [jobs.message(one).body for one in jobs.scores()]
