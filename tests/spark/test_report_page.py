"""The report's page in a browser, on a phone and on paper."""

import re
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from benchmarks.pipeline.traffic import write
from lisa.pipeline.archive.base import ArchiveGap
from lisa.pipeline.jobs.report import report
from tests.browser.conftest import browser, new_tab

__all__ = ["browser"]  # a fixture

GAPS = 40
SECTIONS = (
    *("summary", "gaps", "throughput", "lateness", "outcome", "slowest", "forecast", "topics"),
    *("hours", "terms"),
)


def words(number: int) -> list[str]:
    return [f"gap{number}word{word}" for word in range(14)]


@pytest.fixture(scope="module")
def page(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of three days of six topics; the reason of each gap has words of its own."""
    where, at = tmp_path_factory.mktemp("traffic"), datetime(2026, 11, 17, tzinfo=UTC)
    made = write(spark, where, 6_000, end_s=1_795_000_000, hours=72)
    gaps = [
        ArchiveGap("orders", "1-0", 1, "2-0", 9, " ".join(words(number)), at)
        for number in range(GAPS)
    ]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(made), "gaps", lambda _: gaps)
        found = report(made, where / "out", where="/data/archive", zone="Europe/Berlin")
    return Path(found.page)


def test_the_page_has_every_section_and_is_self_contained(page: Path) -> None:
    text = page.read_text("utf-8")
    ids = re.findall(r' id="([^"]*)"', text)
    assert [name for name in ids if name in SECTIONS] == list(SECTIONS)
    assert len(ids) == len(set(ids))
    fetching = (
        r'<(?:script|link|iframe|object|embed)|\b(?:href|src|srcset|data|action|poster)="[^#]'
    )
    for forbidden in (fetching, r"https?:|url\((?!#)|@import", r"<[^>]* on[a-z]+="):
        assert not re.findall(forbidden, text)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; style-src 'unsafe-inline';")


TITLES = {
    "Sent and handled": ("messages each hour", "handled", "sent"),
    "Retried and ended otherwise": ("messages each hour", "retried", "garbage"),
    "Lateness, each hour": ("lateness", "half (p50)", "p99", "maximum"),
    "How late the messages were": ("messages", "first deliveries"),
    "Attempts until success": ("messages by attempt that succeeded",),
    "Garbage by reason": ("messages",),
    "Latest topics": ("p99 of lateness",),
    "Slowest handling": ("p99 from delivery to ack",),
    "Due each minute": ("messages a minute", "due each minute"),
    "Due each hour": ("messages an hour", "due each hour"),
    "Due each day": ("messages a day", "due each day"),
    "reminders: due, backlog, capacity": ("messages", "backlog at its end"),
    "orders": ("messages each hour", "handled", "sent"),
}


@pytest.mark.parametrize("kind", ["wide", "narrow"])
def test_a_plot_has_title_units_legend_and_alternative_text(page: Path, kind: str) -> None:
    plots = []
    for attributes, drawing in re.findall(
        r"<svg ([^>]*)>(.*?)</svg>", page.read_text("utf-8"), re.DOTALL
    ):
        given = dict(re.findall(r'([a-z-]+)="([^"]*)"', attributes))
        if given["class"] == kind:
            plots.append((given, re.findall(r"<text[^>]*>([^<]*)", drawing)))
    for title, texts in TITLES.items():
        # A title may also be an axis label: select the plot with all texts.
        given, said = next(plot for plot in plots if {title, *texts} <= set(plot[1]))
        if title.startswith("Due"):
            assert any(text.startswith("capacity (") for text in said)
        assert given["role"] == "img"
        assert re.search(r"\d", given["aria-label"])
        assert len(given["aria-label"]) > 30


TOO_WIDE = """() => [...document.querySelectorAll("body *")].filter(
  one => one.getBoundingClientRect().right > 390.5 && !one.closest("thead"))
  .slice(0, 3).map(one => one.outerHTML.slice(0, 80))"""
LEAST = """() => Math.min(...[...document.querySelectorAll("svg.narrow text")].map(
  one => one.getBoundingClientRect().height))"""


def test_the_page_fits_a_phone_and_paper(browser: Any, page: Path, tmp_path: Path) -> None:
    """A screen shows more than an empty page, and no row of a table is split between pages."""
    for scheme in ("light", "dark"):
        with new_tab(browser, "", color_scheme=scheme) as tab:
            tab.open(page.as_uri())
            assert len(tab.page.screenshot()) > 30_000  # an empty page has 5,000
            assert tab.complaints == []
    with new_tab(browser, "", viewport={"width": 390, "height": 844}) as tab:
        tab.open(page.as_uri())
        assert tab.page.evaluate("document.documentElement.scrollWidth") == 390
        assert tab.page.evaluate(TOO_WIDE) == []
        assert tab.page.evaluate(LEAST) >= 9.5, "letters too small to read"
        tab.page.pdf(path=tmp_path / "report.pdf", prefer_css_page_size=True)
    if shutil.which("pdftotext") is None:
        pytest.skip("pdftotext (poppler-utils) is not installed")
    text = subprocess.run(
        ["pdftotext", "-layout", str(tmp_path / "report.pdf"), "-"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    pages = text.split("\f")
    row_pages = []
    for number in range(GAPS):
        on = [[bool(re.search(rf"\b{word}\b", one)) for word in words(number)] for one in pages]
        found = [index for index, seen in enumerate(on) if any(seen)]
        assert len(found) == 1, f"the row of gap {number} stands on pages {found}"
        assert all(on[found[0]])
        row_pages.append(found[0])
    assert len(set(row_pages)) > 1, "the table fits one page: this proves nothing"
    for index in set(row_pages):
        assert re.search("Topic +Found at", pages[index]), "a page without the table's head"
    hour = r"^ *\d{4}-\d\d-\d\d \d\d:00 "
    hours = [one for one in pages if re.search(hour, one, re.MULTILINE)]
    assert len(hours) > 1
    for one in hours:
        for line in re.findall(rf"{hour} ?[a-z].*$", one, re.MULTILINE):
            assert len(line.split()) >= 11, f"a row without its cells: {line}"
