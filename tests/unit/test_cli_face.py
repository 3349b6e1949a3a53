"""The command line: quick help, lazy commands, one-line errors, safe output."""

import json
import sys
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from lisa.cli.main import SECTIONS, LazyGroup, main
from lisa.cli.output import body_fields, iso, printable, text_table, when
from lisa.cli.top import COLUMNS, DROPPED
from tests.servers import Processes


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, arguments)
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(
    ("program", "shown"),
    [
        ("main", "doctor"),
        ("consumer", "TARGET"),
        ("gateway", "--port"),
        ("manager", "--handlers"),
        ("relay", "--database"),
    ],
)
def test_help_imports_nothing_heavy(processes: Processes, program: str, shown: str) -> None:
    helped = processes.start("-X", "importtime", "-m", f"lisa.cli.{program}", "--help")
    assert helped.wait() == 0
    assert shown in helped.output
    imported = {line.rpartition("|")[2].strip() for line in helped.output.splitlines()}
    heavy = {"redis", "pydantic", "apscheduler", f"lisa.{program}", f"lisa.{program}.daemon"}
    heavy |= {"sqlalchemy", "lisa.outbox"}
    heavy |= {"rich", "blinker", "yaml", "asyncio"} if program == "main" else set()
    assert not imported & heavy


def each_command(group: click.Group, *path: str) -> Iterator[tuple[str, ...]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        yield (*path, name)
        found = group.get_command(context, name)
        if isinstance(found, click.Group):
            yield from each_command(found, *path, name)


def test_no_command_imports_anything_heavy_for_its_help(processes: Processes) -> None:
    code = (
        "import sys, click; from lisa.cli.main import main; root = click.Context(main)\n"
        "for name in main.list_commands(root): main.get_command(root, name)\n"
        "print(sorted({'redis', 'pydantic', 'rich', 'yaml', 'asyncio'} & set(sys.modules)))"
    )
    listed = processes.start("-c", code)
    assert listed.wait() == 0
    assert listed.output.strip() == "[]"


def test_help_of_every_command() -> None:
    assert isinstance(main, LazyGroup)
    paths = [*each_command(main), ()]
    assert len(paths) > 35
    for path in paths:
        code, said, _ = run(*path, "--help")
        assert (code, said.startswith(" ".join(("Usage: lisa", *path)))) == (0, True), path
        assert run(*path, "-h") == (0, said, "")
    said = run("--help")[1]
    names = [name for section in SECTIONS.values() for name in section]
    assert [name for name in names if f"\n  {name} " not in said] == []
    for group in ((), ("topic",), ("topic", "group")):
        assert run(*group) == (2, "", run(*group, "--help")[1]), "help without a command"


JDBC = ("--archive", "jdbc:postgresql://host/database")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["frobnicate"], "No such command"),
        (["send"], "TOPIC"),
        (["send", "orders"], "BODY or --file"),
        (["send", "orders", "x", "--delay", "30"], "has no unit"),
        (["send", "orders", "x", "--delay", "-3s"], "not a duration"),
        (["send", "orders", "x", "--at", "tomorrow"], "not a date and time"),
        (["send", "orders", "x", "--at", "2030-01-01T00:00"], "--tz ZONE"),
        (["send", "orders", "x", "--at-ms", "1.5"], "--at-ms"),
        (["send", "orders", "x", "--delay", "1s", "--at-ms", "5"], "contradict"),
        (["send", "orders", "x", "--header", "novalue"], "KEY=VALUE"),
        (
            ["send", "orders", "x", "--header", "a=1", "--header", "a=2"],
            "--header a is given twice",
        ),
        (["send", "orders", "{", "--json-body"], "not JSON"),
        (["send", "orders", '[{"a": {"b": 1, "b": 2}}]'], "the key 'b' occurs twice"),
        (["send", "or ders", "x"], "topic"),
        (["send", "orders", "x", "--retry", "soon"], "soon"),
        (["send", "orders", "--jsn"], "--jsn"),
        (["cancel", "orders", "a", "--jsn"], "--jsn"),
        (["reschedule", "orders", "a"], "--delay"),
        (["topic", "set", "orders", "capacity"], "KEY=VALUE"),
        (["garbage", "purge", "orders"], "ids or --all"),
        (["garbage", "purge", "orders", "a", "--all"], "ids or --all"),
        (["garbage", "purge", "orders", "a", "--reason", "x"], "omit the ids"),
        (["--redis", "http://localhost", "topics"], "not a server address"),
        (["--prefix", "{}", "topics"], "prefix"),
        (["--config", "/nowhere.yml", "topics"], "/nowhere.yml"),
        (["acl", "producer", "--password-file", sys.executable], "cannot read"),
        (["topic", "push", "a", "http://x", "--secret-file", sys.executable], "cannot read"),
        (["pipeline", "restore", *JDBC, "--password-file", sys.executable], "cannot read"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(arguments: list[str], words: str) -> None:
    code, said, complaint = run(*arguments)
    assert (code, said, complaint.count("\n")) == (2, "", 1)
    assert words in complaint


def test_output_of_texts_times_and_bodies() -> None:
    assert printable("a\x1b[2Jb\x9bc\u202e") == "a\\u001b[2Jb\\u009bc\\u202e"
    assert printable("größe 量 \u0646\u200c\u0647\t") == "größe 量 \u0646\u200c\u0647\\t"
    assert printable("a\u200db\u200bc") == "a\\u200db\\u200bc"
    assert when(1_800_000, 2_000).endswith("(in 29m 58s)")
    assert when(1_000, 13_000).endswith("(12s ago)")
    assert when(253_402_300_799_999, 0)
    assert when(None, 0) == ""
    assert iso(1_500) == "1970-01-01T00:00:01.500Z"
    assert body_fields(b"\xff") == {"body": "/w==", "body_encoding": "base64"}
    assert body_fields("x") == {"body": "x", "body_encoding": "text"}
    assert json.dumps(body_fields({"a": None})["body"]) == '{"a": null}'


TOP = ["orders", *["1,234"] * 6, "12.3", "12.3", "0.0", "0.82", "4.28", "in 29m 58s", "2030-01-01"]


def test_columns_of_a_table_are_dropped_by_priority() -> None:
    for width in (None, 200):
        head, rule, row = text_table(COLUMNS, [TOP], width, DROPPED)
        assert all(name.strip() in head for name in COLUMNS)
        assert set(rule) == {"-", " "}
        assert "in 29m 58s" in row
    head, _, row = text_table(COLUMNS, [TOP], 80, DROPPED)
    assert 70 < max(len(head), len(row)) <= 80
    columns = "topic waiting ready in flight garbage in/s out/s p99 ms next due"
    assert " ".join(head.split()) == columns
    assert row.split()[:3] == ["orders", "1,234", "1,234"]
    rows = [("x" * 30, "y" * 30, 1)]
    narrow = text_table(["topic", "groups", "retry "], rows, 40, ["retry", "groups"])
    assert next(narrow).split() == ["topic", "retry"], "it fits where a wide one does not"


def test_no_width_of_a_table_breaks_a_word_or_cuts_an_id() -> None:
    message_id = "0Q8FgswKTpnqrTLKpzLwn0"
    reason = "ValueError: the payment provider returned an unexpected-status-code 503"
    rows = [(message_id, "shop", 10, reason)]
    for width in range(20, 120, 3):
        text = "\n".join(text_table(["id", "group", "attempts ", "reason"], rows, width, ["group"]))
        assert message_id in text
        assert {"ValueError:", "unexpected-status-code", "attempts"} <= set(text.split())
        if width >= 65:
            assert max(map(len, text.splitlines())) <= width
    rows_of_words = [("short",)] * 300 + [("some words " * 50,)]
    assert len(list(text_table(["reason"], rows_of_words))) == 303, "not wrapped for a pipe"
    lines = list(text_table(["topic", "n "], [("量子", 1), ("orders", 1_000)]))
    assert lines == ["topic      n", "------  ----", "量子       1", "orders  1000"]
    lines = list(text_table(["", ""], [("body", "a\nb\x1b[2J"), ("id", None)]))
    assert lines == ["body  a", "      b\\u001b[2J", "id"]
