"""Adds the description and the links to the metadata of the package.

The description is the README. Links to files lead nowhere there: they become links into the
repository at PROJECT_URL, or, without this variable, plain text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

IMAGE = re.compile(r"^!\[([^\]]*)\]\((?!https?://)([^)]*)\)\n\n?", re.MULTILINE)
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?://)([^)]*)\)")


def description(text: str, repository: str) -> str:
    """The README with links that work outside the repository."""
    if not repository:
        return LINK.sub(r"\1", IMAGE.sub("", text))
    text = IMAGE.sub(rf"![\1]({repository}/raw/main/\2)\n\n", text)
    return LINK.sub(rf"[\1]({repository}/blob/main/\2)", text)


def links(repository: str) -> dict[str, str]:
    """The links that package indexes show beside the description."""
    if not repository:
        return {}
    return {
        "Documentation": f"{repository}/blob/main/docs/quick-start.md",
        "Source": repository,
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }


class Description(MetadataHookInterface):
    """Sets `readme` from README.md, and `urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add both to the metadata of the package."""
        repository = os.environ.get("PROJECT_URL", "").rstrip("/")
        text = description(Path(self.root, "README.md").read_text("utf-8"), repository)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = links(repository)
