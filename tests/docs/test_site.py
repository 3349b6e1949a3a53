"""The documentation site builds strictly, and works without a network."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lisa

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(made)],
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stderr
    return made


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


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    page = (site / "reference" / "api.html").read_text()
    ids = set(re.findall(r'id="lisa\.([\w.]+)"', page))
    classes = {name for name in lisa.__all__ if name[0].isupper()}
    # The first is made by replicas(), the others are aliases for annotations.
    assert classes - ids == {"Replicas", "RetryDelays", "Lifespan"}
    assert {"Producer.send", "Producer.cancel", "Consumer.pull", "Manager.run"} <= ids
    assert "delay: a timedelta or text" in re.sub(r"<[^>]+>", "", page)


def test_the_search_finds_words_newcomers_use(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    texts = " ".join(entry["title"] + " " + entry["text"] for entry in index["docs"]).lower()
    words = ("dead letter", "visibility timeout", "idempotent", "debounce", "back-off", "celery")
    assert [word for word in words if word not in texts] == []


def test_llms_txt_names_every_page_and_its_source(site: Path) -> None:
    text = (site / "llms.txt").read_text()
    names = re.findall(r"\]\(([^)]+)\)", text)
    assert {f"{page.relative_to(ROOT / 'docs')}" for page in ROOT.glob("docs/**/*.md")} < set(names)
    for name in names:
        assert (site / name).read_text().startswith("# "), name


def test_runbook_addresses_of_alerts_lead_to_sections(site: Path) -> None:
    rules = (ROOT / "configs" / "alerts.yml").read_text()
    found = re.findall(r"runbook_url: https://docs\.example/lisa/(\S+)#(\w+)", rules)
    assert len(found) == rules.count("- alert:")
    for page, section in found:
        assert f'id="{section}"' in (site / page).read_text(), section
