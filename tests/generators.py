"""Modules outside packages: generators of reference pages and client types, and demos."""

import importlib.util
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).parent.parent / "docs"


def generator(name: str, folder: Path = DOCS) -> ModuleType:
    """Import one of them; their folders are not packages."""
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
