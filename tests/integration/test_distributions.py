"""The files of both distributions, as wheels and as source distributions."""

from __future__ import annotations

import re
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import lisa
from tests.servers import ROOT
from tests.wheels import CLIENT, COPY, Wheels, build, build_both


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Wheels:
    return build_both(tmp_path_factory.mktemp("dist"))


def files(wheel: Path) -> list[str]:
    """The names of all files but the metadata."""
    names = zipfile.ZipFile(wheel).namelist()
    return [name for name in names if ".dist-info/" not in name]


def in_the_tree() -> list[str]:
    """Where each file of the source tree belongs."""
    tree = [
        (path, f"lisa/{path.relative_to(ROOT)}" if part != "lisa" else str(path.relative_to(ROOT)))
        for part in ("lisa", "lua", "configs")
        for path in (ROOT / part).rglob("*")
    ]
    return sorted(name for path, name in tree if path.is_file() and path.suffix != ".pyc")


def test_each_file_belongs_to_one_distribution(wheels: Wheels) -> None:
    full = [name for name in files(wheels.full) if name.startswith("lisa/")]
    assert sorted(files(wheels.client) + full) == in_the_tree()
    assert any(name.endswith(".lua") for name in files(wheels.client))
    assert "lisa/py.typed" in files(wheels.client)


def test_the_full_wheel_adds_a_copy_of_the_clients_files_elsewhere(wheels: Wheels) -> None:
    rest = {name for name in files(wheels.full) if not name.startswith("lisa/")}
    assert rest == {f"{COPY}/{name}" for name in files(wheels.client)} | {"lisa-delay-queue.pth"}
    assert not COPY.isidentifier(), "no program can import the copy by its own name"


def test_the_description_has_no_links_to_files(wheels: Wheels) -> None:
    with zipfile.ZipFile(wheels.full) as archive:
        (name,) = (one for one in archive.namelist() if one.endswith("/METADATA"))
        head, _, text = archive.read(name).decode().partition("\n\n")
    assert "Description-Content-Type: text/markdown" in head
    assert "Project-URL:" not in head
    targets = re.findall(r"\]\(([^)]*)\)", text)
    assert [one for one in targets if not one.startswith(("https://", "http://"))] == []
    assert "explained in the glossary." in " ".join(text.split())
    readme = (ROOT / "README.md").read_text()
    assert re.findall("^```.*|^#.*", text, re.MULTILINE) == re.findall(
        "^```.*|^#.*", readme, re.MULTILINE
    )


def test_a_build_with_a_project_url_links_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = "https://git.example/lisa"
    monkeypatch.setenv("PROJECT_URL", f"{root}/")
    for wheel in build_both(tmp_path):
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (one for one in archive.namelist() if one.endswith("/METADATA"))
            head, _, text = archive.read(name).decode().partition("\n\n")
        assert f"\nProject-URL: Source, {root}\n" in head
        assert f"\nProject-URL: Changelog, {root}/blob/main/CHANGELOG.md\n" in head
    # `text` is the description of the full distribution.
    assert f"[glossary]({root}/blob/main/docs/reference/keys.md#glossary)" in text
    assert f"]({root}/raw/main/docs/images/page-overview.png)" in text
    targets = re.findall(r"\]\(([^)]*)\)", text)
    assert [one for one in targets if not one.startswith(("https://", "http://"))] == []


def test_the_wheels_cannot_install_packages(wheels: Wheels) -> None:
    sources: dict[str, bytes] = {}
    for one in wheels:
        with zipfile.ZipFile(one) as archive:
            sources |= {
                name: archive.read(name) for name in archive.namelist() if name[-3:] == ".py"
            }
    assert [name for name, text in sources.items() if b'"pip"' in text or b'"npm"' in text] == []


@pytest.mark.parametrize("kind", Wheels._fields)
def test_each_wheel_has_the_licence_and_the_version(wheels: Wheels, kind: str) -> None:
    with zipfile.ZipFile(getattr(wheels, kind)) as archive:
        (licence,) = (one for one in archive.namelist() if one.endswith("licenses/LICENSE"))
        assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()
        (name,) = (one for one in archive.namelist() if one.endswith("/METADATA"))
        metadata = archive.read(name).decode()
    assert f"\nVersion: {lisa.__version__}\n" in metadata


def test_the_full_distribution_requires_the_client_of_its_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    first, *others = project["dependencies"]
    assert first == f"lisa-delay-queue-client[settings]=={lisa.__version__}"
    client = tomllib.loads((CLIENT / "pyproject.toml").read_text("utf-8"))["project"]
    both = [*client["dependencies"], *client["optional-dependencies"]["settings"]]

    def bounds(lines: list[str]) -> dict[str, str]:
        found = (re.fullmatch(r"([\w-]+)(?:\[\w+\])?(.*)", line) for line in lines)
        return {one[1]: one[2] for one in found if one}

    shared = bounds(both).keys() & bounds(others).keys()
    assert {"redis", "click"} <= shared
    assert [name for name in shared if bounds(both)[name] != bounds(others)[name]] == []


@pytest.mark.parametrize("kind", Wheels._fields)
def test_a_source_distribution_builds_the_same_wheel(
    wheels: Wheels, kind: str, tmp_path: Path
) -> None:
    source = build(CLIENT if kind == "client" else ROOT, tmp_path, "sdist")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    project = tmp_path / source.name.removesuffix(".tar.gz")
    wheel = build(project, tmp_path)
    expected = getattr(wheels, kind)
    assert wheel.name == expected.name
    assert sorted(files(wheel)) == sorted(files(expected))
