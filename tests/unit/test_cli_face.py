"""The command line: quick help, lazy commands, one-line errors, safe output."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from lisa.cli.main import SECTIONS, LazyGroup, main
from lisa.cli.output import body_fields, iso, printable, when
from tests.servers import Processes

COMMANDS = [name for section in SECTIONS.values() for name in section]
HEAVY = ("redis", "rich", "pydantic", "apscheduler", "blinker", "yaml", "asyncio")


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, arguments)
    return result.exit_code, result.stdout, result.stderr


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys; sys.argv = ['lisa', '--help']\n"
        "from lisa.cli.main import main\n"
        "try:\n    main()\n"
        "except SystemExit: pass\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize(
    ("role", "shown"), [("consumer", "TARGET"), ("gateway", "--port"), ("manager", "--handlers")]
)
def test_the_help_of_a_role_imports_nothing_heavy(
    processes: Processes, role: str, shown: str
) -> None:
    helped = processes.start("-X", "importtime", "-m", f"lisa.cli.{role}", "--help")
    assert helped.wait() == 0
    assert shown in helped.output
    imported = {line.rpartition("|")[2].strip() for line in helped.output.splitlines()}
    assert not imported & {"redis", "pydantic", "apscheduler", f"lisa.{role}.daemon"}
    assert f"lisa.{role}" not in imported


def cpu_seconds(*arguments: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_takes_hardly_longer_than_click_itself() -> None:
    """A ratio of processor time, each the best of many: the machine's pace does not matter."""
    helps, clicks = [], []
    for _ in range(20):  # in turn, so that both meet a quiet moment
        helps.append(cpu_seconds("-m", "lisa.cli.main", "--help"))
        clicks.append(cpu_seconds("-c", "import click"))
        if len(helps) >= 5 and min(helps) < 2 * min(clicks):
            return
    assert min(helps) < 2 * min(clicks)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_exists_under_its_name_and_has_help(name: str) -> None:
    code, said, _ = run(name, "--help")
    assert code == 0
    assert said.startswith(f"Usage: lisa {name}")


def each_command(group: click.Group, *path: str) -> Iterator[tuple[str, ...]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        yield (*path, name)
        found = group.get_command(context, name)
        if isinstance(found, click.Group):
            yield from each_command(found, *path, name)


def test_minus_h_is_help_everywhere() -> None:
    paths = [*each_command(main), ()]
    assert len(paths) > 35
    for path in paths:
        assert run(*path, "-h") == run(*path, "--help"), path
        assert run(*path, "-h")[0] == 0


def test_the_help_page_names_every_command() -> None:
    assert isinstance(main, LazyGroup)
    said = run("--help")[1]
    assert [name for name in COMMANDS if f"\n  {name} " not in said] == []


JDBC = ("--archive", "jdbc:postgresql://host/database", "--keep", "1d")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["frobnicate"], "No such command"),
        (["send"], "TOPIC"),
        (["send", "orders"], "BODY or --file"),
        (["send", "orders", "x", "--delay", "30"], "has no unit"),
        (["send", "orders", "x", "--delay", "-3s"], "not a duration"),
        (["send", "orders", "x", "--at", "tomorrow"], "not an ISO time"),
        (["send", "orders", "x", "--at", "2030-01-01T00:00"], "--tz ZONE"),
        (["send", "orders", "x", "--at-ms", "1.5"], "--at-ms"),
        (["send", "orders", "x", "--delay", "1s", "--at-ms", "5"], "contradict"),
        (["send", "orders", "x", "--header", "novalue"], "KEY=VALUE"),
        (["send", "orders", "{", "--json-body"], "not JSON"),
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
        (["pipeline", "retain", *JDBC, "--password-file", sys.executable], "cannot read"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(arguments: list[str], words: str) -> None:
    code, said, complaint = run(*arguments)
    assert code == 2
    assert said == ""
    assert words in complaint
    assert complaint.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["topic"], ["topic", "group"], ["garbage"]])
def test_without_a_command_the_help_page_is_shown_as_it_is(arguments: list[str]) -> None:
    code, said, shown = run(*arguments)
    assert (code, said) == (2, "")
    assert shown == run(*arguments, "--help")[1]


def test_no_server_is_one_line_and_exit_code_3() -> None:
    code, _, complaint = run("--redis", "redis://127.0.0.1:1", "get", "orders", "a")
    assert code == 3
    assert complaint.count("\n") == 1


def test_text_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[2Jb\x9bc\u202e") == "a\\x1b[2Jb\\x9bc\\x202e"
    assert printable("größe 量") == "größe 量"


def test_times_are_shown_with_their_distance() -> None:
    assert when(1_800_000, 2_000).endswith("(in 29m 58s)")
    assert when(1_000, 13_000).endswith("(12s ago)")
    assert when(253_402_300_799_999, 0)
    assert when(None, 0) == ""
    assert iso(1_500) == "1970-01-01T00:00:01.500Z"


def test_bodies_survive_json() -> None:
    assert body_fields(b"\xff") == {"body": "/w==", "body_encoding": "base64"}
    assert body_fields("x") == {"body": "x", "body_encoding": "text"}
    assert json.dumps(body_fields({"a": None})["body"]) == '{"a": null}'
