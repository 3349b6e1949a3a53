"""Each class of the package has a name of its own, so that a name in a log or a diff is clear."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def classes(source: str) -> list[str]:
    """The names of the public classes that a module defines."""
    found = [node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    return [name for name in found if not name.startswith("_")]


def test_no_two_public_classes_share_a_name() -> None:
    homes = defaultdict[str, list[str]](list)
    for path in sorted((ROOT / "lisa").rglob("*.py")):
        for name in classes(path.read_text(encoding="utf-8")):
            homes[name].append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


def test_nested_classes_are_counted_and_private_ones_are_not() -> None:
    assert classes("class A:\n    class B: ...\nclass _C: ...") == ["A", "B"]
