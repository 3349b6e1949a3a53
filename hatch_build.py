"""Builds the package: its description, and a spare copy of the client's files.

The description is the README. Links to files lead nowhere there: they become links into the
repository at PROJECT_URL, or, without this variable, plain text. Decision 25 explains the spare
copy.
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

IMAGE = re.compile(r"^!\[([^\]]*)\]\((?!https?://)([^)]*)\)\n\n?", re.MULTILINE)
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?://)([^)]*)\)")


def description(text: str, repository: str) -> str:
    """The README with links that work outside the repository."""
    if not repository:
        return LINK.sub(r"\1", IMAGE.sub("", text))
    text = IMAGE.sub(rf"![\1]({repository}/raw/main/\2)\n\n", text)
    return LINK.sub(rf"[\1]({repository}/blob/main/\2)", text)


def client(root: str) -> dict[str, Any]:
    """What the client's build file defines."""
    return runpy.run_path(str(Path(root, "packaging", "client", "hatch_build.py")))


class Description(MetadataHookInterface):
    """Sets `readme` from README.md, and `urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add description and URLs to the metadata of the package."""
        build = client(self.root)
        text = description(Path(self.root, "README.md").read_text("utf-8"), build["repository"]())
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = build["urls"]()


class SpareCopy(BuildHookInterface):  # type: ignore[type-arg]
    """Adds a copy of the client's files, and the .pth file that makes Python find the copy."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add both to a wheel; an editable wheel only refers to the checkout."""
        if version == "editable":
            return
        pth = Path(self.root, "packaging", "lisa-delay-queue.pth")
        folder = pth.read_text("utf-8").strip()
        files = client(self.root)["installed_files"]()
        copies = {source: f"{folder}/{target}" for source, target in files.items()}
        build_data["force_include"] |= {str(pth): pth.name, **copies}
