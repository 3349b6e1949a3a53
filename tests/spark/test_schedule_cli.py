"""`lisa pipeline schedule`, as the program that users run."""

import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from lisa.cli.main import main
from lisa.cli.pipeline import JOBS
from lisa.core.model.keys import Keys
from tests.servers import JVM_PATIENCE, Processes
from tests.spark.jobs import KEYS, TOPIC, Jobs


def send(
    jobs: Jobs, content: str | bytes | None, *options: str, name: str = "orders.csv", code: int = 0
) -> Result:
    """Schedule a file of the folder, with this content."""
    source = jobs.folder / name
    if content is not None:
        source.write_bytes(content if isinstance(content, bytes) else content.encode())
    given = ("--topic", TOPIC, "--redis", jobs.url)
    return jobs.command("schedule", str(source), *given, *options, code=code)


def bodies_of(jobs: Jobs, content: str, *options: str, name: str = "orders.csv") -> list[Any]:
    """Schedule a file; returns the bodies of all messages, in the order of due."""
    send(jobs, content, "--job", "j", *options, name=name)
    return [jobs.message(one).body for one in jobs.scores()]


def test_rows_without_ids_cost_the_driver_no_memory(jobs: Jobs) -> None:
    """12 bytes for each of these rows would exceed the driver's limit."""
    spark, rows, name = jobs.spark, 60_000, "spark.driver.maxResultSize"
    spark.range(0, rows, 1, 2).selectExpr("id AS n").write.parquet(str(jobs.folder / "rows"))
    context: Any = spark.sparkContext
    settings = context._jsc.sc().conf()
    settings.set(name, "512k")
    try:
        with pytest.raises(Exception, match=name):  # the limit applies
            spark.range(0, rows, 1, 2).selectExpr("id", "id AS n").rdd.collect()
        send(jobs, None, "--delay", "30m", "--job", "j", name="rows")
    finally:
        settings.set(name, "1g")
    assert jobs.client.zcard(KEYS.waiting) == rows


def test_csv_columns_are_mapped_and_refused_rows_mean_exit_code_1(jobs: Jobs) -> None:
    content = (
        "number,when,name\n007,2100-01-01T00:00:00.0001Z,Ann\n008,4102444800123,Bob\n009,soon,Cid\n"
    )
    refused = jobs.folder / "refused"
    columns = ("--id", "number", "--due", "when", "--ttl", "1h", "--retry", "0,2m")
    run = send(jobs, content, *columns, "--refused", str(refused), code=1)
    assert "refused orders 009: cannot be read: due=soon" in run.output
    assert jobs.scores() == {"007": 4102444800001, "008": 4102444800123}
    assert jobs.message("007").body == {"name": "Ann"}
    (lines,) = [file.read_text("utf-8") for file in refused.iterdir()]
    (refusal,) = map(json.loads, lines.splitlines())
    assert (refusal["id"], refusal["row"]["_corrupt_record"]) == ("009", "due=soon")


def test_spark_submit_runs_the_module_and_json_lines_are_numbered_by_the_job(
    processes: Processes, jobs: Jobs
) -> None:
    """Run the module as a program with spark-submit."""
    import lisa.cli.pipeline.schedule as job

    source = jobs.folder / "rows.jsonl"
    source.write_text('{"a": 1}\n' * 5 + "{broken\n", "utf-8")
    submit = Path(sys.executable).with_name("spark-submit")
    program = f"import os, sys; os.execv({str(submit)!r}, [{str(submit)!r}, *sys.argv[1:]])"
    settings = [
        "--conf=spark.driver.host=127.0.0.1",
        "--conf=spark.ui.enabled=false",
        "--conf=spark.driver.bindAddress=127.0.0.1",
    ]
    words = ("--topic", TOPIC, "--delay", "1h", "--job", "friday", "--redis", jobs.url)
    run = processes.start(
        *("-c", program, "--master", "local[2]", "--driver-memory", "1g", *settings),
        *(str(job.__file__), str(source), *words),
        env={"PYSPARK_PYTHON": sys.executable},
    )
    assert run.wait(timeout=JVM_PATIENCE) == 1, run.output  # for the broken line
    assert [jobs.message(one).body for one in jobs.scores()] == [{"a": 1}] * 5


ORDERS = """order,delay,price,paid,zip,note,big
41,60000,1.50,true,00123,,123456789012345678
-42,3600000,20,false,10115,5,1234567890123456789
"""


def test_the_types_of_a_csv_are_found_or_declared(jobs: Jobs) -> None:
    """The body lacks the columns of other parts, unless the whole row is asked for."""
    first = {"order": 41, "price": 1.5, "paid": True, "zip": "00123", "note": None}
    second = {"order": -42, "price": 20.0, "paid": False, "zip": "10115", "note": 5}
    big = "123456789012345678"
    assert bodies_of(jobs, ORDERS) == [first | {"big": big}, second | {"big": f"{big}9"}]
    jobs.client.flushall()
    bodies = bodies_of(jobs, ORDERS, "--schema", "order string, price double")
    assert [(body["order"], body["price"], body["note"]) for body in bodies] == [
        *(("41", 1.5, None), ("-42", 20.0, "5"))
    ]
    whole = bodies_of(jobs, "order,delay\n41,1\n", "--body", "*")
    assert whole[0] == {"order": 41, "delay": 1}
    lines = '{"order": 41, "delay": 2, "other": 1}\n'
    declared = ("--schema", "order string, delay long")
    assert bodies_of(jobs, lines, *declared, name="a.jsonl")[1] == {"order": "41"}
    # Only a CSV lacks types.
    text = '{"order": "43", "delay": 3}\n'
    assert bodies_of(jobs, text, name="b.jsonl")[2] == {"order": "43"}


def test_durations_of_a_csv_are_text_or_milliseconds(jobs: Jobs) -> None:
    content = (
        "id,delay,ttl,body\ntext,1h30m,30m,x\nnumber,5400000,1800000,x\nempty,1h,,x\n"
        "wrong,1h,half an hour,x\n"
    )
    done = send(jobs, content, code=1)
    assert "refused orders wrong: ttl: not a duration: 'half an hour'" in done.output
    dues, ends = jobs.scores(), jobs.scores(KEYS.expiry)
    assert dues["text"] == dues["number"] == dues["empty"] + 1_800_000
    assert ends == {name: dues[name] + 1_800_000 for name in ("text", "number")}


def test_quotes_separators_and_names_of_columns_in_a_csv(jobs: Jobs) -> None:
    texts = ['{"a": 1, "b": "x"}', 'say "hi", then go', "C:\\new, or C:\\", '"']
    written = io.StringIO()
    writer = csv.writer(written)
    writer.writerow(["delay", "body", "other"])
    writer.writerows([60_000 * (1 + n), text, n] for n, text in enumerate(texts))
    assert bodies_of(jobs, written.getvalue()) == texts
    jobs.client.flushall()
    escaped = 'delay,body\n60000,"say \\"hi\\", then go"\n'
    assert bodies_of(jobs, escaped, "--read-option", "escape=\\") == ['say "hi", then go']
    named = bodies_of(jobs, "a`b,c.d,e f,delay\n1,2,3,1h\n")
    assert named[-1] == {"a`b": 1, "c.d": 2, "e f": 3}
    for number, (separator, option) in enumerate(((";", "sep=;"), ("\t", r"sep=\t"))):
        content = f"order{separator}delay\n{number}{separator}{number + 2}h\n"
        assert bodies_of(jobs, content, "--read-option", option)[-1] == {"order": number}


@pytest.mark.parametrize("options", [(), ("--schema", "order long"), ("--body", "note")])
def test_lines_of_a_csv_that_do_not_fit_are_refused(jobs: Jobs, options: tuple[str, ...]) -> None:
    """With too many or too few values, or a value that is not of its declared type."""
    content = 'order,note,delay\n1,a,60000\n2,b, c,60000\n3,60000\n4,"d\ne",60000\nforty,f,60000\n'
    result = send(jobs, content, "--job", "j", *options, code=1)
    assert "2,b, c,60000" in result.output
    fits = 1 if "--schema" in options else 2
    assert ("order=forty" in result.output) == (fits == 1)
    assert jobs.client.zcard(KEYS.waiting) == fits
    if not options:
        send(jobs, None, "--job", "j", "--read-option", "multiLine=true", code=1)
        assert jobs.client.zcard(KEYS.waiting) == fits + 1


def test_text_that_is_not_utf8_is_refused(jobs: Jobs) -> None:
    content = "id,name\n1,Zoë\n2,Ann\n".encode("iso-8859-1")
    result = send(jobs, content, "--delay", "1h", code=1)
    assert "name=Zo\ufffd is not UTF-8; name the encoding" in result.output
    assert set(jobs.scores()) == {"2"}
    send(jobs, None, "--delay", "1h", "--read-option", "encoding=iso-8859-1")
    assert jobs.message("1").body == {"name": "Zoë"}
    lines = '{"id": "1", "name": "Zoë"}\n{"id": "2", "name": "Ann"}\n'.encode("iso-8859-1")
    for options in ((), ("--schema", "id string, name string")):
        jobs.client.flushall()
        result = send(jobs, lines, *options, name="names.jsonl", code=1)
        assert 'cannot be read: {"id": "1", "name": "Zo\ufffd"}' in result.output
        assert jobs.producer.get(TOPIC, "1") is None
        assert jobs.message("2").body == {"name": "Ann"}


def test_wrong_input_means_exit_code_2_and_one_line(jobs: Jobs) -> None:
    row = '{"id": "a", "body": "x"}'
    csv_ = ("--job", "j", "--format", "csv")
    wrong: list[tuple[str | None, tuple[str, ...], str]] = [
        (None, (), "Path does not exist"),
        ("id;body\n1;x\n", csv_, "name its separator, --read-option sep=';'"),
        ("id\tbody\n1\tx\n", csv_, "name its separator, --read-option sep='\\t'"),
        ("id,name,Name\n1,x,y\n", csv_, "the CSV has several columns 'name': rename all but one"),
        ("", csv_, "the CSV is empty; its first line must name the columns"),
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
        kind = () if "--format" in options else ("--format", "json")
        result = send(jobs, content, *kind, *options, name="rows", code=2)
        assert words in result.stderr
        assert result.stderr.count("\n") == 1
    failed = send(jobs, b"PAR1 this is no parquet PAR1", name="rows.parquet", code=1)
    assert failed.output.strip().splitlines()[-1].startswith("lisa: Spark failed: ")
    away = "redis://127.0.0.1:1/0"
    options = ("--redis", away, "--patience", "100ms", "--format", "json")
    unreachable = send(jobs, row, *options, name="rows", code=3)
    assert unreachable.output.strip().splitlines()[-1].startswith(f"lisa: {away} does not answer")
    assert "Traceback" not in unreachable.output


def test_ended_messages_are_sent_again_with_keep_live(jobs: Jobs) -> None:
    send(jobs, "id,body\nlive,x\nended,x\n", "--delay", "1h")
    assert jobs.producer.cancel(TOPIC, "ended")
    again = send(jobs, None, "--delay", "1h", "--on-duplicate", "keep_live", "--json")
    (document,) = [json.loads(one) for one in again.stdout.splitlines()]
    assert (document["accepted"], document["duplicate"], document["replaced"]) == (0, 1, 1)


def test_a_table_is_sent_and_its_columns_may_name_topics(jobs: Jobs) -> None:
    jobs.spark.range(4).selectExpr(
        "id AS n", "concat('t', id % 2) AS queue", "id AS wait", "map('a', 'b') AS headers"
    ).createOrReplaceTempView("to_send")
    columns = ("--topic-column", "queue", "--id", "n", "--delay", "wait", "--body", "*")
    more = ("--on-duplicate", "reject", "--dedupe-for", "2d", "--redis", jobs.url)
    result = jobs.command("schedule", "to_send", "--format", "table", *columns, *more)
    assert [line.split() for line in result.stdout.strip().splitlines()][-2:] == [
        ["t0", "2", "0", "0", "0"],
        ["t1", "2", "0", "0", "0"],
    ]
    assert jobs.client.hget(Keys().topic("t1").options, "dedupe_for") == b"172800000"


def test_the_help_lists_every_job() -> None:
    said = CliRunner().invoke(main, ["pipeline", "--help"]).stdout
    assert all(f"  {name} " in said for name in JOBS)
    assert CliRunner().invoke(main, ["pipeline", "nonsense"]).exit_code == 2
