"""`lisa init`: its files start every role, and no existing file is lost."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from lisa.cli.init import FILES
from lisa.cli.main import main
from lisa.core.settings import ProducerSettings
from tests.deploy.manifests import MAINS, SETTINGS


@pytest.fixture(autouse=True)
def user() -> None:
    """The units that it writes name the user."""
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        pytest.skip("the user of this process has no name, which `lisa init` needs")


def init(*arguments: str | Path, code: int = 0) -> str:
    done = CliRunner().invoke(main, ["init", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return done.output


def test_the_files_are_for_the_given_server_and_prefix(tmp_path: Path) -> None:
    init(tmp_path / "shop", "--redis", "redis://db.example:7000/2", "--prefix", "shop")
    for role in (*SETTINGS.values(), ProducerSettings):
        path = tmp_path / "shop" / f"{role.role}.yml"
        settings = role.load(path)
        assert (settings.redis.url, settings.prefix) == ("redis://db.example:7000/2", "shop")
        assert settings.topics() == {"orders": ("lisa",)}
        assert "# " in path.read_text()
    assert len(yaml.safe_load((tmp_path / "shop" / "tokens.yml").read_text())["tokens"]) == 3


def test_what_is_not_written(tmp_path: Path) -> None:
    """Existing files, unless forced, and passwords; an error names the place."""
    said = init(tmp_path, "--redis", "redis://u:s3cret@db/0", code=2)
    assert ("LISA_REDIS__PASSWORD" in said, "s3cret" in said) == (True, False)
    assert list(tmp_path.iterdir()) == []
    kept = tmp_path / "shop.py"
    kept.write_text("mine = 1\n")
    assert init(tmp_path, code=1) == f"lisa: {kept} exists; --force overwrites\n"
    assert [path.name for path in tmp_path.iterdir()] == ["shop.py"], "nothing else is written"
    assert kept.read_text() == "mine = 1\n"
    init(tmp_path, "--force")
    assert "Consumer" in kept.read_text()
    assert "manager.yml and 8 more exist;" in init(tmp_path, code=1)
    place = kept / "shop"
    assert init(place, code=1) == f"lisa: {place}: Not a directory\n"


def test_what_is_printed_fits_80_columns_and_json_names_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = init("shop")
    *lines, last = said.splitlines()
    assert max(map(len, lines)) < 80
    assert last.startswith("and Grafana are in ")
    assert (Path(last.partition(" are in ")[2]) / "grafana-dashboard.json").is_file()
    assert "  cd shop\n" in said
    assert json.loads(init("other", "--json")) == {"directory": "other", "files": list(FILES)}


def test_the_units_start_the_roles_in_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "100%"
    init(folder)
    units = sorted((folder / "systemd").iterdir())
    assert len(units) == 3
    for unit in units:
        lines = unit.read_text().splitlines()
        assert f"WorkingDirectory={tmp_path}/100%%" in lines
        (command,) = (line for line in lines if line.startswith("ExecStart="))
        program, *arguments = command.removeprefix("ExecStart=").split()
        assert Path(program).is_file()
        assert f"{Path(program).name}.service" == unit.name
        with MAINS[Path(program).name].make_context(program, arguments) as context:
            assert (folder / context.params["path"]).is_file()
        if shutil.which("systemd-analyze"):
            verify = ["systemd-analyze", "verify", "--man=no", str(unit)]
            done = subprocess.run(verify, capture_output=True, text=True, check=False)
            assert (done.returncode, done.stderr) == (0, "")
