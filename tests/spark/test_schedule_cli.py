"""`lisa pipeline schedule`, as the program that users run."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from click.testing import CliRunner, Result
from pyspark.sql import SparkSession

from lisa import Producer
from lisa.cli.main import main
from lisa.cli.pipeline import JOBS
from lisa.core.model.keys import Keys
from tests.servers import JVM_PATIENCE, Processes

TOPIC = "orders"
KEYS = Keys().topic(TOPIC)


def test_sending_a_parquet_file_twice_adds_nothing(
    pipeline: Callable[..., Result],
    spark: SparkSession,
    redis_url: str,
    client: redis.Redis,
    tmp_path: Path,
) -> None:
    source, report = tmp_path / "rows", tmp_path / "report.json"
    spark.range(0, 3000, 1, 3).selectExpr("id", "concat('body ', id) AS body").write.parquet(
        str(source)
    )
    words = ("--topic", TOPIC, "--delay", "30m", "--report", str(report), "--json")
    arguments = ("schedule", str(source), *words, "--redis", redis_url)
    first = pipeline(*arguments)
    assert first.exit_code == 0, first.output
    assert json.loads(first.stdout.strip().splitlines()[-1])["accepted"] == 3000
    again = pipeline(*arguments)
    assert again.exit_code == 0, again.output
    told = json.loads(report.read_text("utf-8"))
    assert (told["accepted"], told["duplicate"]) == (0, 3000)
    assert client.zcard(KEYS.waiting) == 3000


def test_rows_without_ids_cost_the_driver_no_memory(
    pipeline: Callable[..., Result],
    spark: SparkSession,
    redis_url: str,
    client: redis.Redis,
    tmp_path: Path,
) -> None:
    """12 bytes for each of these rows would exceed the driver's limit."""
    source, rows = tmp_path / "rows", 60_000
    spark.range(0, rows, 1, 2).selectExpr("id AS n").write.parquet(str(source))
    context: Any = spark.sparkContext
    settings, name = context._jsc.sc().conf(), "spark.driver.maxResultSize"
    settings.set(name, "512k")
    try:
        with pytest.raises(Exception, match=name):  # the limit applies
            spark.range(0, rows, 1, 2).selectExpr("id", "id AS n").rdd.collect()
        words = ("--topic", TOPIC, "--delay", "30m", "--job", "j", "--redis", redis_url)
        done = pipeline("schedule", str(source), *words)
    finally:
        settings.set(name, "1g")
    assert done.exit_code == 0, done.output
    assert client.zcard(KEYS.waiting) == rows


def test_csv_columns_are_mapped_and_refused_rows_mean_exit_code_1(
    pipeline: Callable[..., Result], redis_url: str, client: redis.Redis, tmp_path: Path
) -> None:
    source, refused = tmp_path / "campaign.csv", tmp_path / "refused"
    source.write_text(
        "number,when,name\n007,2100-01-01T00:00:00.0001Z,Ann\n008,4102444800123,Bob\n009,soon,Cid\n"
    )
    columns = ("--topic", TOPIC, "--id", "number", "--due", "when", "--ttl", "1h")
    more = ("--retry", "0,2m", "--refused", str(refused), "--redis", redis_url)
    run = pipeline("schedule", str(source), *columns, *more)
    assert run.exit_code == 1, run.output
    assert "refused orders 009: cannot be read: due=soon" in run.output
    found_dues: Any = client.zrange(KEYS.waiting, 0, -1, withscores=True)
    assert dict(found_dues) == {b"007": 4102444800001, b"008": 4102444800123}
    with Producer(redis_url) as producer:
        found = producer.get(TOPIC, "007")
        assert found is not None
        assert found.body == {"name": "Ann"}
    (lines,) = [file.read_text("utf-8") for file in refused.iterdir()]
    (refusal,) = map(json.loads, lines.splitlines())
    assert (refusal["id"], refusal["row"]["_corrupt_record"]) == ("009", "due=soon")


def test_spark_submit_runs_the_module_and_json_lines_are_numbered_by_the_job(
    processes: Processes, redis_url: str, client: redis.Redis, tmp_path: Path
) -> None:
    """Run the module as a program with spark-submit."""
    import lisa.cli.pipeline.schedule as job

    source = tmp_path / "rows.jsonl"
    source.write_text('{"a": 1}\n' * 5 + "{broken\n", "utf-8")
    submit = Path(sys.executable).with_name("spark-submit")
    program = f"import os, sys; os.execv({str(submit)!r}, [{str(submit)!r}, *sys.argv[1:]])"
    settings = [
        "--conf=spark.driver.host=127.0.0.1",
        "--conf=spark.ui.enabled=false",
        "--conf=spark.driver.bindAddress=127.0.0.1",
    ]
    words = ("--topic", TOPIC, "--delay", "1h", "--job", "friday", "--redis", redis_url)
    run = processes.start(
        *("-c", program, "--master", "local[2]", "--driver-memory", "1g", *settings),
        *(str(job.__file__), str(source), *words),
        env={"PYSPARK_PYTHON": sys.executable},
    )
    assert run.wait(timeout=JVM_PATIENCE) == 1, run.output  # for the broken line
    assert client.zcard(KEYS.waiting) == 5
    with Producer(redis_url) as producer:
        ids: Any = client.zrange(KEYS.waiting, 0, -1)
        found = producer.get(TOPIC, ids[0].decode())
        assert found is not None
        assert found.body == {"a": 1}


ORDERS = """order,delay,price,paid,zip,note,big
41,60000,1.50,true,00123,,123456789012345678
-42,3600000,20,false,10115,5,1234567890123456789
"""


@pytest.fixture
def bodies_of(
    pipeline: Callable[..., Result], redis_url: str, client: redis.Redis, tmp_path: Path
) -> Callable[..., list[Any]]:
    """Schedule a file with options; returns the bodies of its messages, in the order of due."""

    def send(content: str, *options: str, name: str = "orders.csv") -> list[Any]:
        source = tmp_path / name
        source.write_text(content, "utf-8")
        arguments = (str(source), "--topic", TOPIC, "--job", "j", "--redis", redis_url, *options)
        result = pipeline("schedule", *arguments)
        assert result.exit_code == 0, result.output
        ids: Any = client.zrange(KEYS.waiting, 0, -1)
        with Producer(redis_url) as producer:
            found = [producer.get(TOPIC, one.decode()) for one in ids]
        return [one.body for one in found if one is not None]

    return send


def test_a_csv_delivers_numbers_without_the_columns_of_other_parts(
    bodies_of: Callable[..., list[Any]],
) -> None:
    first = {"order": 41, "price": 1.5, "paid": True, "zip": "00123", "note": None}
    second = {"order": -42, "price": 20.0, "paid": False, "zip": "10115", "note": 5}
    big = "123456789012345678"
    assert bodies_of(ORDERS) == [first | {"big": big}, second | {"big": f"{big}9"}]


def test_durations_of_a_csv_are_text_or_milliseconds(
    pipeline: Callable[..., Result], redis_url: str, client: redis.Redis, tmp_path: Path
) -> None:
    source = tmp_path / "durations.csv"
    source.write_text(
        "id,delay,ttl,body\ntext,1h30m,30m,x\nnumber,5400000,1800000,x\nempty,1h,,x\n"
        "wrong,1h,half an hour,x\n",
        "utf-8",
    )
    done = pipeline("schedule", str(source), "--topic", TOPIC, "--redis", redis_url)
    assert done.exit_code == 1
    assert "refused orders wrong: ttl: not a duration: 'half an hour'" in done.output
    dues, ends = (
        dict[Any, Any](client.zrange(key, 0, -1, withscores=True))  # type: ignore[arg-type]
        for key in (KEYS.waiting, KEYS.expiry)
    )
    assert dues[b"text"] == dues[b"number"] == dues[b"empty"] + 1_800_000
    assert ends == {name: dues[name] + 1_800_000 for name in (b"text", b"number")}


def test_quotes_commas_and_backslashes_in_a_csv(bodies_of: Callable[..., list[Any]]) -> None:
    texts = ['{"a": 1, "b": "x"}', 'say "hi", then go', "C:\\new, or C:\\", '"']
    written = io.StringIO()
    writer = csv.writer(written)
    writer.writerow(["delay", "body", "other"])
    writer.writerows([60_000 * (1 + n), text, n] for n, text in enumerate(texts))
    assert bodies_of(written.getvalue()) == texts


def test_a_csv_with_backslashes_before_quotes(bodies_of: Callable[..., list[Any]]) -> None:
    content = 'delay,body\n60000,"say \\"hi\\", then go"\n'
    assert bodies_of(content, "--read-option", "escape=\\") == ['say "hi", then go']


def test_types_can_be_declared_and_the_whole_row_asked_for(
    bodies_of: Callable[..., list[Any]],
) -> None:
    bodies = bodies_of(ORDERS, "--schema", "order string, price double")
    assert [(body["order"], body["price"], body["note"]) for body in bodies] == [
        *(("41", 1.5, None), ("-42", 20.0, "5"))
    ]
    assert bodies_of("order,delay\n41,1\n", "--body", "*")[0] == {"order": 41, "delay": 1}
    lines = '{"order": 41, "delay": 2, "other": 1}\n'
    declared = ("--schema", "order string, delay long")
    assert bodies_of(lines, *declared, name="a.jsonl")[1] == {"order": "41"}
    # Only a CSV lacks types.
    text = '{"order": "43", "delay": 3}\n'
    assert bodies_of(text, name="b.jsonl")[2] == {"order": "43"}


@pytest.mark.parametrize("options", [(), ("--schema", "order long"), ("--body", "note")])
def test_lines_of_a_csv_that_do_not_fit_are_refused(
    pipeline: Callable[..., Result],
    redis_url: str,
    client: redis.Redis,
    tmp_path: Path,
    options: tuple[str, ...],
) -> None:
    """With too many or too few values, or a value that is not of its declared type."""
    source = tmp_path / "orders.csv"
    source.write_text(
        'order,note,delay\n1,a,60000\n2,b, c,60000\n3,60000\n4,"d\ne",60000\nforty,f,60000\n'
    )
    arguments = ("--topic", TOPIC, "--job", "j", "--redis", redis_url, *options)
    result = pipeline("schedule", str(source), *arguments)
    assert result.exit_code == 1, result.output
    assert "2,b, c,60000" in result.output
    fits = 1 if "--schema" in options else 2
    assert ("order=forty" in result.output) == (fits == 1)
    assert client.zcard(KEYS.waiting) == fits
    if not options:
        again = pipeline("schedule", str(source), *arguments, "--read-option", "multiLine=true")
        assert again.exit_code == 1, again.output
        assert client.zcard(KEYS.waiting) == fits + 1


def test_text_of_a_csv_that_is_not_utf8_is_refused(
    pipeline: Callable[..., Result], redis_url: str, client: redis.Redis, tmp_path: Path
) -> None:
    source = tmp_path / "names.csv"
    source.write_bytes("id,name\n1,Zoë\n2,Ann\n".encode("iso-8859-1"))
    arguments = ("--topic", TOPIC, "--delay", "1h", "--redis", redis_url)
    result = pipeline("schedule", str(source), *arguments)
    assert result.exit_code == 1, result.output
    assert "name=Zo\ufffd is not UTF-8; name the encoding" in result.output
    assert client.zrange(KEYS.waiting, 0, -1) == [b"2"]
    again = pipeline("schedule", str(source), *arguments, "--read-option", "encoding=iso-8859-1")
    assert again.exit_code == 0, again.output
    with Producer(redis_url) as producer:
        found = producer.get(TOPIC, "1")
    assert found is not None
    assert found.body == {"name": "Zoë"}


@pytest.mark.parametrize("options", [(), ("--schema", "id string, name string")])
def test_json_lines_that_are_not_utf8_are_refused(
    pipeline: Callable[..., Result],
    redis_url: str,
    client: redis.Redis,
    tmp_path: Path,
    options: tuple[str, ...],
) -> None:
    source = tmp_path / "names.jsonl"
    lines = '{"id": "1", "name": "Zoë"}\n{"id": "2", "name": "Ann"}\n'
    source.write_bytes(lines.encode("iso-8859-1"))
    result = pipeline("schedule", str(source), "--topic", TOPIC, "--redis", redis_url, *options)
    assert result.exit_code == 1, result.output
    assert 'cannot be read: {"id": "1", "name": "Zo\ufffd"}' in result.output
    assert client.zrange(KEYS.waiting, 0, -1) == [b"2"]


def test_columns_may_have_any_name_and_the_separator_that_is_named(
    bodies_of: Callable[..., list[Any]],
) -> None:
    assert bodies_of("a`b,c.d,e f,delay\n1,2,3,1h\n")[0] == {"a`b": 1, "c.d": 2, "e f": 3}
    for number, (separator, option) in enumerate(((";", "sep=;"), ("\t", r"sep=\t"))):
        content = f"order{separator}delay\n{number}{separator}{number + 2}h\n"
        assert bodies_of(content, "--read-option", option)[-1] == {"order": number}


def test_wrong_input_means_exit_code_2_and_one_line(
    pipeline: Callable[..., Result], redis_url: str, tmp_path: Path
) -> None:
    source = tmp_path / "rows"
    csvs = [
        ("id;body\n1;x\n", "name its separator, --read-option sep=';'"),
        ("id\tbody\n1\tx\n", "name its separator, --read-option sep='\\t'"),
        ("id,name,Name\n1,x,y\n", "the CSV has several columns 'name': rename all but one"),
        ("", "the CSV is empty; its first line must name the columns"),
    ]
    row = '{"id": "a", "body": "x"}'
    wrong: list[tuple[str | None, tuple[str, ...], str]] = [
        (None, (), "Path does not exist"),
        *((content, ("--job", "j", "--format", "csv"), words) for content, words in csvs),
        (row, ("--due", "when"), "--due: no column 'when'"),
        (row, ("--delay", "soon"), "--delay: 'soon' is neither a column"),
        (row, ("--read-option", "encoding=klingon"), "klingon"),
        ('{"body": "x"}', (), "give option 'job'"),
        ('{"id": "a", "delay": 1}', (), "no column is left for the body (delay, id)"),
        ('{"id": "a", "a": "x"}', ("--schema", "id text"), "data type"),
        ('{"id": "a", "body": 5}', ("--body", "body"), "column 'body' has type bigint"),
        # Usage is checked before Spark starts.
        (row, ("--topic-column", "b"), "--topic"),
        (row, ("--due", "a", "--delay", "b"), "--delay"),
        (row, ("--spark-conf", "memory"), "--spark-conf"),
        (row, ("--read-option", "sep"), "--read-option"),
        (row, ("--max-rate", "0"), "--max-rate"),
    ]
    for content, options, words in wrong:
        if content is not None:
            source.write_text(content, "utf-8")
        kind = () if "--format" in options else ("--format", "json")
        command = ("schedule", str(source), "--topic", TOPIC, *kind, *options)
        result = pipeline(*command, "--redis", redis_url)
        assert result.exit_code == 2, result.output
        assert words in result.stderr
        assert result.stderr.count("\n") == 1
    broken = tmp_path / "rows.parquet"
    broken.write_bytes(b"PAR1 this is no parquet PAR1")
    failed = pipeline("schedule", str(broken), "--topic", TOPIC, "--redis", redis_url)
    assert failed.exit_code == 1
    assert failed.output.strip().splitlines()[-1].startswith("lisa: Spark failed: ")
    source.write_text(row, "utf-8")
    away = ("--redis", "redis://127.0.0.1:1/0", "--patience", "100ms", "--format", "json")
    unreachable = pipeline("schedule", str(source), "--topic", TOPIC, *away)
    assert unreachable.exit_code == 3
    last = unreachable.output.strip().splitlines()[-1]
    assert last.startswith("lisa: redis://127.0.0.1:1/0 does not answer")
    assert "Traceback" not in unreachable.output


def test_ended_messages_are_sent_again_with_keep_live(
    pipeline: Callable[..., Result], redis_url: str, tmp_path: Path
) -> None:
    source = tmp_path / "orders.csv"
    source.write_text("id,body\nlive,x\nended,x\n", "utf-8")
    command = ("schedule", str(source), "--topic", TOPIC, "--delay", "1h", "--redis", redis_url)
    assert pipeline(*command).exit_code == 0
    with Producer(redis_url) as producer:
        assert producer.cancel(TOPIC, "ended")
    again = pipeline(*command, "--on-duplicate", "keep_live", "--json")
    assert again.exit_code == 0, again.output
    (document,) = [json.loads(one) for one in again.stdout.splitlines()]
    assert (document["accepted"], document["duplicate"], document["replaced"]) == (0, 1, 1)


def test_a_table_is_sent_and_its_columns_may_name_topics(
    pipeline: Callable[..., Result], spark: SparkSession, redis_url: str, client: redis.Redis
) -> None:
    spark.range(4).selectExpr(
        "id AS n", "concat('t', id % 2) AS queue", "id AS wait", "map('a', 'b') AS headers"
    ).createOrReplaceTempView("to_send")
    columns = ("--topic-column", "queue", "--id", "n", "--delay", "wait", "--body", "*")
    more = ("--on-duplicate", "reject", "--dedupe-for", "2d", "--redis", redis_url)
    result = pipeline("schedule", "to_send", "--format", "table", *columns, *more)
    assert result.exit_code == 0, result.output
    assert [line.split() for line in result.stdout.strip().splitlines()][-2:] == [
        ["t0", "2", "0", "0", "0"],
        ["t1", "2", "0", "0", "0"],
    ]
    assert client.hget(Keys().topic("t1").options, "dedupe_for") == b"172800000"


def test_the_help_lists_every_job() -> None:
    said = CliRunner().invoke(main, ["pipeline", "--help"]).stdout
    assert all(f"  {name} " in said for name in JOBS)
    assert CliRunner().invoke(main, ["pipeline", "nonsense"]).exit_code == 2
