"""`lisa pipeline schedule`, as the program that users run."""

import csv
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lisa.cli.main import main
from lisa.cli.pipeline import JOBS
from lisa.core.model.keys import Keys
from tests.servers import JVM_PATIENCE, Processes
from tests.spark.jobs import KEYS, TOPIC, Jobs, bodies_of, errors, send


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
    assert "refused orders 009: cannot be read: when=soon" in run.output
    assert jobs.scores() == {"007": 4102444800001, "008": 4102444800123}
    assert jobs.message("007").body == {"name": "Ann"}
    (lines,) = [file.read_text("utf-8") for file in refused.iterdir()]
    (refusal,) = map(json.loads, lines.splitlines())
    assert (refusal["id"], refusal["row"]["_corrupt_record"]) == ("009", "when=soon")
    assert json.loads(refusal["row"]["body"]) == {"name": "Cid"}


@pytest.mark.parametrize("is_json", [False, True])
def test_an_option_names_the_column_of_keys(jobs: Jobs, *, is_json: bool) -> None:
    content, name = "order,id,key\n7,a,x\n007,a,\n", "rows.csv"
    if is_json:
        rows = [{"order": "7", "id": "a", "key": "x"}, {"order": "007", "id": "a", "key": None}]
        content, name = "\n".join(map(json.dumps, rows)), "rows.jsonl"
    send(jobs, content, "--key", "order", "--delay", "1h", name=name)
    assert set(jobs.scores()) == {"7\x1fa", "007\x1fa"}
    assert jobs.message("7\x1fa").body == {"key": "x"}
    refused = send(jobs, content, "--key", "id", "--id", "key", "--delay", "1h", name=name, code=1)
    assert "id: value is null" in refused.output


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
NUMBERS = ("0", "7", "-7", "123456789012345678", "1.5", "-0.25", "12.0", "0.0001", "123456789.12")
TEXTS = (
    *("007", "-0", "+7", "1234567890123456789", "1.10", ".5", "5.", "1e5", "1E400", "NaN", "1_0"),
    *("0.00001", "1,5", "True", "null", "1234567890.1234567", "2026-12-24", "09:00", "0x1F", "٣"),
    *("", " 7", "7\n", 'say "hi", \\ Zoë\t', "\u2028"),
)


def test_values_of_a_csv_that_do_not_print_as_they_were_read_stay_text(jobs: Jobs) -> None:
    """The value alone, so that ids derived from other rows stay the same."""
    first = {"order": 41, "price": "1.50", "paid": True, "zip": "00123", "note": None}
    second = {"order": -42, "price": 20, "paid": False, "zip": 10115, "note": 5}
    big = 123456789012345678
    assert bodies_of(jobs, ORDERS) == [first | {"big": big}, second | {"big": f"{big}9"}]
    done = send(jobs, ORDERS + "x,1h,1e9,maybe,-,a b,1.0\n", "--job", "j", "--json")
    assert (json.loads(done.stdout)["accepted"], json.loads(done.stdout)["duplicate"]) == (1, 2)
    jobs.client.flushall()
    empty = bodies_of(jobs, 'delay,ttl,a,b\n"60000","","",\n', "--read-option", "sep=,")
    assert empty == [{"a": "", "b": None}]
    jobs.client.flushall()
    written = io.StringIO()
    values = ["true", "false", *NUMBERS, *TEXTS]
    rows = [[f"{number + 1}h", value] for number, value in enumerate(values)]
    csv.writer(written, quoting=csv.QUOTE_ALL).writerows([["delay", "v"], *rows])
    bodies = bodies_of(jobs, written.getvalue(), "--read-option", "multiLine=true")
    expected = [True, False, *map(json.loads, NUMBERS), *TEXTS]
    assert [(type(body["v"]), body["v"]) for body in bodies] == [(type(v), v) for v in expected]


def test_values_of_json_are_sent_as_they_are(jobs: Jobs) -> None:
    """A line changes neither the values nor the ids of others."""
    big, huge = "123456789012345678901234567890", "9" * 5000
    lines = [
        ('{"n": 1, "at": {"b": [1.10, "x"], "a": null}}', '{"at":{"a":null,"b":[1.10,"x"]},"n":1}'),
        ('{"n": 1.0}', '{"n":1.0}'),
        ('{"n": "1"}', '{"n":"1"}'),
        (f'{{"n": {big}}}', f'{{"n":"{big}"}}'),
        (f'{{"n": [{huge}, -0, 1e400]}}', f'{{"n":["{huge}",-0,"1e400"]}}'),
        ('{"n": 0.1234567890123456789, "m": 1e-999}', '{"m":"1e-999","n":"0.1234567890123456789"}'),
        ('{"n": 18446744073709551615, "e": 1E5}', '{"e":1E5,"n":18446744073709551615}'),
        ('{"N": true, "n": {"n": false}, "": ""}', '{"":"","N":true,"n":{"n":false}}'),
    ]
    given = ("--delay", "1h", "--job", "j", "--json")
    for count in (1, 3, len(lines)):
        text = "\n\n".join(line for line, _ in lines[:count])
        done = json.loads(send(jobs, text, *given, name="rows.jsonl").stdout)
    assert (done["accepted"], done["duplicate"]) == (len(lines) - 3, 3)
    sent: list[Any] = [jobs.client.get(KEYS.body(one)) for one in jobs.scores()]
    assert {body[15:].decode() for body in sent} == {body for _, body in lines}
    wrong = ['{"n": NaN}', '{"n": 1, "n": 2}', "5", "{'n': 1}", "[{}, 5]"]
    wrong += ['{"n": "\\ud800"}', '{"\\ud800": 1}']
    done = send(jobs, "\n".join(['{"n": 1}', *wrong]), *given, name="rows.jsonl", code=1)
    assert f'"refused":{len(wrong)}' in done.stdout.replace(" ", "")


def test_parts_of_messages_in_json(jobs: Jobs) -> None:
    lines = """
        {"id": "text", "delay": "1h", "body": "x", "headers": {"a": "1"}, "retry": [0, 120000]}
        {"id": 7, "delay": 3600000, "body": {"a": 1.50}, "ttl": "1h", "retry": "0,2m"}
        {"id": "list", "delay": 1, "body": [1, 2]}
        {"id": "none", "delay": 1, "body": null}
        {"id": "no-time", "body": 1}
        {"id": ["a"], "delay": 1, "body": 1}
    """
    done = send(jobs, lines, "--json", name="rows.jsonl", code=1)
    assert json.loads(done.stdout)["refused"] == 3
    bodies = {name: jobs.message(name).body for name in jobs.scores()}
    assert bodies == {"text": "x", "7": {"a": 1.5}, "list": [1, 2]}
    assert jobs.message("text").headers == {"a": "1"}
    kinds = {name: jobs.client.getrange(KEYS.body(name), 10, 10) for name in bodies}
    assert kinds == {"text": b"s", "7": b"j", "list": b"j"}
    assert set(jobs.client.hgetall(KEYS.policy).values()) == {b"0,120000"}


UTF16 = ("--read-option", "encoding=UTF-16")


@pytest.mark.parametrize(
    ("content", "options"),
    [
        ('[\n  {"id": "a"},\n  {"id": "b", "n": 1}\n]', ()),
        ('{\n  "id": "a"\n}\n{\n  "id": "b",\n  "n": 1\n}\n', ()),
        ('\ufeff{"id": "a"} {"id": "b",\n"n": 1}', ()),
        (
            '[{"id": "a"}, {"id": "b", "n": 1}]'.encode("utf-16"),
            ("--read-option", "encoding=UTF-16"),
        ),
    ],
)
def test_json_that_has_no_object_per_line(
    jobs: Jobs, content: str | bytes, options: tuple[str, ...]
) -> None:
    given = ("--delay", "1h", "--body", "*")
    name = "a list.json"
    if not str(content).startswith("\ufeff"):
        refused = send(jobs, content, *given, name=name, code=2)
        assert name in refused.stderr
        assert len(errors(refused)) == 1
        assert "add --read-option " in refused.stderr
    send(jobs, content, *given, "--read-option", "multiLine=true", *options, name=name)
    assert [jobs.message(one).body for one in "ab"] == [{"id": "a"}, {"id": "b", "n": 1}]


def test_any_name_of_a_file(jobs: Jobs) -> None:
    names = ["b:/c", "a[1]", "a{b,c}", "a:b", "a\\b", "a*", "a?", "a b%20", "a#ü", "-a"]
    for name in names:
        file = jobs.folder / "all" / f"{name}.csv"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f'id,body\n"{name}",x\n', "utf-8")
        options = ("--topic", TOPIC, "--delay", "1h", "--redis", jobs.url)
        jobs.command("schedule", str(file), *options)
    assert set(jobs.scores()) == set(names)
    jobs.client.flushall()
    folder = ("schedule", str(jobs.folder / "all"), "--format", "csv", *options)
    assert "recursiveFileLookup=true" in jobs.command(*folder, code=2).stderr
    jobs.command(*folder, "--read-option", "recursiveFileLookup=true")
    assert set(jobs.scores()) == set(names)
    for hidden in ("_orders.csv", ".x.csv"):
        file.with_name(hidden).write_text("id,body\n1,x\n", "utf-8")
        for source in (file.with_name(hidden), file.parent):
            refused = jobs.command("schedule", str(source), *folder[2:], code=2)
            assert hidden in refused.stderr
            assert "rename the file" in refused.stderr
        file.with_name(hidden).unlink()


def test_times_without_a_date_are_refused_by_row(jobs: Jobs) -> None:
    wrong = ["09:00", "T09:00", "2026-12", "2026", "12:00:00Z", "now", "today", "1e12"]
    rows = [
        *((text, text) for text in wrong),
        ("date", "2100-01-01"),
        ("both", "2100-01-01 00:00Z"),
    ]
    table = "id,due,body\n" + "".join(f"{name},{due},x\n" for name, due in rows)
    lines = "\n".join(json.dumps({"id": name, "due": due, "body": "x"}) for name, due in rows)
    declared = ("--schema", "id string, due timestamp, body string")
    for content, name in ((table, "rows.csv"), (lines, "rows.jsonl")):
        for options in ((), declared):
            jobs.client.flushall()
            done = send(jobs, content, *options, name=name, code=1)
            assert jobs.scores() == {"date": 4102444800000, "both": 4102444800000}
            assert "refused orders 09:00: cannot be read: due=09:00" in done.stderr


def test_the_types_of_a_csv_are_declared(jobs: Jobs) -> None:
    """The body lacks the columns of other parts, unless the whole row is asked for."""
    bodies = bodies_of(jobs, ORDERS, "--schema", "order string, price double")
    assert [(body["order"], body["price"], body["note"]) for body in bodies] == [
        *(("41", 1.5, None), ("-42", 20.0, "5"))
    ]
    whole = bodies_of(jobs, "order,delay\n41,1\n", "--body", "*")
    assert whole[0] == {"order": 41, "delay": 1}
    lines = '{"order": 41, "delay": 2, "other": 1}\n'
    declared = ("--schema", "order string, delay long")
    assert bodies_of(jobs, lines, *declared, name="a.jsonl")[1] == {"order": "41"}
    nested = '{"order": {"a": [1.5]}, "price": 1.10, "paid": "true", "delay": 5}\n{"delay": {}}\n'
    types = ("--schema", "order struct<a array<double>>, price string, paid boolean, delay long")
    done = send(jobs, nested, *types, "--job", "k", name="c.jsonl", code=1)
    assert "cannot be read: delay={}" in done.stderr
    body = {"order": {"a": [1.5]}, "price": "1.10", "paid": True}
    assert body in [jobs.message(one).body for one in jobs.scores()]
    # Only a CSV lacks types.
    text = '{"order": "43", "delay": 3}\n'
    assert {"order": "43"} in bodies_of(jobs, text, name="b.jsonl")


def test_values_that_a_declared_type_would_change_are_refused(jobs: Jobs) -> None:
    nested = ("abc", [1], {"zip": "abc"}, {"zip": 5.7}, {"zip": 99999999999}, {"paid": 1.239})
    wrong = [("address", text) for text in (*map(json.dumps, nested), "no JSON", '{"zip": 5} x')]
    wrong += [("address", '{"zip": 5}, {}'), ("paid", "1.239"), ("paid", "123456789")]
    wrong += [("day", "2026-12-24T09:00"), ("day", "2026-02-30"), ("day", "2026-12-24 junk")]
    wrong += [("wall", "2026-12-24T09:00+01:00")]
    address = '{"zip": 5, "paid": 1.50, "note": 1.10, "x": 1}'
    times = {"day": "2026-12-24 00:00:00", "wall": "2026-12-24 09:00"}
    good = {"address": address, "paid": "1.2300", **times}
    rows = [("good", good), ("two", {"paid": "1.239", "day": "x"})]
    rows += [(f"{name} {text}", {name: text}) for name, text in wrong]
    written = io.StringIO()
    table = csv.DictWriter(written, ["id", *good])
    table.writeheader()
    table.writerows({"id": name, **row} for name, row in rows)
    types = "address struct<zip: int, paid: decimal(10,2), note: string>, paid decimal(10,2), "
    types += "day date, wall timestamp_ntz"
    declared = ("--delay", "1h", "--schema")
    done = send(jobs, written.getvalue(), *declared, types, "--json", code=1)
    assert json.loads(done.stdout)["refused"] == 1 + len(wrong)
    assert "orders two: cannot be read: paid=1.239, day=x" in json.loads(done.stdout)["reasons"]
    times = {"day": "2026-12-24", "wall": "2026-12-24T09:00:00"}
    read = {"zip": 5, "paid": "1.50", "note": "1.10"}
    assert jobs.message("good").body == {"address": read, "paid": "1.23", **times}
    lines = [{"id": str(n), "address": text} for n, text in enumerate([*nested, None, {"zip": 6}])]
    unread = f'["{"much text " * 99}"'
    content = "\n".join([*map(json.dumps, lines), unread])
    types = f"id string, {types.split(', paid decimal(10,2), day')[0]}"
    more = ("--json", "--refused", str(jobs.folder / "refused"))
    done = send(jobs, content, *declared, types, *more, name="rows.jsonl", code=1)
    assert json.loads(done.stdout)["refused"] == len(nested) + 1
    (file,) = (jobs.folder / "refused").iterdir()
    refusals = map(json.loads, file.read_text("utf-8").splitlines())
    (refusal,) = [refusal for refusal in refusals if not refusal["id"]]
    assert refusal["row"]["_corrupt_record"].startswith(f"{unread}: Expecting ',' delimiter")
    assert re.fullmatch(r"cannot be read: .{120} \.\.\. .*Expecting ',' del.*", refusal["reason"])
    assert set(jobs.scores()) == {"good", str(len(nested)), str(len(nested) + 1)}


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
    content = 'order,note,delay\n1,a,60000\n2,b, c,60000\n3,60000\n4,"d, e",60000\nforty,f,60000\n'
    result = send(jobs, content, "--job", "j", *options, code=1)
    assert "2,b, c,60000" in result.output
    fits = 2 if "--schema" in options else 3
    assert ("order=forty" in result.output) == (fits == 2)
    assert jobs.client.zcard(KEYS.waiting) == fits


def test_text_that_is_not_utf8_is_refused(jobs: Jobs) -> None:
    content = "id,name\n1,Zoë\n2,Ann\n".encode("iso-8859-1")
    result = send(jobs, content, "--delay", "1h", code=1)
    assert "name=Zo\ufffd is not UTF-8; name the encoding" in result.output
    assert set(jobs.scores()) == {"2"}
    send(jobs, None, "--delay", "1h", "--read-option", "encoding=iso-8859-1")
    assert jobs.message("1").body == {"name": "Zoë"}
    utf16 = "id,name\r\n3,Zoë\r\n4,Ann\r\n".encode("utf-16")
    send(jobs, utf16, "--delay", "1h", "--read-option", "encoding=UTF-16")
    assert [jobs.message(one).body for one in "34"] == [{"name": "Zoë"}, {"name": "Ann"}]
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
    wrong: list[tuple[str | bytes | None, tuple[str, ...], str]] = [
        (None, (), "Path does not exist"),
        ("id;body\n1;x\n", csv_, "name its separator, --read-option sep=';'"),
        ("id\tbody\n1\tx\n", csv_, "name its separator, --read-option sep='\\t'"),
        ("id,body\n1,x\n", (*csv_, "--read-option", "sep=;"), "name its separator"),
        ("id,name,Name\n1,x,y\n", csv_, "rows: the CSV has several columns 'name': rename all but"),
        ("", csv_, "rows: the CSV is empty; its first line must name the columns"),
        ("id\n1\n", ("--format", "parquet"), "rows is not parquet: it is another format"),
        ("sep=;\nid;due\n1;2\n", csv_, "rows: the first line, 'sep=;', is for Excel only"),
        ("sep=;\nid;due\n1;2\n", (*csv_, "--read-option", "sep=;"), "is for Excel only"),
        ("id,due,\n1,2,\n", csv_, "rows: column 3 of the CSV has no name"),
        ("41,2100-01-01T00:00Z,x\n", csv_, "rows: the first line must name the columns, but '41'"),
        ("Größe,due\n1,2\n".encode("cp1252"), csv_, "rows: the header is not UTF-8"),
        ("id,due\n1,2\n".encode("utf-16"), csv_, "rows: the header is not UTF-8"),
        ("id,Due \n1,2\n", csv_, "'Due ' is not used as 'due', so all rows would be due now"),
        (row, ("--read-option", "sep=,"), "--read-option sep has no effect: json has no such"),
        ("id\n1\n", (*csv_, "--read-option", "seperator=;"), "has no effect: "),
        (
            "id\n1\n",
            (*csv_, "--read-option", "multiline=1", "--read-option", "timestampFormat=y"),
            "rows: --read-option timestampFormat has no effect: declare a column of its type",
        ),
        (row, ("--due", "when"), "--due: no column 'when'"),
        (row, ("--delay", "soon"), "--delay: 'soon' is neither a column"),
        (row, ("--read-option", "encoding=klingon"), "klingon"),
        ('{"body": "x"}', (), "give option 'job'"),
        ('{"id": "a", "delay": 1}', (), "no column is left for the body (delay, id)"),
        ('{"id": "a", "a": "x"}', ("--schema", "id text"), "data type"),
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
        assert len(errors(result)) == 1
    for name in ("1.csv", "2.csv"):
        (jobs.folder / "two").mkdir(exist_ok=True)
        (jobs.folder / "two" / name).write_text(f"id,v{name[0]}\n1,x\n", "utf-8")
    failed = send(jobs, None, "--format", "csv", "--delay", "1h", name="two", code=2)
    assert "csv" in failed.stderr
    assert "header" in failed.stderr
    failed = send(jobs, b"PAR1 this is no parquet PAR1", name="rows.parquet", code=2)
    assert "rows.parquet cannot be read by pyarrow: " in failed.stderr
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
        ["t0", "2", *["0"] * 5],
        ["t1", "2", *["0"] * 5],
    ]
    assert jobs.client.hget(Keys().topic("t1").options, "dedupe_for") == b"172800000"


def test_the_help_lists_every_job() -> None:
    said = CliRunner().invoke(main, ["pipeline", "--help"]).stdout
    assert all(f"  {name} " in said for name in JOBS)
    assert CliRunner().invoke(main, ["pipeline", "nonsense"]).exit_code == 2
