"""Container and Kubernetes files: valid against schemas, correct for their roles, and safe."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.manifests import CONFIGS, MAINS, answers, config_of, faults, grace_s, start
from tests.servers import ROOT, Processes

SECRET = "0123456789abcdef0123456789abcdef"
SPARE_S = 5
"""Longer than the grace of a role: what it does after its handlers or requests have ended."""

CONTAINER = CONFIGS / "container"
COMPOSE: dict[str, Any] = yaml.safe_load((CONTAINER / "compose.yml").read_text())
SERVICES = {name: one for name, one in COMPOSE["services"].items() if name != "redis"}
DOCKERFILE = (CONTAINER / "Dockerfile").read_text()
STEPS = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE)).splitlines()
OBJECTS: list[dict[str, Any]] = [
    document
    for file in sorted((CONFIGS / "kubernetes").glob("*.yml"))
    for document in yaml.safe_load_all(file.read_text())
]
DEPLOYMENTS = {one["metadata"]["name"]: one for one in OBJECTS if one["kind"] == "Deployment"}
CONFIG_MAP: dict[str, str] = next(one for one in OBJECTS if one["kind"] == "ConfigMap")["data"]
SECRETS: dict[str, str] = next(one for one in OBJECTS if one["kind"] == "Secret")["stringData"]


def steps(word: str) -> list[str]:
    return [line.partition(" ")[2].strip() for line in STEPS if line.startswith(word + " ")]


def pod(name: str) -> dict[str, Any]:
    found: dict[str, Any] = DEPLOYMENTS[name]["spec"]["template"]["spec"]
    return found


def container(name: str) -> dict[str, Any]:
    (found,) = pod(name)["containers"]
    return dict(found)


def of_compose(name: str) -> tuple[list[str], dict[str, str], dict[str, str]]:
    """Command, environment with placeholders for secrets, and the text of mounted files by path."""
    given: dict[str, str] = SERVICES[name]["environment"]
    env = {key: SECRET if value.startswith("${") else value for key, value in given.items()}
    mounted = {}
    for volume in SERVICES[name]["volumes"]:
        source, target, mode = volume.split(":")
        assert mode == "ro"
        mounted[target] = (CONTAINER / source).read_text()
    return SERVICES[name]["command"], env, mounted


def of_kubernetes(name: str) -> tuple[list[str], dict[str, str], dict[str, str]]:
    """The same of a pod's container; the secrets' values must be present."""
    env = {}
    for one in container(name)["env"]:
        reference = one["valueFrom"]["secretKeyRef"]
        assert reference["name"] == "lisa"
        value = SECRETS[reference["key"]]
        env[one["name"]] = SECRET if "token" in reference["key"] else value
    places = {one["name"]: one["mountPath"] for one in container(name)["volumeMounts"]}
    mounted = {
        f"{places[volume['name']]}/{item['path']}": CONFIG_MAP[item["key"]]
        for volume in pod(name)["volumes"]
        for item in volume.get("configMap", {"items": []})["items"]
    }
    return container(name)["command"], env, mounted


def test_the_files_are_valid() -> None:
    assert faults(COMPOSE, "compose") == []
    assert faults({"services": {"x": {"imagine": "y"}}}, "compose")
    assert {one["command"][0] for one in SERVICES.values()} == set(MAINS)
    for one in OBJECTS:
        assert faults(one, "kubernetes-1.36", one["kind"]) == []
    broken = {**DEPLOYMENTS["lisa-manager"], "spec": {"replica": 2}}
    assert faults(broken, "kubernetes-1.36", "Deployment")
    programs = {name: container(name)["command"][0] for name in DEPLOYMENTS}
    assert programs == {name: name for name in MAINS}


@pytest.mark.parametrize(
    ("of", "name"),
    [
        *((of_kubernetes, name) for name in DEPLOYMENTS),
        *(pytest.param(of_compose, name, marks=pytest.mark.full) for name in SERVICES),
    ],
)
def test_the_role_accepts_command_environment_and_file_and_answers_probes(
    of: Any, name: str, redis_url: str, processes: Processes, tmp_path: Path
) -> None:
    command, env, mounted = of(name)
    for target, text in mounted.items():  # puts the module of handlers on the path
        (tmp_path / target.rpartition("/")[2]).write_text(text)
    (tmp_path / "shop.py").write_text((CONTAINER / "shop.py").read_text())
    assert config_of(command) in mounted
    config = tmp_path / config_of(command).rpartition("/")[2]
    grace = grace_s(command, config, env)
    process, address = start(processes, command, env, redis_url, config)
    if of is of_compose:
        service = SERVICES[name]
        assert float(service["stop_grace_period"].removesuffix("s")) >= grace + SPARE_S
        answers(address, "/healthz")
        program = service["healthcheck"]["test"][-1].replace("127.0.0.1:8080", address)
        proxied = {**os.environ, "http_proxy": "http://127.0.0.1:1", "no_proxy": ""}
        subprocess.run([sys.executable, "-c", program], env=proxied, check=True, timeout=60)
    else:
        pause = container(name).get("lifecycle", {}).get("preStop", {}).get("exec", {})
        paused_s = float(pause["command"][1]) if pause else 0.0
        assert pod(name)["terminationGracePeriodSeconds"] >= grace + paused_s + SPARE_S
        (port,) = container(name)["ports"]
        for kind in ("readinessProbe", "livenessProbe", "startupProbe"):
            probe = container(name)[kind]
            how = probe.get("httpGet") or probe["tcpSocket"]
            assert how["port"] == port["name"]
            answers(address, how.get("path", "/healthz"))
        assert str(port["containerPort"]) in " ".join(command)
    assert process.stop() == 0, process.output


def test_the_image() -> None:
    """It checks health as compose does, holds what the wheels need, and runs without privileges.

    The server of compose keeps what it confirmed.
    """
    server = COMPOSE["services"]["redis"]
    options = dict(zip(server["command"][1::2], server["command"][2::2], strict=True))
    assert (options["--appendonly"], options["--maxmemory-policy"]) == ("yes", "noeviction")
    assert server["volumes"]
    (check,) = steps("HEALTHCHECK")
    command = yaml.safe_load(check.partition("CMD ")[2])
    assert steps("EXPOSE") == ["8080"]
    for one in SERVICES.values():
        assert one["healthcheck"]["test"] == ["CMD", *command]
        assert one["read_only"]
        assert one["cap_drop"] == ["ALL"]
        assert one["depends_on"] == {"redis": {"condition": "service_healthy"}}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    copied = {source for line in steps("COPY") for source in shlex.split(line)[:-1]}
    parts = project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
    parts += [*project["project"]["license-files"], "pyproject.toml", "README.md", "hatch_build.py"]
    assert copied >= set(parts)
    assert all((ROOT / one).exists() for one in copied)
    ignored = (CONTAINER / "Dockerfile.dockerignore").read_text().splitlines()
    assert {line[1:] for line in ignored if line.startswith("!")} == copied
    assert steps("USER") == ["10001:10001"]
    last = max(number for number, line in enumerate(STEPS) if line.startswith("RUN"))
    assert STEPS.index("USER 10001:10001") > last


@pytest.mark.parametrize("name", sorted(DEPLOYMENTS))
def test_a_pod_survives_updates_and_may_do_no_more_than_it_needs(name: str) -> None:
    spec = DEPLOYMENTS[name]["spec"]
    assert spec["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    assert spec["replicas"] >= 2
    labels = spec["template"]["metadata"]["labels"]

    def matches(selector: dict[str, Any]) -> bool:
        return bool(selector["matchLabels"].items() <= labels.items())

    assert matches(spec["selector"])
    budgets = [one["spec"] for one in OBJECTS if one["kind"] == "PodDisruptionBudget"]
    (budget,) = (one for one in budgets if matches(one["selector"]))
    assert budget["maxUnavailable"] < spec["replicas"]
    (spread,) = pod(name)["topologySpreadConstraints"]
    assert matches(spread["labelSelector"])
    assert pod(name)["securityContext"]["runAsNonRoot"]
    assert not pod(name)["automountServiceAccountToken"]
    assert container(name)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container(name)["resources"]["limits"]["memory"]
    secrets = container(name)["env"]
    assert not any("value" in variable for variable in secrets), "secrets come by reference"


def test_services_and_policies_name_pods_that_there_are() -> None:
    labels = [one["spec"]["template"]["metadata"]["labels"] for one in DEPLOYMENTS.values()]
    specs = [one["spec"] for one in OBJECTS if one["kind"] in ("Service", "NetworkPolicy")]
    selectors = [one.get("selector") or one["podSelector"]["matchLabels"] for one in specs]
    assert selectors
    for selector in selectors:
        assert any(selector.items() <= one.items() for one in labels), selector
