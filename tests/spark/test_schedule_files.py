"""`lisa pipeline schedule` with files as other programs write them: formats, types, quotes."""

import bz2
import datetime as dt
import gzip
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd  # type: ignore[import-untyped]
import pyarrow as pa
import pytest
from pyarrow import orc
from pyarrow import parquet as pq

from tests.spark.jobs import KEYS, TOPIC, Jobs, bodies_of, errors, send

CSV = "id,delay,body\n1,1h,x\n2,2h,y\n"
JSON = '{"id": 1, "delay": "1h", "body": "x"}\n{"id": 2, "delay": "2h", "body": "y"}\n'


def write(jobs: Jobs, name: str, /, **columns: pa.Array) -> Path:
    """A Parquet file in the folder."""
    file = jobs.folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), file)
    return file


def refusal(jobs: Jobs, name: str, *options: str, content: str | bytes | None = None) -> str:
    """The only line of the command's error, after which nothing was sent."""
    done = send(jobs, content, "--job", "j", *options, name=name, code=2)
    (line,) = errors(done)
    assert not jobs.scores()
    return line


def test_durations_of_parquet_have_the_unit_of_the_file(jobs: Jobs) -> None:
    """In seconds, milliseconds, microseconds and nanoseconds; nothing is early."""
    minute = {"s": (60, 60_000), "ms": (60_001, 60_001), "us": (60_000_001, 60_001)}
    minute["ns"] = (60_000_000_001, 60_001)
    for unit, (value, _) in minute.items():
        durations = pa.array([value, None], pa.duration(unit))
        lists = pa.array([[value, 0], None], pa.list_(pa.duration(unit)))
        ids = pa.array([unit, f"{unit} null"])
        rest = {"delay": pa.array([value, 0], pa.duration(unit)), "body": ids}
        write(jobs, f"{unit}.parquet", id=ids, ttl=durations, retry=lists, slack=durations, **rest)
        send(jobs, None, "--slack", "slack", name=f"{unit}.parquet")
    ends, dues = jobs.scores(KEYS.expiry), jobs.scores()
    assert ends.keys() == minute.keys()
    for unit, (_, ms) in minute.items():
        assert ends[unit] - dues[unit] == ms
        policy = jobs.client.hget(KEYS.policy, unit)
        assert policy == f"{ms},0;;,{ms}".encode()
    pd.DataFrame({"id": ["pd"], "delay": [pd.Timedelta("1h")], "body": ["x"]}).to_parquet(
        jobs.folder / "pandas.parquet"
    )
    duckdb.sql(
        "COPY (SELECT 'duck' AS id, INTERVAL 1 HOUR AS delay, 'x' AS body) "
        f"TO '{jobs.folder}/duck.parquet'"
    )
    hour = pa.array([3_600_000])
    write(jobs, "bare.parquet", id=pa.array(["bare"]), delay=hour, body=pa.array(["x"]))
    for name in ("pandas", "duck", "bare"):
        send(jobs, None, name=f"{name}.parquet")
    due = jobs.scores()["bare"]
    assert all(abs(jobs.scores()[name] - due) < 600_000 for name in ("pd", "duck"))


def test_parquet_with_types_that_spark_does_not_read(jobs: Jobs) -> None:
    """They keep their values in a body; times are rounded up to a microsecond."""
    time = 4_102_444_800_000_000_001
    columns = {
        "naive": pa.array([time], pa.timestamp("ns")),
        "zoned": pa.array([time], pa.timestamp("ns", "Europe/Berlin")),
        "time": pa.array([dt.time(9)], pa.time64("us")),
        "lasts": pa.array([90_000_000_001], pa.duration("ns")),
        "half": pa.array([1.5], pa.float16()),
        "large": pa.array([1 << 63], pa.uint64()),
        "price": pa.array(["1.10"]).cast(pa.decimal128(10, 2)),
        "name": pa.array(["a"]).dictionary_encode(),
        "uuid": pa.array([bytes(16)], pa.uuid()),
        "nested": pa.array([[{"at": time, "of": {"a": 1}}]], pa.list_(NESTED)),
        "nothing": pa.array([None], pa.null()),
    }
    write(jobs, "all.parquet", **columns)
    (body,) = bodies_of(jobs, None, "--delay", "1h", name="all.parquet")
    assert body == {
        "naive": "2100-01-01T00:00:00.000001",
        "zoned": "2100-01-01T00:00:00.000001Z",
        "time": "09:00:00",
        "lasts": "PT90.000001S",
        "half": 1.5,
        "large": 1 << 63,
        "price": "1.10",
        "name": "a",
        "uuid": "00000000-0000-0000-0000-000000000000",
        "nested": [{"at": "2100-01-01T00:00:00.000001", "of": {"a": "PT0.000001S"}}],
        "nothing": None,
    }
    jobs.client.flushall()
    due = pa.array([time], pa.timestamp("ns", "UTC"))
    write(jobs, "due.parquet", id=pa.array(["ns"]), due=due, body=pa.array(["x"]))
    send(jobs, None, name="due.parquet")
    assert jobs.scores() == {"ns": 4_102_444_800_001}
    naive = due.cast(pa.timestamp("us"), safe=False)
    write(jobs, "naive.parquet", id=pa.array(["ns"]), due=naive, body=pa.array(["x"]))
    jobs.client.flushall()
    assert "have no zone: name it, as in --due due --tz UTC" in refusal(jobs, "naive.parquet")


NESTED = pa.struct([("at", pa.timestamp("ns")), ("of", pa.map_(pa.string(), pa.duration("ns")))])


def test_the_parquet_files_of_a_directory(jobs: Jobs) -> None:
    """Each has its own unit, partitions are columns, and no column is lost in silence."""
    hour = {"s": 3600, "ns": 3_600_000_000_000}
    for day, (unit, value) in enumerate(hour.items()):
        durations = pa.array([value] * 3, pa.duration(unit))
        file = write(jobs, f"days/day={day}/part-0", delay=durations, n=pa.array(range(3)))
    pq.write_table(pq.read_table(file, partitioning=None), file, row_group_size=1)
    (jobs.folder / "days" / "_SUCCESS").touch()
    bodies = bodies_of(jobs, None, name="days")
    assert sorted((body["day"], body["n"]) for body in bodies) == [
        (day, n) for day in "01" for n in range(3)
    ]
    due = list(jobs.scores().values())
    assert max(due) - min(due) < 600_000
    jobs.client.flushall()
    write(jobs, "days/day=1/part-1", delay=pa.array([1]), n=pa.array([1]))
    assert "part-1 differ: column 'delay' is " in refusal(jobs, "days")
    hours = pa.array([3600], pa.duration("s"))
    write(jobs, "days/day=1/part-1", delay=hours, n=pa.array([1]), more=pa.array([1]))
    assert "part-1 has a column 'more', " in (line := refusal(jobs, "days"))
    assert "add --read-option mergeSchema=true" in line
    merged = bodies_of(jobs, None, "--read-option", "mergeSchema=true", name="days")
    assert sorted(map(str, (body["more"] for body in merged))) == ["1", *["None"] * 6]
    jobs.client.flushall()


def write_orc(jobs: Jobs, name: str, /, **columns: pa.Array) -> None:
    file = jobs.folder / name
    file.parent.mkdir(exist_ok=True)
    orc.write_table(pa.table(columns), file)


def test_the_orc_files_of_a_directory(jobs: Jobs) -> None:
    """The rules are those of Parquet."""
    write_orc(jobs, "days/a.orc", id=pa.array(["a"]))
    write_orc(jobs, "days/b.orc", id=pa.array(["b"]), more=pa.array([1]))
    options = ("--body", "*", "--delay", "1h")
    assert "b.orc has a column 'more', " in (line := refusal(jobs, "days", *options))
    assert "add --read-option mergeSchema=true" in line
    send(jobs, None, "--read-option", "mergeSchema=true", *options, name="days")
    assert [jobs.message(one).body for one in "ab"] == [
        {"id": "a", "more": None},
        {"id": "b", "more": 1},
    ]
    jobs.client.flushall()
    write_orc(jobs, "days/a.orc", id=pa.array(["a"]), more=pa.array(["x"]))
    assert "b.orc differ: column 'more' is string and int64" in refusal(jobs, "days", *options)
    write_orc(jobs, "days/a.orc", id=pa.array(["a"]), more=pa.array([1], pa.int8()))
    send(jobs, None, *options, name="days")
    assert jobs.message("a").body == {"id": "a", "more": 1}


def test_times_of_orc_do_not_depend_on_the_zone_of_java(jobs: Jobs) -> None:
    """Those without a zone are wall times, and are due in the zone that --tz names."""
    gap = dt.datetime.fromisoformat("2100-03-28T02:30:00")  # not a time in Berlin
    walls = pa.array([gap, gap], pa.timestamp("us"))
    instant = pa.array([gap.replace(tzinfo=dt.UTC), None], pa.timestamp("us", "UTC"))
    within = pa.StructArray.from_arrays([pa.array([[gap], None], pa.list_(walls.type))], ["list"])
    times = {"due": walls, "instant": instant, "within": within}
    write_orc(jobs, "times.orc", id=pa.array(["wall", "null"]), **times)
    write_orc(jobs, "zoned.orc", id=pa.array(["zoned"]), due=instant[:1], body=pa.array(["x"]))
    by_spark = (
        "SELECT 'spark' AS id, timestamp_ntz'2100-03-28 02:30:00' AS due, "
        "interval '90' second AS ttl, array(interval '1' hour) AS list"
    )
    jvm: Any = jobs.spark._jvm
    zones = jvm.java.util.TimeZone
    before = zones.getDefault()
    sent: list[tuple[dict[str, int], dict[str, Any]]] = []
    for zone in ("Europe/Berlin", "America/New_York"):
        zones.setDefault(zones.getTimeZone(zone))
        jobs.client.flushall()
        try:
            if not sent:
                jobs.spark.sql(by_spark).write.orc(str(jobs.folder / "spark"))
            assert "have no zone: name it, as in --due due --tz UTC" in refusal(jobs, "times.orc")
            for name in ("times.orc", "spark"):
                send(jobs, None, "--due", "due", "--tz", "UTC", name=name)
            send(jobs, None, name="zoned.orc")
        finally:
            zones.setDefault(before)
        dues = jobs.scores()
        sent.append((dues, {name: jobs.message(name).body for name in dues}))
    assert sent[0] == sent[1]
    dues, bodies = sent[0]
    at = round(gap.replace(tzinfo=dt.UTC).timestamp() * 1000)
    assert dues == dict.fromkeys(["wall", "null", "spark", "zoned"], at)
    text = gap.isoformat()
    assert bodies["wall"] == {"instant": f"{text}Z", "within": {"list": [text]}}
    assert bodies["null"] == {"instant": None, "within": {"list": None}}
    assert bodies["spark"] == {"list": ["PT3600S"]}
    assert jobs.scores(KEYS.expiry)["spark"] - at == 90_000


def test_times_of_orc_that_arrow_does_not_read(jobs: Jobs) -> None:
    far = pa.array([dt.datetime.fromisoformat("9999-12-31")], pa.timestamp("us"))
    jobs.spark.sql("SELECT array(timestamp'2100-01-01') AS at").write.orc(
        str(jobs.folder / "spark")
    )
    assert "Spark wrote 'at' in the zone of its Java, " in refusal(jobs, "spark", "--delay", "1h")
    write_orc(jobs, "far.orc", at=far)
    line = refusal(jobs, "far.orc", "--delay", "1h", "--body", "*")
    assert "far.orc: ORC timestamp (253402214400s + 0ns) is out of range" in line
    plain = {"id": pa.array(["plain"]), "delay": pa.array([1]), "body": pa.array(["x"])}
    for name in ("both/a.orc", "both/b.orc"):
        write_orc(jobs, name, **plain)
    with away(jobs) as url:
        words = ("--topic", TOPIC, "--redis", jobs.url)
        (line,) = errors(jobs.command("schedule", f"{url}/far.orc", *words, code=2))
        assert "write it as Parquet" in line
        (line,) = errors(jobs.command("schedule", f"{url}/both", *words, code=2))
        assert "its columns are not compared with those of other files" in line
        jobs.command("schedule", f"{url}/both", *words, "--read-option", "mergeSchema=true")
    assert set(jobs.scores()) == {"plain"}


def test_types_that_differ_between_files(jobs: Jobs) -> None:
    """They are read if one type has all values as they are."""
    first = {"n": pa.array([1], pa.int32()), "text": pa.array([None], pa.null())}
    write(jobs, "types/1.parquet", **first, of=pa.array([{"a": 1}]))
    second = {"n": pa.array([1 << 40]), "text": pa.array(["x"])}
    write(jobs, "types/2.parquet", **second, of=pa.array([{"a": 1, "b": 2}]))
    assert "2.parquet has a column 'of.b', " in refusal(jobs, "types")
    merged = ("--read-option", "mergeSchema=true", "--delay", "1h")
    bodies = bodies_of(jobs, None, *merged, name="types")
    assert sorted(bodies, key=lambda body: int(body["n"])) == [
        {"n": 1, "text": None, "of": {"a": 1, "b": None}},
        {"n": 1 << 40, "text": "x", "of": {"a": 1, "b": 2}},
    ]
    jobs.client.flushall()
    write(jobs, "types/2.parquet", **first | {"n": pa.array(["1"])}, of=pa.array([{"a": 1}]))
    line = refusal(jobs, "types")
    assert "differ: column 'n' is " in line
    assert "write it with one type" in line


def test_any_name_of_a_parquet_file(jobs: Jobs) -> None:
    names = ["a[1]", "a{b,c}", "a:b", "a\\b", "a*", "a?", "a b%20", "a%41", "a#ü", "-a"]
    hour = pa.array([3600], pa.duration("s"))
    for name in names:
        write(jobs, f"all/d={name[:2]}/{name}.parquet", id=pa.array([name]), delay=hour)
    send(jobs, None, "--body", "*", name="all")
    assert set(jobs.scores()) == set(names)
    jobs.client.flushall()
    for name in names[:3]:
        send(jobs, None, "--body", "*", name=f"all/d={name[:2]}/{name}.parquet")
    assert set(jobs.scores()) == set(names[:3])


def test_durations_that_no_message_can_have(jobs: Jobs) -> None:
    text = pa.array(["x"])
    write(jobs, "long.parquet", id=text, delay=pa.array([1 << 62], pa.duration("s")), body=text)
    assert "long.parquet: column 'delay': " in refusal(jobs, "long.parquet")
    duckdb.sql(f"COPY (SELECT INTERVAL 1 MONTH AS delay) TO '{jobs.folder}/months.parquet'")
    line = refusal(jobs, "months.parquet", "--body", "*")
    assert "months.parquet: column 'delay': 1 months are no duration" in line


@contextmanager
def away(jobs: Jobs) -> Iterator[str]:
    """The folder as a URL that Hadoop opens, and Arrow does not."""
    hadoop: Any = jobs.spark._jsc.hadoopConfiguration()
    name = jobs.folder.name.replace("_", "-")  # Hadoop remembers the folder of a name
    link = f"fs.viewfs.mounttable.{name}.link./data"
    hadoop.set(link, jobs.folder.as_uri())
    try:
        yield f"viewfs://{name}/data"
    finally:
        hadoop.unset(link)


def test_files_that_only_hadoop_opens(jobs: Jobs) -> None:
    """Their durations are refused, because Arrow cannot read their unit there."""
    with away(jobs) as url:
        for name, kind in {"ms": pa.int64(), "unit": pa.duration("s")}.items():
            delay = pa.array([3_600_000], kind)
            write(jobs, f"{name}.parquet", id=pa.array([name]), delay=delay, body=pa.array(["x"]))
        words = ("--topic", TOPIC, "--redis", jobs.url)
        (line,) = errors(jobs.command("schedule", f"{url}/unit.parquet", *words, code=2))
        assert "write 'delay' as text, as in '90s'" in line
        jobs.command("schedule", f"{url}/ms.parquet", *words)
    assert set(jobs.scores()) == {"ms"}


def zst(content: bytes) -> bytes:
    """Content as the program zstd compresses it."""
    packed: bytes = pa.compress(content, "zstd", asbytes=True)
    return packed


@pytest.mark.parametrize(
    ("ending", "compress"), [(".gz", gzip.compress), (".bz2", bz2.compress), (".zst", zst)]
)
def test_compressed_text(jobs: Jobs, ending: str, compress: Callable[[bytes], bytes]) -> None:
    tsv = CSV.replace(",", "\t")
    for name, content in {"a.csv": CSV, "a.tsv": tsv, "a.json": JSON}.items():
        jobs.client.flushall()
        packed = compress(content.encode())
        send(jobs, packed, name=name + ending)
        assert [jobs.message(one).body for one in jobs.scores()] == ["x", "y"]
    jobs.client.flushall()
    assert f"is not csv but {ending}: add {ending} to its name" in refusal(
        jobs, "b.csv", content=packed
    )
    send(jobs, packed[:30], name=f"cut.json{ending}", code=1)


def test_formats_are_found_or_asked_for(jobs: Jobs) -> None:
    table = pa.table({"id": ["a"], "delay": ["1h"], "body": ["x"]})
    orc.write_table(table, jobs.folder / "rows.orc")
    orc.write_table(table, jobs.folder / "000000_0")
    for name in ("rows.orc", "000000_0"):
        jobs.client.flushall()
        send(jobs, None, name=name)
        assert jobs.message("a").body == "x"
    for name in ("rows.txt", "part-00000", "rows"):
        jobs.client.flushall()
        line = refusal(jobs, name, content=CSV)
        assert f"{name}: its name does not tell its format: name it, as in --format csv" in line
        send(jobs, None, "--format", "csv", name=name)
        assert jobs.message("1").body == "x"
    jobs.client.flushall()
    tsv = CSV.replace(",", "\t")
    send(jobs, tsv, "--format", "tsv", name="rows.txt")
    assert jobs.message("2").body == "y"
    jobs.client.flushall()
    sheet = b"PK\x03\x04..."
    assert "Spark does not read .xlsx: save the sheet as CSV" in refusal(
        jobs, "a.xlsx", content=sheet
    )
    assert "a.csv is not csv but .zip, perhaps a spreadsheet" in refusal(
        jobs, "a.csv", content=sheet
    )
    for ending in (".xz", ".zip"):
        name = f"a.csv{ending}"
        assert f"{name}: Spark does not read {ending}: unpack it" in refusal(
            jobs, name, "--format", "csv", content=b"..."
        )
    folder = jobs.folder / "both"
    folder.mkdir()
    assert "both: there is no file" in refusal(jobs, "both")
    for name, content in {"a.csv": CSV, "b.json": JSON}.items():
        (folder / name).write_text(content, "utf-8")
    assert "both has files of several formats" in refusal(jobs, "both")
    send(jobs, None, "--read-option", "pathGlobFilter=*.json", name="both")
    assert set(jobs.scores()) == {"1", "2"}
    jobs.client.flushall()
    (folder / "b.json").rename(folder / "README.md")
    line = refusal(jobs, "both")
    assert "README.md: its name does not tell its format: leave it out" in line
    send(
        jobs,
        None,
        "--read-option",
        re.findall("pathGlobFilter='.*'", line)[0].replace("'", ""),
        name="both",
    )
    assert set(jobs.scores()) == {"1", "2"}


def test_the_headers_of_csv_files_are_compared_before_a_row_is_sent(jobs: Jobs) -> None:
    folder = jobs.folder / "many"
    folder.mkdir()
    (folder / "a.csv").write_text(CSV, "utf-8")
    (folder / "empty.csv").touch()
    (folder / "b.csv").write_text('\ufeff\n"id","delay",body\r\n3,1h,z\r\n', "utf-8")
    send(jobs, None, name="many")
    assert set(jobs.scores()) == {"1", "2", "3"}
    jobs.client.flushall()
    for header in ("delay,id,body", "id,delay", "id,delay,body,more", "id;delay;body"):
        (folder / "b.csv").write_text(f"{header}\n3,1h,z\n", "utf-8")
        for options in ((), ("--read-option", "header=true")):
            line = refusal(jobs, "many", *options)
            assert f"{folder}/a.csv and {folder}/b.csv have different headers" in line


def test_parquet_with_names_that_spark_takes_for_one(jobs: Jobs) -> None:
    columns = pa.table([["a"], ["b"], [1]], names=["Id", "id", "n"])
    for names in (["Id", "id", "n"], ["id", "n", "id"]):
        pq.write_table(columns.rename_columns(names), jobs.folder / "rows.parquet")
        line = refusal(jobs, "rows.parquet", "--delay", "1h")
        assert f"rows.parquet has columns {names[0]!r} and 'id', which" in line


def test_a_file_that_is_not_complete(jobs: Jobs) -> None:
    for name, content in {"cut.csv.gz": CSV, "cut.json.gz": JSON}.items():
        packed = gzip.compress(content.encode() * 1000)[:60]
        done = send(jobs, packed, "--job", "j", name=name, code=1)
        (line,) = errors(done)
        assert f"{name}. Unexpected end of input stream: the file is truncated" in line
    file = write(jobs, "rows.parquet", id=pa.array(["a"]), n=pa.array([1]))
    whole = file.read_bytes()
    assert "not complete" in refusal(jobs, "cut.parquet", content=whole[:-9])


OPEN = "id,delay,body\n1,1h,{}\n2,1h,y\n3,1h,z\n"


@pytest.mark.parametrize("value", ['"x', '"x"y"', '"say \\"hi\\""', '"ab"c'])
@pytest.mark.parametrize("mode", ["lines", "multiLine", "utf-16"])
def test_a_quote_that_is_not_closed(jobs: Jobs, value: str, mode: str) -> None:
    """It would take the rest of the line or file for its value, or remain in it."""
    content: str | bytes = OPEN.format(value)
    options = () if mode == "lines" else ("--read-option", "multiLine=true")
    if mode == "utf-16":
        content = OPEN.format(value).encode("utf-16")
        options = ("--read-option", "encoding=UTF-16")
    line = refusal(jobs, "orders.csv", *options, content=content)
    assert "orders.csv: a quote is not closed, or is not the end of a value" in line
    is_escaped = "\\" in value and mode == "lines"
    assert ("add --read-option escape=\\ " in line) == is_escaped
    send(jobs, None, *options, "--read-option", "quote=")
    assert jobs.message("1").body == value


def test_quotes_in_values(jobs: Jobs) -> None:
    values = ['5" nail', '"5"" nail"', '"a, b"', '""""', 'a""b', '"x" ']
    content = "id\tdelay\tbody\n" + "".join(f"{n}\t1h\t{v}\n" for n, v in enumerate(values))
    send(jobs, content, name="rows.tsv")
    bodies = [jobs.message(str(number)).body for number in range(len(values))]
    assert bodies == ['5" nail', '5" nail', "a, b", '"', 'a""b', "x"]
    jobs.client.flushall()
    lines = 'id,delay,body\n# "a comment\n1,1h,"a\nb ""c"""\n'
    assert "multiLine=true if values have line breaks" in refusal(jobs, "orders.csv", content=lines)
    options = ("--read-option", "multiLine=true", "--read-option", "comment=#")
    send(jobs, None, *options)
    assert jobs.message("1").body == 'a\nb "c"'


def test_names_in_capitals_are_named(jobs: Jobs) -> None:
    """Snowflake exports them; a ttl that stayed in the body without a word would be lost."""
    content = "ID,DUE,TTL,n\n1,2100-01-01 00:00:00.000 Z,60000,1\n"
    done = send(jobs, content, "--id", "ID", "--due", "DUE")
    assert errors(done) == ["lisa: the column 'TTL' is data; --ttl 'TTL' would use it"]
    assert jobs.message("1").body == {"TTL": 60000, "n": 1}
    named = send(jobs, None, "--id", "ID", "--due", "DUE", "--ttl", "TTL", "--body", "*")
    assert not errors(named)


def test_settings_of_the_session_do_not_change_what_is_sent(jobs: Jobs) -> None:
    """Apart from the zone of times: those without one are in the session's."""
    times = ("2100-01-01 00:00:00+01", "2100-01-01T00:00Z", "4102444800000", "2100-01-01 00:00")
    content = "id,due,n\n" + "".join(f"{n},{time},{n}.50\n" for n, time in enumerate(times))
    zoned = pa.array([4_102_444_800_000_000_001], pa.timestamp("ns", "Asia/Tokyo"))
    at = zoned.cast(pa.timestamp("us", "UTC"), safe=False)
    within = pa.StructArray.from_arrays([pa.array([[at[0].as_py(), None]]), at], ["list", "one"])
    pairs = pa.array([[("k", at[0].as_py())]], pa.map_(pa.string(), at.type))
    lasts = pa.array([1], pa.duration("s"))
    rest = {"n": pa.array([1.5]), "lasts": lasts, "within": within, "map": pairs}
    write(jobs, "derived.parquet", due=zoned, at=zoned, **rest)
    write(jobs, "ns.parquet", id=pa.array(["ns"]), due=zoned, at=zoned, **rest)
    settings = {"spark.sql.ansi.enabled": "false", "spark.sql.session.timeZone": "America/New_York"}
    sent = []
    for changed in ({}, settings):
        jobs.client.flushall()
        for name, value in changed.items():
            jobs.spark.conf.set(name, value)
        try:
            done = send(jobs, content + "x,09:00,1\n", code=1)
            send(jobs, None, name="ns.parquet")
            send(jobs, None, "--job", "j", name="derived.parquet")
        finally:
            jobs.spark.conf.unset("spark.sql.ansi.enabled")
            jobs.spark.conf.set("spark.sql.session.timeZone", "UTC")
        assert "refused orders x: cannot be read: due=09:00" in done.stderr
        dues = jobs.scores()
        bodies = {name: jobs.message(name).body for name in dues}
        sent.append((dues, bodies))
    (plain, first), (other, second) = sent
    assert first == second
    assert first["ns"]["within"]["list"] == ["2100-01-01T00:00:00Z", None]
    assert first["ns"]["map"] == {"k": "2100-01-01T00:00:00Z"}
    assert other.pop("3") - plain.pop("3") == 5 * 3_600_000
    assert plain == other
    assert plain["ns"] == 4_102_444_800_001


PARTITIONED = {
    "csv": lambda file, rows: file.write_text(pd.DataFrame(rows).to_csv(index=False), "utf-8"),
    "json": lambda file, rows: pd.DataFrame(rows).to_json(file, orient="records", lines=True),
    "parquet": lambda file, rows: pq.write_table(pa.Table.from_pylist(rows), file),
    "by Arrow.parquet": lambda file, rows: pq.write_table(
        pa.Table.from_pylist([{**row, "time": dt.time(9)} for row in rows]), file
    ),
    "orc": lambda file, rows: orc.write_table(pa.Table.from_pylist(rows), file),
}
"""Endings of names -> how to write rows to such a file."""


@pytest.mark.parametrize("ending", PARTITIONED)
def test_folders_of_partitions(jobs: Jobs, ending: str) -> None:
    """Their texts are values as they are, whatever other folders are named, if files have none."""

    def file(folder: str, *rows: dict[str, object]) -> Path:
        made = jobs.folder / "all" / folder / f"part.{ending}"
        made.parent.mkdir(parents=True, exist_ok=True)
        PARTITIONED[ending](made, [{"n": "a", **row} for row in rows])
        return made

    def sent(*options: str) -> dict[Any, Any]:
        bodies = bodies_of(jobs, None, *options, name="all")
        return {body["zip"]: (body["n"], body["path"]) for body in bodies}

    file("day=2100-01-01/zip=007/path=x y", {})
    file("day=2100-01-01/zip=1/path=a%3A+%C3%BC%", {})
    file("day=2100-01-01/zip=__HIVE_DEFAULT_PARTITION__/path=ü%2", {})
    one = 1 if ending == "csv" else "1"
    first = {"007": ("a", "x y"), one: ("a", "a:+ü%"), None: ("a", "ü%2")}
    assert sent("--due", "day") == first
    assert set(jobs.scores().values()) == {4_102_444_800_000}
    more = file("day=2100-01-02/zip=main/path=z", {})
    assert sent("--due", "day") == {**first, "main": ("a", "z")}
    assert len(jobs.scores()) == 4
    jobs.client.flushall()
    send(jobs, None, "--id", "zip", "--delay", "1h", name="all/day=2100-01-02")
    assert jobs.message("main").body["path"] == "z"
    jobs.client.flushall()
    more.rename(more.parents[1] / more.name)
    line = refusal(jobs, "all", "--delay", "1h")
    assert "zip=main/part." in line
    assert "are in folders of different partitions: load them one by one, or without" in line
    given = ("--read-option", "recursiveFileLookup=true", "--delay", "1h")
    send(jobs, None, "--job", "j", *given, name="all")
    assert len(jobs.scores()) == 4


def test_columns_that_are_in_files_and_in_the_names_of_folders(jobs: Jobs) -> None:
    """The files count, as of DuckDB, which may write both."""
    rows = "SELECT '1' AS id, '00' AS n, '1h' AS delay"
    for more in "", ", TIME '09:00' AS time":
        jobs.client.flushall()
        by = "FORMAT parquet, PARTITION_BY (n), WRITE_PARTITION_COLUMNS true, OVERWRITE true"
        duckdb.sql(f"COPY ({rows}{more}) TO '{jobs.folder}/duck' ({by})")
        send(jobs, None, name="duck")
        assert jobs.message("1").body["n"] == "00"
    for name, content in {
        "x.csv": "id,N\n2,b\n",
        "x.jsonl": '{"id": "3", "n": "b"}\n{"id": "4"}',
    }.items():
        folder = jobs.folder / name[2:] / "n=a"
        folder.mkdir(parents=True)
        (folder / name).write_text(content, "utf-8")
        send(jobs, None, "--delay", "1h", name=name[2:])
    assert jobs.message("2").body == {"N": "b"}
    assert [jobs.message(one).body["n"] for one in "34"] == ["b", "a"]


def test_where_partitions_begin(jobs: Jobs) -> None:
    """Below the source, the start of a pattern or `basePath`."""
    file = jobs.folder / "a=1" / "data[1]" / "b=2" / "c=3" / "x.csv"
    file.parent.mkdir(parents=True)
    file.write_text("n\n0\n", "utf-8")
    base = ("--read-option", f"basePath={jobs.folder}/a=1")
    for name, options, names in (
        ("a=1", ("--read-option", "recursiveFileLookup=true"), set()),
        ("a=1/data[1]", (), {"b", "c"}),
        ("a=1/data*/b=?", (), {"b", "c"}),
        ("a=1/data[1]/b=2", (), {"c"}),
        ("a=1/data[1]/b=2", base, {"b", "c"}),
        ("a=1/data[1]/b=2/c=3/x.csv", base, {"b", "c"}),
        ("a=1/data[1]/b=2/c=3/x.csv", (), set()),
    ):
        jobs.client.flushall()
        (body,) = bodies_of(jobs, None, "--delay", "1h", *options, name=name)
        assert body.keys() == {"n", *names}, (name, options)
    jobs.client.flushall()
    assert "x.csv is in another folder" in refusal(jobs, "a=1/data[1]", base[0], "basePath=/b")
    assert "is in a folder within" in refusal(jobs, "a=1")
    (file.parents[1] / "b=3").mkdir()
    file.rename(file.parents[1] / "b=3" / file.name)
    assert "x.csv is in several folders of one partition" in refusal(jobs, "a=1/data[1]")
