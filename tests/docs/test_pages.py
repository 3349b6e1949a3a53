"""The pages' examples work: programs run, commands and options exist, links lead somewhere."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from tests.servers import connect, no_clock

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "clients").glob("*/README.md"),
        *(ROOT / "docs").rglob("*.md"),
    ]
)
TESTING = ROOT / "docs" / "how-to" / "testing.md"
DEFAULT_URL = "redis://localhost:6379/0"


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def run(program: str, url: str) -> subprocess.CompletedProcess[str]:
    program = program.replace(DEFAULT_URL, url)
    # Not as __main__: a page's `consumer.run()` would run until it is stopped.
    code = f"exec(compile({program!r}, 'page', 'exec'), {{'__name__': 'page'}})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_the_programs_of_the_readme(redis_url: str) -> None:
    first, second = blocks(ROOT / "README.md", "python")
    assert len([line for line in first.splitlines() if line.strip()]) < 15
    assert run(first, redis_url).stdout == "order 42 was not paid: cancelled\n"
    with connect(redis_url) as client:
        client.flushall()
        forgotten = run(first.replace("Manager(server), ", ""), redis_url)
        assert forgotten.stdout == ""
        assert "topic orders: messages are overdue by " in forgotten.stderr
        assert "no manager is running; start one: lisa-manager" in forgotten.stderr
        run(second, redis_url)
        topics = ("reports", "reminders", "calls", "coupons")
        assert [client.zcard(f"lisa:{{{topic}}}:waiting") for topic in topics] == [1] * 4


WITH_PROGRAMS = [
    pytest.param(
        page, marks=() if page.name in ("producer.md", "consumer.md") else pytest.mark.full
    )
    for page in PAGES
    if page.name not in ("README.md", TESTING.name) and blocks(page, "python")
]


@pytest.mark.parametrize("page", WITH_PROGRAMS, ids=name_of)
def test_programs_run(page: Path, redis_url: str) -> None:
    with connect(redis_url) as client:  # as the pages' commands do
        client.hset("lisa:{orders}:options", "journal", "1")
    run("\n".join(blocks(page, "python")), redis_url)


@pytest.mark.full
def test_the_tests_of_the_page_on_testing_pass(tmp_path: Path) -> None:
    if reason := no_clock():
        pytest.skip(reason)
    application, *tests = blocks(TESTING, "python")
    (tmp_path / "shop.py").write_text(application)
    (tmp_path / "test_shop.py").write_text("\n".join(tests))
    plugins = ["-p", "lisa.testing.plugin", "-p", "asyncio"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugins, "test_shop.py"],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout
    count = sum(one.count("def test_") for one in tests)
    assert f"{count} passed" in done.stdout


def commands() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for block in blocks(page, "console"):
            for line in block.splitlines():
                command = line.removeprefix("$ ").split("  #")[0].split(" | ")[0].strip()
                if line.startswith("$ ") and command.startswith("lisa"):
                    found.append((name_of(page), command))
    return found


def command_tree(program: str) -> click.Command:
    module = "main" if program == "lisa" else program.removeprefix("lisa-")
    found = importlib.import_module(f"lisa.cli.{module}").main
    assert isinstance(found, click.Command)
    return found


def test_commands_and_their_options_exist() -> None:
    found = commands()
    assert len(found) > 100
    for page, command in found:
        program, *words = shlex.split(command)
        here = command_tree(program)
        context = click.Context(here)
        options = {name for param in here.params for name in param.opts}
        for word in words:
            if word.startswith("--"):
                assert word.split("=")[0] in options, f"{page}: {command}: no option {word}"
            elif isinstance(here, click.Group) and (child := here.get_command(context, word)):
                here, context = child, click.Context(child, parent=context)
                options |= {name for param in here.params for name in param.opts}
        assert not isinstance(here, click.Group) or len(words) == 0, f"{page}: {command}"


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if not target.startswith(("http://", "https://")):
                assert (page.parent / target).exists(), f"{page}: {target}"
