"""Each attribute of the consumer's classes is changed only by its own class."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

CONSUMER = Path(__file__).parent.parent.parent / "lisa" / "consumer"

CHANGES = {
    *("append", "appendleft", "extend", "extendleft", "insert", "pop", "popleft", "remove"),
    *("add", "discard", "update", "setdefault", "clear", "set"),
}
"""Methods that change a container or an event."""


def changes_from_outside(source: str) -> list[str]:
    """Attributes of other objects that are assigned, deleted, or changed in place."""
    tree = ast.parse(source)
    return [ast.unparse(node) for node in changed(tree) if not is_own(node)]


def changed(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Attributes that a statement changes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(
            node.ctx, ast.Store | ast.Del
        ):
            target = node.value if isinstance(node, ast.Subscript) else node
        elif isinstance(node, ast.Attribute) and node.attr in CHANGES:
            target = node.value
        else:
            continue
        if isinstance(target, ast.Attribute):
            yield target


def is_own(node: ast.Attribute) -> bool:
    """Whether the change is to the object itself; a function's name is not state."""
    is_self = isinstance(node.value, ast.Name) and node.value.id in {"self", "sys"}
    return is_self or node.attr == "__qualname__"


def test_no_class_changes_the_attributes_of_another() -> None:
    found = {
        path.name: changes_from_outside(path.read_text("utf-8")) for path in CONSUMER.glob("*.py")
    }
    assert {name: changes for name, changes in found.items() if changes} == {}


@pytest.mark.parametrize(
    "source",
    [
        "sub.group = 'lisa'",
        "sub.group, self.x = 'lisa', 1",
        "sub.count += 1",
        "self._sub.is_paused = True",
        "del sub.group",
        "sub.held['1-1'] = held",
        "sub.held.pop('1-1')",
        "forget = sub.held.pop",
        "sub.closing.set()",
    ],
)
def test_a_change_from_outside_is_found(source: str) -> None:
    assert changes_from_outside(source) != []


@pytest.mark.parametrize(
    "source",
    ["self.group = 'lisa'", "self.held.pop('1-1')", "del self.held['1-1']", "found[1] = 2"],
)
def test_a_change_from_inside_is_allowed(source: str) -> None:
    assert changes_from_outside(source) == []
