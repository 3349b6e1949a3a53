"""Builds the client's distribution from its part of the source tree."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

HERE = Path(__file__).resolve().parent
SOURCE = HERE if (HERE / "lisa").is_dir() else HERE.parent.parent
"""The source tree: in a source distribution this folder, in a checkout the root."""

PARTS = (
    "lisa/__init__.py",
    "lisa/py.typed",
    "lisa/admin",
    "lisa/cli/__init__.py",
    "lisa/cli/consumer.py",
    "lisa/cli/modules.py",
    "lisa/cli/rights.py",
    "lisa/consumer",
    "lisa/core",
    "lisa/middleware.py",
    "lisa/otel",
    "lisa/producer",
    "lua",
)
"""Files and folders of the client; all others belong to `lisa-delay-queue`."""


def version() -> str:
    """The version of both distributions."""
    text = (SOURCE / "lisa" / "__init__.py").read_text("utf-8")
    (found,) = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    return str(found)


def repository() -> str:
    """The public address of the repository, from the environment; empty if it has none."""
    return os.environ.get("PROJECT_URL", "").rstrip("/")


def urls() -> dict[str, str]:
    """The links that package indexes show beside the description."""
    root = repository()
    if not root:
        return {}
    return {
        "Documentation": f"{root}/blob/main/docs/quick-start.md",
        "Source": root,
        "Changelog": f"{root}/blob/main/CHANGELOG.md",
        "Issues": f"{root}/issues",
    }


def installed_files() -> dict[str, str]:
    """Where each part is installed, by its path in the source tree."""
    return {str(SOURCE / part): "lisa/lua" if part == "lua" else part for part in PARTS}


class Links(MetadataHookInterface):
    """Sets the project's URLs."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the URLs to the metadata of the package."""
        metadata["urls"] = urls()


class Parts(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the parts to a wheel or a source distribution."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the parts; an editable wheel only refers to the checkout."""
        if self.target_name == "sdist":
            build_data["force_include"] |= {str(SOURCE / part): part for part in PARTS}
        elif version != "editable":
            build_data["force_include"] |= installed_files()
