"""Search: archive and queue as one table."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from lisa.core.errors import ConfigError
from lisa.pipeline.jobs.archive import archive
from lisa.pipeline.jobs.fields import FieldTest
from lisa.pipeline.jobs.search import Query, search
from lisa.pipeline.jobs.server import Server
from tests.servers import Process, Processes
from tests.spark.worlds import World, frozen

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from lisa.embedded import EmbeddedServer

COMMAND_WITHIN = timedelta(seconds=300)  # a JVM of its own, on a machine with other work
NOON = datetime(2040, 5, 1, 12, tzinfo=UTC)


class Place:
    """One world for all searches: some messages only archived, some only live, some both."""

    def __init__(self, spark: SparkSession, server: Server, archive: Any) -> None:
        self.spark, self.server, self.archive = spark, server, archive

    def find(self, *, live: bool = True, archived: bool = True, **query: Any) -> list[Any]:
        return self.rows(live=live, archived=archived, **query).collect()

    def rows(self, *, live: bool = True, archived: bool = True, **query: Any) -> DataFrame:
        return search(
            self.spark, Query(**query), archive=self.archive if archived else None,
            server=self.server if live else None,
        )  # fmt: skip

    def ids(self, **query: Any) -> set[str]:
        return {row.id for row in self.find(**query)}


@pytest.fixture(scope="module")
def place(
    spark: SparkSession, valkey_server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    server = Server(valkey_server.url)
    with server.open() as store:
        store.ask("FLUSHALL")
        world = World(store, server.url, "orders", ["lisa", "mail"])
        send = world.producer.send
        bodies: dict[str, Any] = {
            "a": {
                "order": 42,
                "name": "Anna",
                "items": [{"price": 12.5}],
                "a b": 1,
                "long": 90071992547409931,
            },
            "b": {"order": 420, "name": "Bert", "items": []},
            "c": {
                "order": "42",
                "name": "annabel",
                "deep": {"er": True},
                "long": 90071992547409930,
            },
            "text": "just words, order 42",
            "bytes": b'{"order": 42}',
        }
        for hour, (one, body) in enumerate(bodies.items()):
            send("orders", body, id=one, at=NOON + timedelta(hours=hour), headers={"shop": one})
        world.send(["acked", "flying"])
        world.promote()
        entries = {entry.id: entry for entry in world.take("lisa", 2)}
        world.take("mail", 2)
        world.ack("lisa", [entries["acked"]])
        world.cancel(["b"])
        send("orders", {"order": 1}, id="twice", at=NOON)
        archive = frozen(spark, server, ["orders"], str(tmp_path_factory.mktemp("s") / "log"))
        # What follows no archive has seen.
        world.fail("lisa", [entries["flying"]], 3_600_000)
        world.producer.reschedule("orders", "a", at=NOON + timedelta(days=1))
        send("orders", {"order": 2}, id="twice", at=NOON, on_duplicate="replace")
        send("orders", {"order": 7}, id="new", at=NOON)
        yield Place(spark, server, archive)
        world.close()
        store.ask("FLUSHALL")


class TestSides:
    """Who knows what, and who is believed."""

    def test_the_queue_is_believed_where_both_know_the_same_life(self, place: Place) -> None:
        rows = {(row.id, row.source): row for row in place.find()}
        assert {source: {one for one, of in rows if of == source} for source in
                ("archive", "live", "both")} == {
            "archive": {"b", "twice"}, "live": {"new", "twice"},
            "both": {"a", "c", "text", "bytes", "acked", "flying"},
        }  # fmt: skip
        moved = rows["a", "both"]
        assert (moved.state, moved.due) == ("waiting", naive(NOON + timedelta(days=1)))
        assert moved.sent_at is not None
        flying = rows["flying", "both"]
        assert (flying.state, flying.attempts) == ("in_flight", 1)
        assert {one.group: (one.state, one.reason) for one in flying.groups} == {
            "lisa": ("retry", "no luck with flying"), "mail": ("in_flight", None),
        }  # fmt: skip
        assert rows["twice", "live"].body_text == '{"order":2}'
        assert rows["twice", "archive"].body_text == '{"order":1}'
        assert rows["b", "archive"].state == "cancelled"
        assert rows["c", "both"].headers == {"shop": "c"}
        assert bytes(rows["bytes", "both"].body) == b'{"order": 42}'

    def test_one_side_alone(self, place: Place) -> None:
        assert place.ids(archived=False) == {
            "a", "c", "text", "bytes", "acked", "flying", "twice", "new",
        }  # fmt: skip
        assert place.ids(live=False) == {
            "a", "b", "c", "text", "bytes", "acked", "flying", "twice",
        }  # fmt: skip
        with pytest.raises(ConfigError, match="an archive, a server, or both"):
            place.find(live=False, archived=False)

    def test_the_earliest_due_first(self, place: Place) -> None:
        found = [row.due for row in place.find()]
        assert found == sorted(found)


class TestConditions:
    """Each of them, and all together."""

    def test_by_id_topic_state_and_due(self, place: Place) -> None:
        assert place.ids(ids=["a", "new", "none"]) == {"a", "new"}
        assert place.ids(topics=["other"]) == set()
        assert place.ids(states=["cancelled", "in_flight"]) == {"b", "flying", "acked"}
        assert place.ids(due_after=NOON, due_before=NOON + timedelta(hours=3)) == {
            "b", "c", "twice", "new",
        }  # fmt: skip
        assert place.ids(states=["waiting"], due_after=NOON + timedelta(hours=4)) == {"a", "bytes"}

    @pytest.mark.parametrize(
        ("condition", "found"),
        [
            ("$.order=42", {"a", "c"}),
            ("$.order = 42.0", {"a", "c"}),
            ("$.order!=42", {"b", "twice", "new", "acked", "flying"}),
            ("$.order>42", {"b", "acked", "flying"}),
            ("$.order<=7", {"twice", "new"}),
            ("$.name~^[Aa]nna", {"a", "c"}),
            ("$.name=Anna", {"a"}),
            ("$.items[0].price>=12.5", {"a"}),
            ("$.deep.er=true", {"c"}),
            ("$['a b']=1", {"a"}),
            ("$.nothing!=1", set()),
            ("$.long=90071992547409931", {"a"}),
            ("$.long!=90071992547409931", {"c"}),
        ],
    )
    def test_by_a_field_of_the_body(self, place: Place, condition: str, found: set[str]) -> None:
        assert place.ids(fields=[FieldTest.parse(condition)]) == found

    def test_by_sql(self, place: Place) -> None:
        where = "try_variant_get(body_json, '$.order', 'int') = 42 and headers['shop'] = 'a'"
        assert place.ids(where=where) == {"a"}
        assert place.ids(where="body_text like '%words%' and source = 'both'") == {"text"}
        for wrong in ("nothing = 1", "order by", "id"):
            with pytest.raises(ConfigError, match="cannot be used"):
                place.find(where=wrong)

    def test_all_hold_together(self, place: Place) -> None:
        tests = [FieldTest.parse("$.order=42"), FieldTest.parse("$.name~nn")]
        assert place.ids(fields=tests, where="attempts = 0", states=["waiting"]) == {"a", "c"}

    @pytest.mark.parametrize("wrong", ["order=42", "$.order", "$.order 42", "$.a~(", "$..a=1"])
    def test_what_is_no_condition(self, wrong: str) -> None:
        with pytest.raises(ConfigError):
            FieldTest.parse(wrong)


class TestCommand:
    """`lisa pipeline search`, from an archive that the archive job wrote."""

    def test_what_it_prints_and_writes(
        self, spark: SparkSession, place: Place, processes: Processes, tmp_path: Path
    ) -> None:
        archive(spark, f"{tmp_path}/archive", url=place.server.url, once=True)

        def run(*more: str) -> Process:
            return processes.start(
                "-m", "lisa.cli.main", "pipeline", "search", "--archive", f"{tmp_path}/archive",
                "--redis", place.server.url, "--master", "local[2]", *more,
            )  # fmt: skip

        found = run(
            "--field", "$.order=42", "--topic", "orders", "--limit", "1", "--json",
            "--out", f"{tmp_path}/out", "--format", "csv",
        )  # fmt: skip
        assert found.wait(timeout=COMMAND_WITHIN) == 0, found.output
        (line,) = [one for one in found.output.splitlines() if one.startswith("{")]
        document = json.loads(line)
        assert [one["id"] for one in document["messages"]] == ["c"]
        assert document["messages"][0]["body"]["name"] == "annabel"
        assert document["more"] is True
        csv = "".join(one.read_text("utf-8") for one in (tmp_path / "out").glob("*.csv"))
        assert "annabel" in csv
        assert "Anna" in csv
        assert "Bert" not in csv
        nothing = run("--where", "attempts > 7")
        assert nothing.wait(timeout=COMMAND_WITHIN) == 1, nothing.output
        assert "nothing found" in nothing.output

    def test_usage(self, processes: Processes) -> None:
        command = ("-m", "lisa.cli.main", "pipeline", "search")
        for wrong, said in (
            (("--no-live",), "nothing to search in"),
            (("--due-after", "2026-01-01T00:00:00"), "names no time zone"),
            (("--state", "nowhere"), "no state 'nowhere'"),
        ):
            process = processes.start(*command, "--master", "local[1]", *wrong)
            assert process.wait(timeout=COMMAND_WITHIN) == 2, process.output
            assert said in process.output


def naive(moment: datetime) -> datetime:
    """As Spark hands it out."""
    return moment.astimezone().replace(tzinfo=None)


def test_a_row_as_json(place: Place) -> None:
    """What the command prints for programs."""
    from lisa.cli.pipeline.search import _fields

    (row,) = place.find(ids=["bytes"])
    document = json.loads(json.dumps(_fields(row), default=str))
    assert document["body"] == "eyJvcmRlciI6IDQyfQ=="
    assert document["body_encoding"] == "base64"
    assert document["due"] == "2040-05-01T16:00:00.000Z"
    assert document["source"] == "both"
