"""The report's page in a browser, on a phone and on paper."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks.pipeline.traffic import Tables, write
from lisa.pipeline.archive.records import ArchiveGap
from lisa.pipeline.jobs.report import report

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROOT = Path(__file__).parent.parent.parent
KEPT = ROOT / "build" / "reports"
GAPS = 40
SECTIONS = (
    "summary",
    "gaps",
    "throughput",
    "lateness",
    "outcome",
    "slowest",
    "forecast",
    "topics",
    "hours",
    "terms",
)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
needs_poppler = pytest.mark.skipif(
    shutil.which("pdftotext") is None, reason="pdftotext (poppler-utils) is not installed"
)


@dataclass(frozen=True)
class WithGaps:
    """An archive with gaps whose long reasons consist of unique words."""

    tables: Tables

    def log(self) -> DataFrame:
        return self.tables.log()

    def messages(self) -> DataFrame:
        return self.tables.messages()

    def gaps(self) -> list[ArchiveGap]:
        at = datetime(2026, 11, 17, tzinfo=UTC)
        return [
            ArchiveGap("orders", "1-0", 1, "2-0", 9, " ".join(words(number)), at)
            for number in range(GAPS)
        ]


def words(number: int) -> list[str]:
    return [f"gap{number}word{word}" for word in range(14)]


@pytest.fixture(scope="module")
def page(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of three days of six topics, kept in build/reports."""
    where = tmp_path_factory.mktemp("traffic")
    made = write(spark, where, 6_000, end_s=1_795_000_000, hours=72)
    found = report(WithGaps(made), where / "out", where="/data/archive", zone="Europe/Berlin")
    KEPT.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(found.page, KEPT / "report.html"))


class Plain(HTMLParser):
    """Collects sections, drawings with their texts, and all external references."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.drawings: list[tuple[dict[str, str | None], list[str]]] = []
        self.fetched: list[str] = []
        self.styles = 0
        self._in_text = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.fetched += [
            f"{name}={value}"
            for name, value in attrs
            if name in {"src", "href", "xlink:href", "data", "action", "srcset", "poster"}
            and not (value or "").startswith("#")
        ]
        self.styles += "style" in given
        if tag in {"script", "link", "iframe", "object", "embed"}:
            self.fetched.append(tag)
        if tag == "svg":
            self.drawings.append((given, []))
        self._in_text = tag == "text"

    def handle_data(self, data: str) -> None:
        if self._in_text:
            self.drawings[-1][1].append(data)


@pytest.fixture(scope="module")
def parsed(page: Path) -> Plain:
    parser = Plain()
    parser.feed(page.read_text("utf-8"))
    return parser


def test_the_page_has_every_section(parsed: Plain) -> None:
    assert [name for name in parsed.ids if name in SECTIONS] == list(SECTIONS)
    assert len(parsed.ids) == len(set(parsed.ids))


def test_the_page_is_self_contained(page: Path, parsed: Plain) -> None:
    text = page.read_text("utf-8")
    assert parsed.fetched == []
    assert not re.findall(r"https?:|url\((?!#)|@import", text)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    css = re.search(r"<style>(.*?)</style>", text, re.DOTALL)
    assert policy is not None
    assert css is not None
    digest = base64.b64encode(hashlib.sha256(css[1].encode()).digest()).decode()
    assert policy[1].startswith(f"default-src 'none'; style-src 'sha256-{digest}'")
    assert parsed.styles == 0


TITLES = {
    "Sent and handled": ("messages each hour", "handled", "sent"),
    "Retried and ended otherwise": ("messages each hour", "retried", "garbage"),
    "Lateness, each hour": ("lateness", "half (p50)", "p99", "maximum"),
    "How late the messages were": ("messages", "first deliveries"),
    "Attempts until success": ("attempt that succeeded", "messages", "handled"),
    "Garbage by reason": ("messages",),
    "Latest topics": ("p99 of lateness",),
    "Slowest handling": ("p99 from delivery to ack",),
    "Due each minute": ("messages a minute", "due each minute"),
    "Due each hour": ("messages an hour", "due each hour"),
    "Due each day": ("messages a day", "due each day"),
    "reminders: due, backlog, capacity": ("messages", "backlog at its end"),
    "orders": ("messages each hour", "handled", "sent"),
}


@pytest.mark.parametrize("title", TITLES)
@pytest.mark.parametrize("kind", ["wide", "narrow"])
def test_a_plot_has_title_units_legend_and_alternative_text(
    parsed: Plain, title: str, kind: str
) -> None:
    found = [
        (given, said) for given, said in parsed.drawings if title in said and given["class"] == kind
    ]
    # A title may also be an axis label: select the plot with all texts.
    found = [(given, said) for given, said in found if set(TITLES[title]) <= set(said)]
    assert found, title
    given, said = found[0]
    if title.startswith("Due"):
        assert any(text.startswith("capacity (") for text in said)
    assert given["role"] == "img"
    assert len(given["aria-label"] or "") > 30
    assert any(character.isdigit() for character in given["aria-label"] or "")


def browse(folder: Path, *options: str) -> str:
    """Run a browser without network access, with a temporary profile."""
    assert CHROMIUM is not None
    done = subprocess.run(
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--hide-scrollbars",
            "--no-pdf-header-footer",
            "--virtual-time-budget=3000",
            f"--user-data-dir={folder / 'profile'}",
            *options,
        ],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.stdout


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_screenshot_is_kept(page: Path, tmp_path: Path, scheme: str) -> None:
    picture = KEPT / f"report-1280x800-{scheme}.png"
    picture.unlink(missing_ok=True)
    dark = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    browse(tmp_path, *dark, "--window-size=1280,800", f"--screenshot={picture}", page.as_uri())
    assert picture.stat().st_size > 30_000  # an empty page has 5,000
    assert picture.read_bytes()[16:24] == (1280).to_bytes(4) + (800).to_bytes(4)


@needs_chromium
def test_the_page_fits_a_phone(page: Path, tmp_path: Path) -> None:
    """In a frame of 390 pixels, because browser windows cannot be that narrow."""
    text = re.sub(r"<meta http-equiv[^>]*>", "", page.read_text("utf-8"))
    tell = """<script>
    const wide = [...document.querySelectorAll("body *")].filter(
      one => one.getBoundingClientRect().right > 390.5 && !one.closest("thead"));
    const least = Math.min(...[...document.querySelectorAll("svg.narrow text")].map(
      one => one.getBoundingClientRect().height));
    parent.postMessage([innerWidth, document.documentElement.scrollWidth,
      wide.slice(0, 3).map(one => one.outerHTML.slice(0, 80)).join("|"), Math.round(least)]
      .join(";"), "*")</script>"""
    (tmp_path / "page.html").write_text(text.replace("</body>", f"{tell}</body>"), "utf-8")
    frame = (
        '<body style="margin:0"><script>onmessage = event => document.title = event.data</script>'
        '<iframe src="page.html" width="390" height="6000" style="border:0"></iframe>'
    )
    (tmp_path / "frame.html").write_text(frame, "utf-8")
    here = (tmp_path / "frame.html").as_uri()
    said = re.search(r"<title>(.*?)</title>", browse(tmp_path, "--dump-dom", here))
    picture = KEPT / "report-390.png"
    browse(tmp_path, "--window-size=500,6000", f"--screenshot={picture}", here)
    assert said is not None
    inner, scroll, wide, least = said[1].split(";")
    assert (inner, scroll, wide) == ("390", "390", "")
    assert int(least) >= 10, "letters too small to read"


@needs_chromium
@needs_poppler
def test_no_row_is_split_on_paper(page: Path, tmp_path: Path) -> None:
    pdf = KEPT / "report.pdf"
    browse(tmp_path, f"--print-to-pdf={pdf}", page.as_uri())
    text = subprocess.run(
        ["pdftotext", "-layout", str(pdf), "-"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    pages = text.split("\f")
    row_pages = []
    for number in range(GAPS):
        on = {
            index
            for index, one in enumerate(pages)
            for word in words(number)
            if re.search(rf"\b{word}\b", one)
        }
        assert len(on) == 1, f"the row of gap {number} stands on pages {sorted(on)}"
        found = sum(bool(re.search(rf"\b{word}\b", pages[min(on)])) for word in words(number))
        assert found == len(words(number))
        row_pages.append(min(on))
    assert len(set(row_pages)) > 1, "the table fits one page: this proves nothing"
    for index in set(row_pages):
        assert re.search("Topic +Found at", pages[index]), "a page without the table's head"
    hours = [
        index
        for index, one in enumerate(pages)
        if re.search(r"^ *\d{4}-\d\d-\d\d \d\d:00 ", one, re.MULTILINE)
    ]
    assert len(hours) > 1
    for index in hours:
        for line in re.findall(
            r"^ *\d{4}-\d\d-\d\d \d\d:00  ?[a-z].*$", pages[index], re.MULTILINE
        ):
            assert len(line.split()) >= 11, f"a row without its cells: {line}"
