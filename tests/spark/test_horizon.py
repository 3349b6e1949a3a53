"""`schedule` with `due_within`: rows are loaded when they fall due within a horizon."""

import base64
import json
import random
import re
import string
import struct
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pyarrow as pa
import pytest
from click.testing import CliRunner, Result
from deltalake import DeltaTable, write_deltalake
from msgspec.structs import replace
from pyarrow.parquet import write_table
from pyspark.sql import DataFrame

from lisa import Manager
from lisa.cli.main import main
from lisa.core.model.errors import ConfigError
from lisa.core.store import presence
from lisa.pipeline.jobs.schedule import Scheduled
from tests.docs.test_pages import DEFAULT_URL, ROOT, blocks
from tests.servers import JVM_PATIENCE, Processes, wait_until
from tests.spark.jobs import KEYS, TOPIC, Jobs, send

HOUR_MS = 3_600_000
DAY = timedelta(days=1)


class Table:
    """A source whose rows are due some hours from now, and the loader `nightly` of it."""

    def __init__(self, jobs: Jobs) -> None:
        self.jobs = jobs
        self.now_ms = jobs.store.drive(jobs.store.server_time_ms())
        self.rows: dict[str, float | None] = {}

    def frame(self) -> DataFrame:
        rows = [(name, name, self.due(hours)) for name, hours in self.rows.items()]
        return self.jobs.spark.createDataFrame(rows, "id string, body string, due long")

    def due(self, hours: float | None) -> int | None:
        return None if hours is None else self.now_ms + int(hours * HOUR_MS)

    def load(self, **options: Any) -> Scheduled:
        given = {"job": "nightly", "due_within": DAY}
        return self.jobs.schedule(self.frame(), **given | options)

    @property
    def record(self) -> presence.LoaderRecord:
        (found,) = self.jobs.store.drive(presence.loaders(self.jobs.store))
        return found

    def age(self, hours: float) -> None:
        """Have the last run be longer ago."""
        shift_ms = int(hours * HOUR_MS)
        aged = replace(
            self.record,
            seen_ms=self.record.seen_ms - shift_ms,
            floor_ms=self.record.floor_ms - shift_ms,
            until_ms=self.record.until_ms - shift_ms,
        )
        keys = self.jobs.store.keys
        self.jobs.client.hset(keys.loaders, "nightly", msgspec.json.encode(aged))

    def ids(self) -> set[str]:
        return set(self.jobs.scores())


@pytest.fixture
def table(jobs: Jobs) -> Table:
    return Table(jobs)


def test_rows_are_loaded_once_when_they_are_within_the_horizon(
    table: Table, caplog: pytest.LogCaptureFixture
) -> None:
    table.rows = {"past": -0.1, "soon": 0.1, "day": 23.9, "later": 24.2, "never": None}
    done = table.load()
    assert (done.accepted, done.refused, table.ids()) == (2, 1, {"soon", "day"})
    assert "first run of 'nightly'" in caplog.text
    assert table.jobs.client.hget(KEYS.options, "dedupe_for") == str(25 * HOUR_MS).encode()
    assert abs(table.record.seen_ms - table.now_ms) < HOUR_MS
    table.rows["new"] = 1.5
    caplog.clear()
    done = table.load(due_within=DAY + timedelta(hours=1))
    assert (done.accepted, done.duplicate) == (2, 2)
    assert table.ids() == {"soon", "day", "later", "new"}
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("away", "loaded", "lost"),
    [
        (0.1, {"-0.4"}, False),
        (10, {"-0.4", "-6", "-10"}, False),
        # Those due more than a day ago may have been loaded, handled and forgotten.
        (28, {"-0.4", "-6", "-10", "-23"}, True),
        (70, {"-0.4", "-6", "-10", "-23", "-40"}, True),
    ],
)
def test_a_late_loader_sends_what_is_overdue(
    table: Table, caplog: pytest.LogCaptureFixture, away: float, loaded: set[str], *, lost: bool
) -> None:
    table.load(since=datetime.fromtimestamp(table.now_ms / 1000 - 100 * 3600, UTC))
    table.age(away)
    table.rows = {name: float(name) for name in ("-0.4", "-6", "-10", "-23", "-40", "-60")}
    table.load()
    assert table.ids() == loaded
    assert table.jobs.scores()["-0.4"] == table.due(-0.4)
    assert ("send them with another job" in caplog.text) is lost


def test_what_was_due_before_the_first_run_stays_out(table: Table) -> None:
    table.rows = {"old": -0.2, "new": 0.2}
    table.load()
    table.load(since=datetime(2026, 1, 1, tzinfo=UTC))  # as in a crontab
    assert table.ids() == {"new"}


def test_a_run_that_found_no_room_is_no_success(table: Table) -> None:
    table.rows = {"a": 0.1, "b": 0.2}
    client = table.jobs.client
    client.hset(KEYS.options, "capacity", "1")
    assert table.load(patience=timedelta(milliseconds=1)).refused == 1
    assert not table.record.has_succeeded
    client.hset(KEYS.options, "capacity", "9")
    assert table.load().accepted == 1
    assert table.record.has_succeeded


def test_a_first_run_that_fails_is_repeated_from_its_own_time(
    table: Table, caplog: pytest.LogCaptureFixture
) -> None:
    table.rows = {"a": 0.1, "b": 0.2}
    table.jobs.client.hset(KEYS.options, "capacity", "1")
    table.load(patience=timedelta(milliseconds=1))
    table.jobs.client.hset(KEYS.options, "capacity", "9")
    table.age(40)
    table.rows = {"before": -40.1, "after": -39.9, "now": 0.1}
    caplog.clear()
    assert table.load().accepted + table.load().accepted == 2
    assert table.ids() >= {"after", "now"}
    assert "before" not in table.ids()
    assert caplog.text == ""


def test_every_form_of_a_due_time(jobs: Jobs) -> None:
    """Those of a window are chosen by the time that the row names, not by the next opening."""
    now_ms = jobs.store.drive(jobs.store.server_time_ms())
    at = {
        f"{hours}": datetime.fromtimestamp(now_ms / 1000 + 3600 * hours, UTC)
        for hours in (-2, 2, 22, 26, 60)
    }
    tokyo = ZoneInfo("Asia/Tokyo")
    forms = {
        "timestamp": ("timestamp(at) AS due",),
        "milliseconds": ("unix_millis(timestamp(at)) AS due",),
        "seconds": ("unix_seconds(timestamp(at)) AS due",),
        "window": ("timestamp(at) AS due", "'mon-sun 0-23:59' AS window"),
        "local": ("wall AS at_local", "'Asia/Tokyo' AS tz"),
        "spaced": ("concat(' ', wall) AS at_local", "'Asia/Tokyo' AS tz"),
        "ntz": (
            "cast(wall AS timestamp_ntz) AS at_local",
            "'Asia/Tokyo' AS tz",
            "'0-23:59' AS window",
        ),
    }
    rows = [
        (name, one.isoformat(), f"{one.astimezone(tokyo):%FT%T.%f}") for name, one in at.items()
    ]
    source = jobs.spark.createDataFrame(rows, "id string, at string, wall string")
    for name, columns in forms.items():
        jobs.client.flushall()
        messages = source.selectExpr("id", "id AS body", *columns)
        done = jobs.schedule(messages, job=name, due_within=DAY)
        if name == "seconds":  # as milliseconds, of 1970
            assert (done.accepted, done.refused) == (0, 5)
        else:
            assert (name, set(jobs.scores()), done.refused) == (name, {"2", "22"}, 0)


def test_times_that_no_message_can_have_are_refused(jobs: Jobs) -> None:
    """Whatever the type of their column; the last day of all years is one that it can have."""
    times = ("0001-01-01 00:00:00", "9999-12-31 00:00:00", "9999-12-31 23:59:59.9999")
    rows = jobs.spark.createDataFrame([(time, time) for time in times], "id string, body string")
    stamp = "to_timestamp(concat(id, 'Z'))"
    bad = {times[0], times[2]}
    for due, refused in (
        (f"{stamp} AS due", bad),
        (f"unix_micros({stamp}) DIV 1000 + 1 AS due", bad),
        ("replace(id, ' ', 'T') AS at_local", {times[0]}),
    ):
        zone = ["'UTC' AS tz"] if "at_local" in due else []
        done = jobs.schedule(rows.selectExpr("*", due, *zone), job="nightly", due_within=DAY)
        assert {one.split(" ", 1)[1].split(": ")[0] for one in done.reasons} == refused
    jobs.producer.send(TOPIC, 1, id="a", at_ms=4102444800000)
    compact = jobs.spark.sql("SELECT 'a' AS id, 'x' AS body, 20991224090000 AS due")
    done = jobs.schedule(compact, job="nightly", due_within=DAY, sync=True)
    assert (done.refused, done.rescheduled) == (1, 0)
    assert "looks like a date and time" in done.reasons[0]


def test_an_export_without_rows_or_with_nulls_only(jobs: Jobs) -> None:
    """As pandas writes it, its columns may have no type."""
    nothing = jobs.spark.sql("SELECT null AS id, null AS body, null AS due, null AS headers")
    done = jobs.schedule(nothing.where("false"), job="j", due_within=DAY, sync=True)
    assert (done.accepted, done.refused) == (0, 0)
    assert jobs.schedule(nothing, job="j", due_within=DAY, sync=True).refused == 1
    some = jobs.spark.sql("SELECT 'a' AS id, 'x' AS body, null AS ttl, null AS headers")
    assert jobs.schedule(some).accepted == 1


@pytest.mark.parametrize("zone", ["America/New_York", "UTC"])
def test_due_times_without_a_zone_are_in_the_given_one(jobs: Jobs, zone: str) -> None:
    now = datetime.now(UTC).replace(microsecond=1)
    source = jobs.folder / "rows.parquet"

    def load(hours: float, *words: str, code: int = 0) -> Result:
        wall = (now + timedelta(hours=hours)).astimezone(ZoneInfo(zone)).replace(tzinfo=None)
        write_table(pa.table({"number": ["a"], "send_at": [wall], "zone": [zone]}), source)
        given = ("--id", "number", "--due", "send_at", "--job", "j", "--due-within", "1d")
        return send(jobs, None, *given, "--sync", *words, name=source.name, code=code)

    for hours in (2, 3):
        load(hours, "--tz", zone)
        ms = int(now.timestamp()) * 1000 + 1 + hours * HOUR_MS
        assert jobs.scores() == {"a": ms}
    assert "as in --due send_at --tz UTC" in load(2, code=2).stderr
    by_row = load(2, "--tz", "zone", "--body", "*", code=2)
    assert "give --at-local send_at --tz zone" in by_row.stderr
    assert "neither a column" in load(2, "--tz", "Mars", code=2).stderr


def test_rows_that_a_column_cancels(jobs: Jobs) -> None:
    """Whatever its type, as exports have it."""
    texts = "\n".join(
        f"{name},{text},in 2h,{name}"
        for name, text in {
            "1": "",
            "2": "false",
            "3": "0",
            "4": "No",
            "5": "2026-01-01",
            "6": "True",
        }.items()
    )
    content = "number,gone,due,other\n" + texts.replace("in 2h", utc(2))
    given = ("--id", "number", "--job", "j", "--due-within", "1d", "--cancelled", "gone")
    done = send(jobs, content, *given, "--json")
    assert json.loads(done.stdout)["accepted"] == 4
    assert set(jobs.scores()) == set("1234")
    assert jobs.message("1").body == {"other": 1}
    lines = [
        {"number": n, "gone": gone, "due": utc(2)}
        for n, gone in enumerate((None, False, 0, True, "x"))
    ]
    jobs.client.flushall()
    send(jobs, "\n".join(map(json.dumps, lines)), *given, "--body", "*", name="rows.jsonl")
    assert set(jobs.scores()) == set("012")
    nested = '{"number": 1, "gone": [], "due": 1}'
    typed = ("--schema", "number long, gone array<int>, due long", "--body", "*")
    done = send(jobs, nested, *given, *typed, name="rows.jsonl", code=2)
    assert "column 'gone' has type array<int>" in done.stderr
    refused = send(jobs, content, *given[:-1], "lost", code=2)
    assert "--cancelled: no column 'lost'" in refused.stderr


TEXTS = (
    "",
    " ",
    "0",
    "0.00",
    "-0",
    "0,0",
    "0e5",
    "F",
    " false\t",
    "n",
    "No",
    "off",
    "Null",
    "(null)",
    "\\N",
    "NA",
    "<NA>",
    "N/A",
    "#N/A",
    "None",
    "0000-00-00",
    "0000-00-00 00:00:00",
)
OTHER_TEXTS = ("NaN", "NaT", "[]")


@pytest.mark.parametrize(
    ("kind", "kept", "cancelled"),
    [
        (
            "string",
            (*TEXTS, *OTHER_TEXTS),
            ("1", "0.01", "2026-01-01", "true", "x", "00:00", "nab"),
        ),
        ("double", (0.0, -0.0, float("nan")), (1.0, 0.01)),
        ("decimal(10,2)", (Decimal(0),), (Decimal("0.01"),)),
        ("int", (0,), (-1, 1)),
        ("boolean", (False,), (True,)),
        ("timestamp_ntz", (), (datetime(1970, 1, 1),)),  # noqa: DTZ001
        ("date", (), (date(1970, 1, 1),)),
        ("void", (), ()),
    ],
)
def test_values_that_cancel_rows(
    jobs: Jobs, kind: str, kept: tuple[Any, ...], cancelled: tuple[Any, ...]
) -> None:
    rows = [(f"kept {value!r}", value) for value in (None, *kept)]
    rows += [(f"cancelled {value!r}", value) for value in cancelled]
    frame = jobs.spark.createDataFrame(rows, f"id string, gone {kind}")
    dues = "unix_millis(now()) + 3600000 AS due"
    jobs.schedule(frame.selectExpr("*", "id AS body", dues), cancelled="gone")
    assert set(jobs.scores()) == {f"kept {value!r}" for value in (None, *kept)}


def test_a_column_that_cannot_cancel_is_named(table: Table) -> None:
    for value in ("array()", "binary('x')", "named_struct('a', 1)"):
        with pytest.raises(ConfigError, match=r"cancelled \(--cancelled\): column 'gone' has type"):
            table.jobs.schedule(table.frame().selectExpr("*", f"{value} AS gone"), cancelled="gone")

    for name in ("nope", "Body"):
        with pytest.raises(ConfigError, match=f"no column '{name}'; the columns are id, body, due"):
            table.jobs.schedule(table.frame(), cancelled=name)


def test_rows_that_cannot_be_read_cancel_and_move_nothing(jobs: Jobs) -> None:
    """An unquoted comma moves a time to another column, and an earlier one to that of due."""
    header, options = "number,text,made,send_at,gone\n", ["--id", "number", "--due", "send_at"]
    options += ["--job", "j", "--due-within", "1d", "--cancelled", "gone"]
    early, due = utc(-99 * 24), utc(2)
    good = [f"{number},hello,{early},{due},\n" for number in "123"]
    shifted = good[1].replace("hello", "hello, you")
    done = send(jobs, header + "".join(good), *options)
    before = jobs.scores()
    assert set(before) == set("123")
    for rest in (good, good[:1]):
        done = send(jobs, header + "".join([*rest, shifted]), *options, "--sync", code=1)
        assert "refused orders 2: cannot be read: 2,hello, you," in done.output
        assert "0 rescheduled" not in done.output
        assert jobs.scores() == before


def utc(hours: float) -> str:
    return (datetime.now(UTC) + timedelta(hours=hours)).isoformat()


def test_messages_follow_their_rows(table: Table) -> None:
    """A ready one can only be cancelled; those that have moved on, or have no row, stay."""
    names = ("same", "sooner", "far", "past", "gone", "ready", "handled", "x", "deleted")
    table.rows = dict.fromkeys(names, 1.0)
    table.rows |= {"new": 30, "handled": -0.3, "ready": -0.2}
    world = table.jobs.world()
    table.jobs.producer.send(TOPIC, 1, id="other", at_ms=table.due(1) or 0)
    table.load(since=datetime.fromtimestamp(table.now_ms / 1000 - 3600, UTC))
    world.promote()
    world.ack("lisa", world.take("lisa", 1))
    table.rows |= {"sooner": 0.5, "far": 50, "past": -9, "new": 2, "x": None}
    table.rows.pop("deleted")
    table.rows |= {"ready": 3, "handled": 3}
    gone = table.frame().selectExpr("*", "id = 'gone' OR id = 'ready' AS cancelled_at")
    options = {"job": "nightly", "due_within": DAY, "cancelled": "cancelled_at"}
    done = table.jobs.schedule(gone, **options)
    assert (done.accepted, done.rescheduled, done.cancelled) == (1, 0, 0)
    before = table.jobs.scores()
    done = table.jobs.schedule(gone, **options, sync=True)
    assert (done.rescheduled, done.cancelled) == (3, 2)
    moved = {name: table.due(table.rows[name]) or 0 for name in ("sooner", "far", "past")}
    before.pop("gone")
    assert table.jobs.scores() == before | moved
    done = table.jobs.schedule(gone, **options, sync=True)
    assert (done.accepted, done.rescheduled, done.cancelled) == (0, 0, 0)


def test_a_message_does_not_follow_several_rows_that_differ(
    table: Table, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as an old row and a new one, of which either may be cancelled."""
    table.rows = {"again": 20.0, "ended": 2.0, "twice": 2.0, "equal": 2.0}
    table.load()
    others = {"again": -7 * 24.0, "ended": 2.0, "twice": 3.0}
    table.rows["equal"] = 4.0
    rows: list[tuple[str, float | None, bool]]
    rows = [(name, due, False) for name, due in table.rows.items()]
    rows += [(name, due, name == "ended") for name, due in others.items()]
    rows += [("equal", 4.0, False)]
    given = [(name, name, table.due(due), gone) for name, due, gone in rows]
    frame = table.jobs.spark.createDataFrame(
        given, "id string, body string, due long, gone boolean"
    )
    before = table.jobs.scores()
    for moved in (1, 0):
        caplog.clear()
        options = {"job": "nightly", "due_within": DAY, "cancelled": "gone", "sync": True}
        done = table.jobs.schedule(frame, **options)
        assert (done.rescheduled, done.cancelled) == (moved, 0)
        assert table.jobs.scores() == before | {"equal": table.due(4)}
        assert "3 messages did not follow" in caplog.text
        assert caplog.text.strip().endswith("their ids: again, ended, twice")


def test_rows_with_keys_and_topics_are_followed(jobs: Jobs) -> None:
    rows = [
        ("a", "k", TOPIC, utc(1), ""),
        ("a", None, "mails", utc(2), ""),
        ("b", "k", TOPIC, utc(1), ""),
    ]
    content = "number,key,topic,due,gone\n"
    given = ["--id", "number", "--key", "key", "--job", "j", "--due-within", "1d"]
    given += ["--cancelled", "gone", "--sync", "--topic-column", "topic"]
    source = jobs.folder / "rows.csv"

    def run() -> str:
        source.write_text(content + "".join(f"{','.join(c or '' for c in row)}\n" for row in rows))
        words = (*given, "--body", "topic", "--redis", jobs.url)
        return jobs.command("schedule", str(source), *words).output

    run()
    rows[1] = ("a", None, "mails", "4102444800000", "")
    rows[2] = ("b", "k", TOPIC, utc(1), "yes")
    assert "1 rescheduled, 1 cancelled" in run()
    assert set(jobs.scores()) == {"k\x1fa"}
    assert jobs.scores(jobs.store.keys.topic("mails").waiting) == {"a": 4102444800000}


def test_a_delta_table_is_read_as_of_its_present_version(table: Table) -> None:
    """Its folder has files that do not count any more."""
    where, jobs = table.jobs.folder / "table{1}", table.jobs
    parts = ["a b/%=:", "2026-11-28 09:00", None, "plain"]

    def write(names: str, **more: Any) -> None:
        dues = [datetime.fromtimestamp(table.now_ms / 1000 + 3600, UTC)] * len(names)
        columns: dict[str, Any] = {"number": list(names), "send_at": dues}
        write_deltalake(where, pa.table(columns | {"part": parts[: len(names)]}), **more)

    write("xyz", partition_by=["part"])
    write("abcd", mode="overwrite", configuration={"delta.enableDeletionVectors": "true"})
    DeltaTable(where).delete("number = 'd'")
    given = ["--topic", TOPIC, "--redis", jobs.url, "--id", "number", "--due", "send_at"]
    given += ["--due-within", "1d", "--job", "j"]
    jobs.command("schedule", str(where), *given)
    assert {name: jobs.message(name).body for name in jobs.scores()} == {
        name: {"part": part} for name, part in zip("abc", parts, strict=False)
    }
    jobs.command("schedule", f"file://{where}", *given)
    DeltaTable(where).delete("true")
    jobs.command("schedule", str(where), *given)
    assert set(jobs.scores()) == set("abc")
    missing = jobs.command("schedule", str(jobs.folder), *given, "--format", "delta", code=2)
    assert str(jobs.folder) in missing.stderr


def test_the_files_of_a_delta_table_are_not_sent_without_its_log(jobs: Jobs) -> None:
    """The table may be what a pattern finds, or lie above or below what is read."""
    above = jobs.folder / "a, b{1}"
    for place in ("par", "par/day=1"):
        where = above / place / "dt=,"
        columns = {"id": ["a", "b"], "delay": ["1h", "1h"], "body": ["x", "y"], "part": ["1", "2"]}
        write_deltalake(where, pa.table(columns), partition_by=["part"])
        DeltaTable(where).delete("id = 'a'")
    given = ["--topic", TOPIC, "--redis", jobs.url]
    table, recursive = above / "par" / "dt=,", ["--read-option", "recursiveFileLookup=true"]
    pattern = str(jobs.folder / "a,*" / "par")
    for source, options in {
        str(table): ["--format", "parquet"],
        f"{pattern}/dt*": [],
        f"{pattern}/*/part=1": [],
        f"{pattern}/../par/dt*/part=*/*.parquet": [],
        f"file://{pattern}/dt*/part=1/part-*": [],
        str(table / "part=1"): [],
        str(next(table.glob("part=1/*.parquet"))): [],
        str(above): recursive,
    }.items():
        error = jobs.command("schedule", source, *given, *options, code=2).stderr
        found = str(above / "par/day=1/dt=,") if source == str(above) else str(table)
        assert f"{found} is a Delta table" in error, source
        assert "--format delta" in error
        assert len(error.splitlines()) == 1
    assert not jobs.scores()
    write_rows = pa.table({"id": ["c"], "delay": ["1h"], "body": ["z"]})
    write_table(write_rows, above / "rows.parquet")
    jobs.command("schedule", f"{jobs.folder}/a,*/*.parquet", *given)
    assert set(jobs.scores()) == {"c"}


def test_times_that_partition_a_delta_table_are_in_utc(jobs: Jobs) -> None:
    """Also if the session is in another zone; dates and decimals are as they were written."""
    where = jobs.folder / "table"
    due = datetime(2100, 3, 28, 1, 30, tzinfo=UTC)
    columns: dict[str, Any] = {
        "number": ["a", "b", "c"],
        "send_at": [due, due.replace(microsecond=5), datetime(2099, 7, 1, tzinfo=UTC)],
        "day": [date(2030, 1, 1), None, date(2030, 1, 2)],
        "price": [Decimal("1.10"), Decimal("2.00"), None],
    }
    write_deltalake(where, pa.table(columns), partition_by=["send_at", "day", "price"])
    given = ["--topic", TOPIC, "--redis", jobs.url, "--id", "number", "--due", "send_at"]
    jobs.spark.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    try:
        jobs.command("schedule", str(where), *given)
    finally:
        jobs.spark.conf.set("spark.sql.session.timeZone", "UTC")
    ms = round(due.timestamp() * 1000)
    assert jobs.scores() == {"a": ms, "b": ms + 1, "c": 4_086_547_200_000}
    bodies = [jobs.message(name).body for name in "abc"]
    assert bodies == [
        {"day": "2030-01-01", "price": "1.10"},
        {"day": None, "price": "2.00"},
        {"day": "2030-01-02", "price": None},
    ]
    for file in where.glob("*/*/*/*.parquet"):
        file.unlink()
    missing = jobs.command("schedule", str(where), *given, code=2).stderr
    assert f"{where}: data files of the table's present version are missing" in missing
    assert len(missing.splitlines()) == 1


@pytest.mark.parametrize(
    "feature", ["deletionVectors", "binary", "shifted", "columnMapping", "placed", "ü"]
)
def test_a_delta_table_that_its_files_do_not_tell_is_refused(jobs: Jobs, feature: str) -> None:
    where = jobs.folder / "table"
    named = {"delta.columnMapping.mode": "name"} if feature == "columnMapping" else {}
    part = feature.encode() if feature == "binary" else feature
    rows = pa.table({"number": ["a"], "send_at": [datetime.now(UTC)], "part": [part]})
    by = ["part"] if feature in ("placed", "ü", "binary") else None
    by = ["send_at"] if feature == "shifted" else by
    write_deltalake(where, rows, configuration=named, partition_by=by)
    log = where / "_delta_log" / f"{0:020}.json"
    actions = list(map(json.loads, log.read_text().splitlines()))
    (add,) = (action["add"] for action in actions if "add" in action)
    if feature == "placed":
        moved = add["path"].rpartition("/")[2]
        (where / add["path"]).rename(where / moved)
        add["path"] = moved
    if feature == "shifted":  # as Spark may name the folder if its session is not in UTC
        add["partitionValues"]["send_at"] = "2030-01-01T09:00:00.000000Z"
    if feature == "deletionVectors":
        (protocol,) = (action["protocol"] for action in actions if "protocol" in action)
        both = {"readerFeatures": [feature], "writerFeatures": [feature]}
        protocol |= {"minReaderVersion": 3, "minWriterVersion": 7, **both}
        first_row = struct.pack("<IQIIIHHIHxx", 1681511377, 1, 0, 12346, 1, 0, 0, 16, 0)
        digits, small, large = string.digits, string.ascii_lowercase, string.ascii_uppercase
        z85 = f"{digits}{small}{large}.-:+=^!/*?&<>()[]{{}}@%$#"
        same = str.maketrans(f"{digits}{large}{small}!#$%&()*+-;<=>?@^_`{{|}}~", z85)
        text = base64.b85encode(first_row).decode().translate(same)
        add["deletionVector"] = {
            "storageType": "i",
            "pathOrInlineDv": text,
            "sizeInBytes": 34,
            "cardinality": 1,
        }
    log.write_text("".join(json.dumps(action) + "\n" for action in actions))
    words = ("--topic", TOPIC, "--redis", jobs.url, "--id", "number", "--due", "send_at")
    done = jobs.command("schedule", str(where), *words, code=2)
    named = {"placed": "outside", "ü": "outside", "binary": "bytes", "shifted": "not in UTC"}
    assert named.get(feature, feature) in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not jobs.scores()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"job": None}, "needs a job name"),
        ({"due_within": timedelta(0)}, "more than 0"),
        ({"on_duplicate": "replace"}, "must be keep"),
        ({"due_within": None, "since": datetime.now(UTC)}, "need due_within"),
        ({"since": datetime(2026, 1, 1)}, "needs a time zone"),  # noqa: DTZ001
        ({"due_within": None, "sync": True}, "need due_within"),
    ],
)
def test_options_that_a_loader_cannot_have(
    table: Table, options: dict[str, Any], error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        table.load(**options)


def test_a_loader_has_due_times_and_one_topic(table: Table) -> None:
    with pytest.raises(ConfigError, match="needs a column 'due' or 'at_local'"):
        table.jobs.schedule(table.frame().drop("due"), job="j", due_within=DAY)
    for column in ("window", "at_local"):
        local = table.frame().selectExpr("*", f"'mon-fri' AS {column}")
        local = local.drop("due") if column == "at_local" else local
        with pytest.raises(ConfigError, match="neither 'at_local' nor 'window'"):
            table.jobs.schedule(local, job="j", due_within=DAY, sync=True)
    table.load()
    with pytest.raises(ConfigError, match="loads orders: give another job name"):
        table.load(topic="mails")


def test_loaders_are_listed_and_forgotten(table: Table) -> None:
    def loaders(*words: str, code: int = 0) -> str:
        done = CliRunner().invoke(main, ["loaders", "--redis", table.jobs.url, *words])
        assert done.exit_code == code, done.output
        return done.output

    table.load()
    table.age(13)
    done = CliRunner().invoke(main, ["doctor", "--redis", table.jobs.url, "--json"])
    (check,) = (one for one in json.loads(done.stdout)["checks"] if one["check"] == "loaders")
    assert check["verdict"] == "warn"
    assert re.fullmatch(r"nightly: no success for 13h.*", check["found"])
    assert re.search(r"nightly +late +orders +13h[ \d.ms]* ago +1d", loaders())
    (found,) = json.loads(loaders("--json"))
    assert (found["loader"], found["state"], found["horizon"]) == ("nightly", "late", "1d")
    assert "nightly" not in loaders("--forget", "nightly")
    assert "no loader 'nightly'" in loaders("--forget", "nightly", code=1)
    assert json.loads(loaders("--json")) == []


def test_the_handler_of_the_page(table: Table) -> None:
    """A schedule of Lisa repeats the loader."""
    url, folder = table.jobs.url, table.jobs.folder / "reminders"
    columns = ("id AS number", "body AS text", "timestamp_millis(due) AS send_at")
    table.rows = {"soon": 1, "later": 25}
    rows = table.frame().selectExpr(*columns, "CAST(null AS timestamp) AS cancelled_at")
    rows.write.parquet(str(folder))
    (program,) = blocks(ROOT / "docs/how-to/far-future.md", "python")
    program = program.replace(DEFAULT_URL, url).replace('"reminders")\n', f'"{folder}")\n')
    page: dict[str, Any] = {"__name__": "page"}
    exec(compile(program, "page", "exec"), page)  # noqa: S102
    waiting = table.jobs.store.keys.topic("mails").waiting
    with Manager(url), page["consumer"]:
        table.jobs.producer.run_schedule("loads", "load")
        wait_until(lambda: set(table.jobs.scores(waiting)) == {"soon"}, timeout=JVM_PATIENCE)
        assert table.jobs.message("soon", "mails").body == "soon"


LOAD = """
import sys
from datetime import timedelta
from lisa.pipeline import schedule, spark_session

url, source = sys.argv[1:]
spark = spark_session(app="load", master="local[2]")
rows = spark.read.parquet(source)
schedule(rows, url=url, topic="orders", job="nightly", due_within=timedelta(days=1), max_rate=150)
"""


def test_a_killed_loader_and_two_at_once_send_each_row_once(
    processes: Processes, table: Table
) -> None:
    """Also the rows without ids, of which some are equal."""
    jobs, source, count = table.jobs, table.jobs.folder / "table", 1_200
    rows = jobs.spark.range(0, count, 1, 4)
    due = f"timestamp_millis({table.due(1)} + id % 100 * 600000) AS due"
    rows.selectExpr("concat('body ', id % 50) AS body", due).write.parquet(str(source))
    sent = random.randrange(1, 400)
    killed = processes.start("-c", LOAD, jobs.url, str(source))
    wait_until(lambda: not killed.alive or len(table.ids()) >= sent, timeout=JVM_PATIENCE)
    killed.kill()
    killed.end()  # its JVM, too
    left = len(table.ids())
    assert sent <= left < count, killed.output
    assert not table.record.has_succeeded
    run = processes.start("-c", LOAD, jobs.url, str(source))
    wait_until(lambda: not run.alive or len(table.ids()) > left, timeout=JVM_PATIENCE)
    found = jobs.spark.read.parquet(str(source))
    done = jobs.schedule(found, job="nightly", due_within=DAY)
    assert (done.refused, len(table.ids())) == (0, count)
    assert run.wait(timeout=JVM_PATIENCE) == 0, run.output
    assert len(table.ids()) == count
    assert jobs.client.hget(KEYS.stats, "sent") == str(count).encode()
    assert table.record.topic == TOPIC
