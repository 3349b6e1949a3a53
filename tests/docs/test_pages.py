"""Pages and site: programs run, commands and options exist, links lead somewhere."""

import importlib
import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import lisa
from lisa.outbox import Relay
from tests.programs import python
from tests.servers import connect, no_clock

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES += sorted([*(ROOT / "clients").glob("*/README.md"), *(ROOT / "docs").rglob("*.md")])
WITH_TESTS = [
    ROOT / "docs" / "how-to" / name
    for name in ("testing.md", "debounce.md", "limits.md", "order.md", "fairness.md", "urgency.md")
]
"""The first program of each is tested by the others."""

DEFAULT_URL = "redis://localhost:6379/0"


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def run(program: str, url: str) -> subprocess.CompletedProcess[str]:
    """Run a page's program, not as __main__: `consumer.run()` would run until it is stopped."""
    program = program.replace(DEFAULT_URL, url)
    return python("-c", f"exec(compile({program!r}, 'page', 'exec'), {{'__name__': 'page'}})")


def test_the_programs_of_the_readme(redis_url: str, tmp_path: Path) -> None:
    first, second, third = blocks(ROOT / "README.md", "python")
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
        client.flushall()
        database = f"sqlite:///{tmp_path / 'shop.db'}"
        run(third.replace("sqlite:///shop.db", database), redis_url)
        relay = Relay(database, redis_url)
        assert relay.step() == 1
        relay.stop()
        assert client.zcard("lisa:{orders}:waiting") == 1


WITH_PROGRAMS = [
    pytest.param(page, marks=() if page.stem in ("producer", "consumer") else pytest.mark.full)
    for page in PAGES
    if page.name != "README.md" and page not in WITH_TESTS and blocks(page, "python")
]


@pytest.mark.parametrize("page", WITH_PROGRAMS, ids=name_of)
def test_programs_run(page: Path, redis_url: str) -> None:
    with connect(redis_url) as client:  # as the pages' commands do
        client.hset("lisa:{orders}:options", "journal", "1")
    run("\n".join(blocks(page, "python")), redis_url)


@pytest.mark.full
@pytest.mark.parametrize("page", WITH_TESTS, ids=name_of)
def test_the_tests_of_a_page_pass(page: Path, tmp_path: Path) -> None:
    if reason := no_clock():
        pytest.skip(reason)
    application, *tests = blocks(page, "python")
    (tmp_path / application.split()[1]).write_text(application)
    (tmp_path / "test_page.py").write_text("\n".join(tests))
    plugins = ("-p", "lisa.testing.plugin", "-p", "asyncio")
    env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    done = python("-m", "pytest", "-q", *plugins, "test_page.py", cwd=tmp_path, env=env)
    count = sum(one.count("def test_") for one in tests)
    assert f"{count} passed" in done.stdout


def commands() -> Iterator[tuple[str, str]]:
    """Each command of Lisa on a page, without what it is piped into."""
    for page in PAGES:
        for line in "".join(blocks(page, "console")).splitlines():
            command = line.removeprefix("$ ").split("  #")[0].split(" | ")[0].strip()
            if line.startswith("$ ") and command.startswith("lisa"):
                yield name_of(page), command


def test_commands_and_their_options_exist() -> None:
    found = list(commands())
    assert len(found) > 100
    for page, command in found:
        program, *words = shlex.split(command)
        module = "main" if program == "lisa" else program.removeprefix("lisa-")
        here: click.Command = importlib.import_module(f"lisa.cli.{module}").main
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


def test_every_pair_of_features_is_among_the_combinations() -> None:
    intro, *sections = (ROOT / "docs/reference/combinations.md").read_text().split("\n## ")
    names = [" ".join(name.split()) for name in re.findall(r"\[([^]]+)\]\(#", intro)]
    names.append("capacity")
    assert len(names) == 20
    for section, name, after in zip(sections, names, range(1, 20), strict=False):
        assert section.lower().startswith(name.lower())
        found = re.findall(r"^\| (.+?) \| .+ \|$", section, re.MULTILINE)[1:]
        independent = re.search(r"^Independent of: (.+)\.$", section, re.MULTILINE)
        if independent:
            found += re.findall("|".join(names), independent[1])
        assert sorted(found) == sorted(names[after:]), name
    assert len(sections) == 19


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documentation site, which builds without a warning."""
    made = tmp_path_factory.mktemp("site")
    options = ("--strict", "--quiet", "--site-dir", str(made))
    python("-m", "mkdocs", "build", *options, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    return made


@pytest.mark.full
def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    loads = re.compile(
        r"<(?:script|img|iframe|source)\b[^>]*?\bsrc=\"?([^\s\">]+)"
        r"|<link\b(?![^>]*\bcanonical\b)[^>]*?\bhref=\"?([^\s\">]+)"
    )
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 50
    for page in pages:
        found = ["".join(one) for one in loads.findall(page.read_text())]
        assert [one for one in found if re.match(r"(https?:)?//", one)] == [], page
        assert found


@pytest.mark.full
def test_every_public_name_is_in_the_reference(site: Path) -> None:
    page = (site / "reference" / "api.html").read_text()
    ids = set(re.findall(r'id="lisa\.([\w.]+)"', page))
    classes = {name for name in lisa.__all__ if name[0].isupper()}
    # The first is made by replicas(), the others are aliases for annotations.
    assert classes - ids == {"Replicas", "RetryDelays", "Lifespan"}
    assert {"Producer.send", "Producer.cancel", "Consumer.pull", "Manager.run"} <= ids
    assert "delay: counted from the server's clock" in re.sub(r"<[^>]+>", "", page)


@pytest.mark.full
def test_search_llms_txt_and_alerts_lead_to_pages(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    texts = " ".join(entry["title"] + " " + entry["text"] for entry in index["docs"]).lower()
    words = ("dead letter", "visibility timeout", "idempotent", "debounce", "back-off", "celery")
    assert [word for word in words if word not in texts] == [], "newcomers use them"
    names = re.findall(r"\]\(([^)]+)\)", (site / "llms.txt").read_text())
    assert {f"{page.relative_to(ROOT / 'docs')}" for page in ROOT.glob("docs/**/*.md")} < set(names)
    for name in names:
        assert (site / name).read_text().startswith("# "), name
    rules = (ROOT / "configs" / "alerts.yml").read_text()
    found = re.findall(r"runbook_url: https://docs\.example/lisa/(\S+)#(\w+)", rules)
    assert len(found) == rules.count("- alert:")
    for page, section in found:
        assert f'id="{section}"' in (site / page).read_text(), section
