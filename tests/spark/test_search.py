"""Search in archive and queue."""

import json
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from lisa import Producer
from lisa.admin.topics import set_options
from lisa.core.model.clock import MAX_DUE_MS, ms_datetime
from lisa.core.model.errors import ConfigError
from lisa.embedded import EmbeddedServer
from lisa.pipeline.jobs.archive import archive
from lisa.pipeline.jobs.search import FieldTest, Query, search
from lisa.pipeline.server import Server
from tests.servers import JVM_PATIENCE, Processes
from tests.spark.worlds import SMALL, World, frozen

NOON = datetime(2040, 5, 1, 12, tzinfo=UTC)


class Setup:
    """Messages for all searches: some only archived, some only live, some both."""

    def __init__(self, spark: SparkSession, server: Server, archive: Any) -> None:
        self.spark, self.server, self.archive = spark, server, archive

    def rows(self, *, live: bool = True, archived: bool = True, **query: Any) -> DataFrame:
        return search(
            self.spark,
            Query(**query),
            archive=self.archive if archived else None,
            server=self.server if live else None,
        )

    def ids(self, **query: Any) -> set[str]:
        return {row.id for row in self.rows(**query).collect()}


@pytest.fixture(scope="module")
def setup(
    spark: SparkSession, valkey_server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Setup]:
    server = Server(valkey_server.url)
    with server.open() as store:
        store.ask("FLUSHALL")
        world = World(store, server.url, "orders", ["lisa", "mail"])
        send = world.producer.send
        long = 90071992547409930
        anna = {"order": 42, "name": "Anna", "items": [{"price": 12.5}], "a b": 1, "long": long + 1}
        bodies: dict[str, Any] = {
            "a": anna,
            "b": {"order": 420, "name": "Bert", "items": []},
            "c": {"order": "42", "name": "annabel", "deep": {"er": True}, "long": long},
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
        store.drive(set_options(store, "orders", {"journal": False}))
        send("orders", "no journal", id="unjournaled", at=NOON)
        store.drive(set_options(store, "orders", {"journal": True}))
        world.producer.reschedule("orders", "unjournaled", at=NOON - timedelta(hours=1))
        archive = frozen(spark, server, ["orders"], str(tmp_path_factory.mktemp("s") / "log"))
        # The following events are not archived.
        world.fail("lisa", [entries["flying"]], 3_600_000)
        world.producer.reschedule("orders", "a", at=NOON + timedelta(days=1))
        send("orders", {"order": 2}, id="twice", at=NOON, on_duplicate="replace")
        send("orders", {"order": 7}, id="new", at=NOON)
        yield Setup(spark, server, archive)
        world.close()
        store.ask("FLUSHALL")


def test_the_queue_wins_if_both_have_the_same_life(setup: Setup) -> None:
    found = setup.rows().collect()
    assert [row.due for row in found] == sorted(row.due for row in found)
    rows = {(row.id, row.source): row for row in found}
    assert {
        source: {one for one, of in rows if of == source} for source in ("archive", "live", "both")
    } == {
        "archive": {"b", "twice"},
        "live": {"new", "twice"},
        "both": {"a", "c", "text", "bytes", "acked", "flying", "unjournaled"},
    }
    moved = rows["a", "both"]
    assert (moved.state, moved.due) == ("waiting", naive(NOON + timedelta(days=1)))
    assert moved.sent_at is not None
    flying = rows["flying", "both"]
    assert (flying.state, flying.attempts) == ("in_flight", 1)
    assert {one.group: (one.state, one.reason) for one in flying.groups} == {
        "lisa": ("retry", "no luck with flying"),
        "mail": ("in_flight", None),
    }
    assert rows["twice", "live"].body_text == '{"order":2}'
    assert rows["twice", "archive"].body_text == '{"order":1}'
    assert rows["b", "archive"].state == "cancelled"
    assert rows["c", "both"].headers == {"shop": "c"}
    assert bytes(rows["bytes", "both"].body) == b'{"order": 42}'
    # The archive has neither its body nor its token.
    assert rows["unjournaled", "both"].body_text == "no journal"


def test_archive_only_and_queue_only(setup: Setup) -> None:
    both = {"a", "c", "text", "bytes", "acked", "flying", "twice", "unjournaled"}
    assert setup.ids(archived=False) == both | {"new"}
    assert setup.ids(live=False) == both | {"b"}
    with pytest.raises(ConfigError, match="an archive, a server, or both"):
        setup.rows(live=False, archived=False)


def test_by_id_topic_state_and_due(setup: Setup) -> None:
    assert setup.ids(ids=["a", "new", "none"]) == {"a", "new"}
    assert setup.ids(topics=["other"]) == set()
    assert setup.ids(states=["cancelled", "in_flight"]) == {"b", "flying", "acked"}
    within = {"due_after": NOON, "due_before": NOON + timedelta(hours=3)}
    assert setup.ids(**within) == {"b", "c", "twice", "new"}
    assert setup.ids(states=["waiting"], due_after=NOON + timedelta(hours=4)) == {"a", "bytes"}


def test_by_a_field_of_the_body(setup: Setup) -> None:
    wanted: dict[str, set[str]] = {
        "$.order=42": {"a", "c"},
        "$.order = 42.0": {"a", "c"},
        "$.order!=42": {"b", "twice", "new", "acked", "flying"},
        "$.order>42": {"b", "acked", "flying"},
        "$.order<=7": {"twice", "new"},
        "$.name~^[Aa]nna": {"a", "c"},
        "$.name=Anna": {"a"},
        "$.items[0].price>=12.5": {"a"},
        "$.deep.er=true": {"c"},
        "$['a b']=1": {"a"},
        "$.nothing!=1": set(),
        "$.long=90071992547409931": {"a"},
        "$.long!=90071992547409931": {"c"},
        "$.order=4_2": set(),
    }
    json_text = sf.when(sf.col("kind") == "j", sf.col("body_text"))
    tests = [FieldTest.parse(one).holds(json_text).alias(one) for one in wanted]
    rows = setup.rows().select("id", *tests).collect()
    assert {one: {row.id for row in rows if row[one]} for one in wanted} == wanted


def test_by_sql(setup: Setup) -> None:
    where = "try_variant_get(body_json, '$.order', 'int') = 42 and headers['shop'] = 'a'"
    assert setup.ids(where=where) == {"a"}
    assert setup.ids(where="body_text like '%words%' and source = 'both'") == {"text"}
    for wrong in ("nothing = 1", "order by", "id"):
        with pytest.raises(ConfigError, match="cannot be used"):
            setup.rows(where=wrong)

    both = [FieldTest.parse("$.order=42"), FieldTest.parse("$.name~nn")]
    assert setup.ids(fields=both, where="attempts = 0", states=["waiting"]) == {"a", "c"}
    for wrong in ("order=42", "$.order", "$.order 42", "$.a~(", "$..a=1"):
        with pytest.raises(ConfigError):
            FieldTest.parse(wrong)


def test_output_and_files_of_the_command(
    spark: SparkSession, setup: Setup, pipeline: Callable[..., Result], tmp_path: Path
) -> None:
    archive(spark, f"{tmp_path}/archive", url=setup.server.url, once=True)
    command = ("search", "--archive", f"{tmp_path}/archive", "--redis", setup.server.url)
    words = ("--field", "$.order=42", "--topic", "orders", "--limit", "1", "--json")
    found = pipeline(*command, *words, "--out", f"{tmp_path}/out", "--format", "csv")
    (line,) = [one for one in found.output.splitlines() if one.startswith("{")]
    document = json.loads(line)
    assert [(one["id"], one["body"]["name"]) for one in document["messages"]] == [("c", "annabel")]
    assert document["more"] is True
    csv = "".join(one.read_text("utf-8") for one in (tmp_path / "out").glob("*.csv"))
    assert [name in csv for name in ("annabel", "Anna", "Bert")] == [True, True, False]
    assert "nothing found" in pipeline(*command, "--where", "attempts > 7", code=1).output
    [message] = json.loads(pipeline(*command, "--id", "bytes", "--json").stdout)["messages"]
    assert (message["body"], message["body_encoding"]) == ("eyJvcmRlciI6IDQyfQ==", "base64")
    assert (message["due"], message["source"]) == ("2040-05-01T16:00:00.000Z", "both")


def test_wrong_conditions_and_usage(
    setup: Setup, pipeline: Callable[..., Result], processes: Processes
) -> None:
    """Spark finds some of these only while it reads rows."""
    with Producer(setup.server.url) as producer:
        producer.send("odd", "x", id="odd", delay="1h")
    odd = ("--redis", setup.server.url, "--topic", "odd", "--where")
    wrong: dict[tuple[str, ...], str] = {
        ("--no-live",): "nothing to search",
        ("--due-after", "2026-01-01T00:00:00"): "has no time zone",
        ("--state", "nowhere"): "no state 'nowhere'",
        (*odd, "1 / attempts > 1"): "lisa: ",
        (*odd, "date(id) > '2026-01-01'"): "lisa: ",
    }
    for words, said in wrong.items():
        assert said in pipeline("search", *words, code=2).output.strip().splitlines()[-1]
    # In a program of its own: Spark's log has no trace of it.
    command = ("search", "--redis", setup.server.url, "--where", "prio > 1")
    refused = processes.start("-m", "lisa.cli.main", "pipeline", *command, *SMALL)
    assert refused.wait(timeout=JVM_PATIENCE) == 2, refused.output
    assert refused.output.strip().splitlines()[-1].startswith("lisa: condition 'prio > 1'")
    assert "org.apache.spark" not in refused.output


def test_a_time_that_is_in_the_year_10000_in_the_local_zone(
    setup: Setup, pipeline: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Producer(setup.server.url) as producer:
        producer.send("never", "x", id="never", at=ms_datetime(MAX_DUE_MS))
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        found = pipeline("search", "--redis", setup.server.url, "--topic", "never", "--json")
    time.tzset()
    (message,) = json.loads(found.stdout)["messages"]
    assert message["due"] == "9999-12-31T23:59:59.999Z"


def naive(moment: datetime) -> datetime:
    """A timestamp as Spark returns it."""
    return moment.astimezone().replace(tzinfo=None)
