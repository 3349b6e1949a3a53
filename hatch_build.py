"""Builds the package: its description, and a spare copy of the client's files.

The description is the README without links to files, which lead nowhere there. Decision 25 explains
the spare copy.
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
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


class SpareCopy(BuildHookInterface):  # type: ignore[type-arg]
    """Adds a copy of the client's files, and the .pth file that makes Python find the copy."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add both to a wheel; an editable wheel only refers to the checkout."""
        if version == "editable":
            return
        packaging = Path(self.root, "packaging")
        pth = packaging / "lisa-delay-queue.pth"
        folder = pth.read_text("utf-8").strip()
        client = runpy.run_path(str(packaging / "client" / "hatch_build.py"))["installed_files"]()
        copies = {source: f"{folder}/{target}" for source, target in client.items()}
        build_data["force_include"] |= {str(pth): pth.name, **copies}
