"""The report's page as people see it: in a browser, on a phone, on paper."""

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
from lisa.pipeline.archive.records import Gap
from lisa.pipeline.jobs.report import report

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROOT = Path(__file__).parent.parent.parent
KEPT = ROOT / "build" / "reports"
GAPS = 40
SECTIONS = ("summary", "gaps", "throughput", "lateness", "outcome", "slowest", "forecast", "topics",
            "hours", "terms")  # fmt: skip
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
needs_poppler = pytest.mark.skipif(
    shutil.which("pdftotext") is None, reason="pdftotext (poppler-utils) is not installed"
)


@dataclass(frozen=True)
class WithGaps:
    """An archive with gaps whose reasons take several lines, each word to be found again."""

    tables: Tables

    def log(self) -> DataFrame:
        return self.tables.log()

    def messages(self) -> DataFrame:
        return self.tables.messages()

    def gaps(self) -> list[Gap]:
        at = datetime(2026, 11, 17, tzinfo=UTC)
        return [
            Gap("orders", "1-0", 1, "2-0", 9, " ".join(words(number)), at) for number in range(GAPS)
        ]


def words(number: int) -> list[str]:
    return [f"gap{number}word{word}" for word in range(14)]


@pytest.fixture(scope="module")
def page(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of three days of six topics, kept to be looked at."""
    where = tmp_path_factory.mktemp("traffic")
    made = write(spark, where, 6_000, end_s=1_795_000_000, hours=72)
    found = report(WithGaps(made), where / "out", where="/data/archive", zone="Europe/Berlin")
    KEPT.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(found.page, KEPT / "report.html"))


class Plain(HTMLParser):
    """Sections, drawings with their texts, and everything that a browser would go and get."""

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
            f"{name}={value}" for name, value in attrs
            if name in {"src", "href", "xlink:href", "data", "action", "srcset", "poster"}
            and not (value or "").startswith("#")
        ]  # fmt: skip
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


def test_every_section_is_there(parsed: Plain) -> None:
    assert [name for name in parsed.ids if name in SECTIONS] == list(SECTIONS)
    assert len(parsed.ids) == len(set(parsed.ids))


def test_it_needs_nothing_but_itself(page: Path, parsed: Plain) -> None:
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
    "Lateness, by hour": ("lateness", "half (p50)", "p99", "maximum"),
    "How late the messages were": ("messages", "first hand-overs"),
    "Attempts until success": ("attempt that succeeded", "messages", "handled"),
    "Garbage by reason": ("messages",),
    "Latest topics": ("p99 of lateness",),
    "Slowest handling": ("p99 from hand-over to ack",),
    "Due each minute": ("messages a minute", "due each minute"),
    "Due each hour": ("messages an hour", "due each hour"),
    "Due each day": ("messages a day", "due each day"),
    "reminders: due, left over, capacity": ("messages", "left over at its end"),
    "orders": ("messages each hour", "handled", "sent"),
}


@pytest.mark.parametrize("title", TITLES)
@pytest.mark.parametrize("kind", ["wide", "narrow"])
def test_a_plot_has_title_units_legend_and_words(parsed: Plain, title: str, kind: str) -> None:
    found = [(given, said) for given, said in parsed.drawings
             if title in said and given["class"] == kind]  # fmt: skip
    # A name may stand at an axis too: the plot is the one that has all its texts.
    found = [(given, said) for given, said in found if set(TITLES[title]) <= set(said)]
    assert found, title
    given, said = found[0]
    if title.startswith("Due"):
        assert any(text.startswith("capacity (") for text in said)
    assert given["role"] == "img"
    assert len(given["aria-label"] or "") > 30
    assert any(character.isdigit() for character in given["aria-label"] or "")


def browse(place: Path, *options: str) -> str:
    """Run a browser of one's own, without a network, on a profile that goes with it."""
    assert CHROMIUM is not None
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         "--hide-scrollbars", "--no-pdf-header-footer", "--virtual-time-budget=3000",
         f"--user-data-dir={place / 'profile'}", *options],
        check=True, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
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
def test_it_fits_a_phone(page: Path, tmp_path: Path) -> None:
    """In a frame of 390 pixels, for no window of a browser is as narrow."""
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
    text = subprocess.run(["pdftotext", "-layout", str(pdf), "-"], check=True, capture_output=True,
                          text=True, timeout=60).stdout  # fmt: skip
    pages = text.split("\f")
    places = []
    for number in range(GAPS):
        on = {index for index, one in enumerate(pages)
              for word in words(number) if re.search(rf"\b{word}\b", one)}  # fmt: skip
        assert len(on) == 1, f"the row of gap {number} stands on pages {sorted(on)}"
        found = sum(bool(re.search(rf"\b{word}\b", pages[min(on)])) for word in words(number))
        assert found == len(words(number))
        places.append(min(on))
    assert len(set(places)) > 1, "the table fits one page: this proves nothing"
    for index in set(places):
        assert re.search("Topic +Met at", pages[index]), "a page without the table's head"
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
