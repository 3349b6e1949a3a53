"""The container files: the image contains the wheel's files, and compose runs the roles."""

from __future__ import annotations

import re
import shlex
import tomllib
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.deploy.manifests import (
    CONFIGS,
    MAINS,
    SECRET,
    SPARE_S,
    answers,
    grace_s,
    start,
    validator,
)
from tests.servers import ROOT
from tests.wheels import client_parts

if TYPE_CHECKING:
    from pathlib import Path

    from tests.servers import Processes

FOLDER = CONFIGS / "container"
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yml").read_text())
ROLES = {name: one for name, one in COMPOSE["services"].items() if name != "redis"}
EACH = pytest.mark.parametrize("name", sorted(ROLES))
DOCKERFILE = (FOLDER / "Dockerfile").read_text()
STEPS = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE)).splitlines()


def steps(word: str) -> list[str]:
    return [line.partition(" ")[2].strip() for line in STEPS if line.startswith(word + " ")]


def environment(name: str) -> dict[str, str]:
    """The variables, with placeholders for those that the caller must set."""
    given: dict[str, str] = ROLES[name]["environment"]
    return {key: SECRET if value.startswith("${") else value for key, value in given.items()}


def mounted(name: str) -> dict[str, str]:
    """The text of the container's mounted files, by path."""
    files = {}
    for volume in ROLES[name]["volumes"]:
        source, target, mode = volume.split(":")
        assert mode == "ro"
        files[target] = (FOLDER / source).read_text()
    return files


def seconds(text: str) -> float:
    assert text.endswith("s")
    return float(text[:-1])


def test_compose_is_valid() -> None:
    assert [error.message for error in validator("compose").iter_errors(COMPOSE)] == []
    assert not validator("compose").is_valid({"services": {"x": {"imagine": "y"}}})


def test_every_role_has_a_service() -> None:
    assert {one["command"][0] for one in ROLES.values()} == set(MAINS)


@EACH
def test_the_role_accepts_its_command_environment_and_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = ROLES[name]
    grace = grace_s(one["command"], environment(name), mounted(name), tmp_path, monkeypatch)
    assert seconds(one["stop_grace_period"]) >= grace + SPARE_S


@EACH
def test_the_health_check_is_answered_by_the_real_role(
    name: str, redis_url: str, processes: Processes, tmp_path: Path
) -> None:
    one, files = ROLES[name], mounted(name)
    for target, text in files.items():  # puts the module of handlers on the path
        (tmp_path / target.rpartition("/")[2]).write_text(text)
    config = tmp_path / f"{name}.yml"
    process, address = start(processes, one["command"], environment(name), redis_url, config)
    (url,) = re.findall(r"http://127.0.0.1:8080(/\w+)", one["healthcheck"]["test"][-1])
    answers(address, url)
    assert process.stop() == 0, process.output


def test_the_image_checks_health_as_compose_does() -> None:
    (check,) = steps("HEALTHCHECK")
    command = yaml.safe_load(check.partition("CMD ")[2])
    for one in ROLES.values():
        assert one["healthcheck"]["test"] == ["CMD", *command]
    assert steps("EXPOSE") == ["8080"]


def test_the_image_is_built_of_what_the_wheels_need() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    copied = {source for line in steps("COPY") for source in shlex.split(line)[:-1]}
    parts = project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
    parts += [*client_parts(), "packaging"]
    assert copied >= {part.split("/")[0] for part in parts}
    assert copied >= {"pyproject.toml", "README.md", "hatch_build.py"}
    assert copied >= set(project["project"]["license-files"])
    assert all((ROOT / one).exists() for one in copied)
    ignored = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
    assert {line[1:] for line in ignored if line.startswith("!")} == copied


def test_the_image_runs_as_an_unprivileged_user() -> None:
    assert steps("USER") == ["10001:10001"]
    assert STEPS.index("USER 10001:10001") > max(
        number for number, line in enumerate(STEPS) if line.startswith("RUN")
    )


def test_a_container_can_change_nothing() -> None:
    for one in ROLES.values():
        assert one["read_only"]
        assert one["cap_drop"] == ["ALL"]
        assert one["depends_on"] == {"redis": {"condition": "service_healthy"}}


def test_the_server_keeps_what_it_confirmed() -> None:
    command = COMPOSE["services"]["redis"]["command"]
    options = dict(zip(command[1::2], command[2::2], strict=True))
    assert (options["--appendonly"], options["--maxmemory-policy"]) == ("yes", "noeviction")
    assert COMPOSE["services"]["redis"]["volumes"]
