"""Builds the package's description: the README without links to files, which lead nowhere there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

IMAGE = re.compile(r"^!\[[^\]]*\]\((?!https?://)[^)]*\)\n\n?", re.MULTILINE)
LINK = re.compile(r"\[([^\]]+)\]\((?!https?://)[^)]*\)")


class Description(MetadataHookInterface):
    """Sets `readme` from README.md."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the description to the metadata of the package."""
        text = Path(self.root, "README.md").read_text("utf-8")
        text = LINK.sub(r"\1", IMAGE.sub("", text))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
