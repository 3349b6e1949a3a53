from tests.generators import DOCS, generator


def test_the_page_matches_the_models() -> None:
    page = (DOCS / "reference" / "settings.md").read_text(encoding="utf-8")
    assert page == generator("generate_settings").render(), "run: python docs/generate_settings.py"


def test_every_key_has_a_line_of_text() -> None:
    rows = [
        line
        for line in generator("generate_settings").render().splitlines()
        if line.startswith("| `")
    ]
    assert len(rows) > 40
    for row in rows:
        assert len(row.rstrip(" |").rpartition("| ")[2]) > 5, row
