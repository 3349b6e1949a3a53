import importlib.util
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).parents[2] / "docs"


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "generate_settings", DOCS / "generate_settings.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_the_one_that_the_models_give() -> None:
    page = (DOCS / "reference" / "settings.md").read_text(encoding="utf-8")
    assert page == generator().render(), "run: python docs/generate_settings.py"


def test_every_key_has_a_line_of_text() -> None:
    rows = [line for line in generator().render().splitlines() if line.startswith("| `")]
    assert len(rows) > 40
    for row in rows:
        assert len(row.rstrip(" |").rpartition("| ")[2]) > 5, row
