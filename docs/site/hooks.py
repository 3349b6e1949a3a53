"""Hooks of the documentation site: pages from outside docs/, links to files, and llms.txt.

The pages link to each other as files of the repository do, so that they also work without the site.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]

ELSEWHERE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "clients/typescript/README.md": "clients/typescript.md",
    "clients/go/README.md": "clients/go.md",
    "demos/README.md": "demos.md",
    "benchmarks/peers/README.md": "benchmarks/peers.md",
    "benchmarks/report/report.md": "benchmarks/report.md",
    "benchmarks/report/gateway.md": "benchmarks/gateway.md",
    "benchmarks/report/pipeline.md": "benchmarks/pipeline.md",
    "benchmarks/report/safety.md": "benchmarks/safety.md",
    "benchmarks/report/torture.md": "benchmarks/torture.md",
}
"""Pages of the site that are files outside docs/."""

SOURCES = {page: source for source, page in ELSEWHERE.items()}
IMAGES = (".png", ".svg")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]*)(#[^)\s]*)?\)")

SUMMARY = """# Lisa

> A delayed-message queue for Python on Redis Streams: never early, usually milliseconds late,
> at-least-once. Roles: producer (sends), manager (promotes due messages), consumer (runs handlers).

"""


def on_config(config: MkDocsConfig) -> None:
    """Add the decisions and the benchmarks' reports to the last section of the navigation."""
    decisions = sorted((ROOT / "docs" / "decisions").glob("0*.md"))
    reports = [page for page in ELSEWHERE.values() if page.startswith("benchmarks/")]
    config.nav[-1]["Explanation"] += [  # type: ignore[index]
        {"Benchmarks": reports},
        {"Decisions": ["decisions/README.md", *(f"decisions/{page.name}" for page in decisions)]},
    ]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and images from outside docs/."""
    for source, page in ELSEWHERE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    for image in sorted((ROOT / "benchmarks" / "report").iterdir()):
        if image.suffix in IMAGES:
            name = f"benchmarks/{image.name}"
            files.append(File.generated(config, name, abs_src_path=str(image)))
    return files


def on_page_markdown(markdown: str, *, page: Page, files: Files, **_: Any) -> str:
    """Point links at pages of the site; a link to another file becomes the file's path."""
    here = page.file.src_uri
    source = ROOT / SOURCES.get(here, f"docs/{here}")

    def link(found: re.Match[str]) -> str:
        mark, text, target, anchor = found.groups()
        if not target or "://" in target:
            return found[0]
        path = (source.parent / target).resolve().relative_to(ROOT).as_posix()
        there = _on_site(path)
        if there is None or files.get_file_from_path(there) is None:
            return text if text.startswith("`") else f"{text} (`{path}`)"
        relative = os.path.relpath(there, Path(here).parent)
        return f"{mark}[{text}]({relative}{anchor or ''})"

    return LINK.sub(link, markdown)


def _on_site(path: str) -> str | None:
    """The site's path of a file of the repository; None if the site does not have it."""
    if path in ELSEWHERE:
        return ELSEWHERE[path]
    if path.startswith("docs/"):
        inside = path.removeprefix("docs/")
        return f"{inside}/README.md" if (ROOT / path).is_dir() else inside
    if path.startswith("benchmarks/report/") and path.endswith(IMAGES):
        return f"benchmarks/{Path(path).name}"
    return None


def on_post_build(config: MkDocsConfig) -> None:
    """Write llms.txt (titles and addresses of the pages) and the pages' sources beside it."""
    site, lines = Path(config.site_dir), [SUMMARY]
    pages = sorted(ROOT.glob("docs/**/*.md"))
    for source in [*(ROOT / name for name in ("README.md", "CHANGELOG.md")), *pages]:
        name = _on_site(source.relative_to(ROOT).as_posix()) or ""
        text = source.read_text(encoding="utf-8")
        title = next(line for line in text.splitlines() if line.startswith("# "))[2:]
        lines.append(f"- [{title}]({name})\n")
        copy = site / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
    (site / "llms.txt").write_text("".join(lines), encoding="utf-8")
