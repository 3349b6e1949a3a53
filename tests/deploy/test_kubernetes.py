"""The Kubernetes files: valid against Kubernetes' schemas, and correct for their roles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.deploy.manifests import (
    CONFIGS,
    SECRET,
    SPARE_S,
    answers,
    grace_s,
    parsed,
    start,
    validator,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.servers import Processes

FOLDER = CONFIGS / "kubernetes"
OBJECTS: list[dict[str, Any]] = [
    document
    for file in sorted(FOLDER.glob("*.yml"))
    for document in yaml.safe_load_all(file.read_text())
]
DEPLOYMENTS = {one["metadata"]["name"]: one for one in OBJECTS if one["kind"] == "Deployment"}
CONFIG_MAP: dict[str, str] = next(one for one in OBJECTS if one["kind"] == "ConfigMap")["data"]
SECRETS: dict[str, str] = next(one for one in OBJECTS if one["kind"] == "Secret")["stringData"]
EACH = pytest.mark.parametrize("name", sorted(DEPLOYMENTS))


def pod(name: str) -> dict[str, Any]:
    found: dict[str, Any] = DEPLOYMENTS[name]["spec"]["template"]["spec"]
    return found


def container(name: str) -> dict[str, Any]:
    (found,) = pod(name)["containers"]
    return dict(found)


def environment(name: str) -> dict[str, str]:
    """The variables, with a placeholder for the secret's value, which must be present."""
    env = {}
    for one in container(name)["env"]:
        reference = one["valueFrom"]["secretKeyRef"]
        assert reference["name"] == "lisa"
        env[one["name"]] = SECRET if "token" in reference["key"] else SECRETS[reference["key"]]
        assert reference["key"] in SECRETS
    return env


def mounted(name: str) -> dict[str, str]:
    """The text of the container's mounted files, by path."""
    places = {one["name"]: one["mountPath"] for one in container(name)["volumeMounts"]}
    return {
        f"{places[volume['name']]}/{item['path']}": CONFIG_MAP[item["key"]]
        for volume in pod(name)["volumes"]
        if "configMap" in volume
        for item in volume["configMap"]["items"]
    }


@pytest.mark.parametrize("one", OBJECTS, ids=lambda one: f"{one['kind']} {one['metadata']['name']}")
def test_it_is_valid(one: dict[str, Any]) -> None:
    faults = [error.message for error in validator("kubernetes-1.36", one["kind"]).iter_errors(one)]
    assert faults == []


def test_the_schemas_find_faults() -> None:
    broken = {**DEPLOYMENTS["lisa-manager"], "spec": {"replica": 2}}
    assert not validator("kubernetes-1.36", "Deployment").is_valid(broken)


def test_the_names_are_those_of_the_roles() -> None:
    assert set(DEPLOYMENTS) == {"lisa-manager", "lisa-consumer", "lisa-gateway"}
    assert {name: container(name)["command"][0] for name in DEPLOYMENTS} == {
        name: name for name in DEPLOYMENTS
    }


@EACH
def test_the_role_accepts_its_command_environment_and_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grace = grace_s(
        container(name)["command"], environment(name), mounted(name), tmp_path, monkeypatch
    )
    pause = container(name).get("lifecycle", {}).get("preStop", {}).get("exec", {})
    paused_s = float(pause["command"][1]) if pause else 0.0
    assert pod(name)["terminationGracePeriodSeconds"] >= grace + paused_s + SPARE_S


@EACH
def test_the_probes_are_answered_by_the_real_role(
    name: str, redis_url: str, processes: Processes, tmp_path: Path
) -> None:
    one = container(name)
    (tmp_path / "shop.py").write_text((CONFIGS / "container" / "shop.py").read_text())
    config = tmp_path / "role.yml"
    (text,) = mounted(name).values()
    config.write_text(text)
    process, address = start(processes, one["command"], environment(name), redis_url, config)
    (port,) = one["ports"]
    for probe in ("readinessProbe", "livenessProbe", "startupProbe"):
        (how,) = (one[probe][kind] for kind in ("httpGet", "tcpSocket") if kind in one[probe])
        assert how["port"] == port["name"]
        answers(address, how.get("path", "/healthz"))
    assert process.stop() == 0, process.output
    assert str(port["containerPort"]) in " ".join(one["command"])


@EACH
def test_a_rolling_update_or_a_drained_node_stops_nothing(name: str) -> None:
    spec = DEPLOYMENTS[name]["spec"]
    assert spec["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    assert spec["replicas"] >= 2
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    (budget,) = [
        one["spec"]
        for one in OBJECTS
        if one["kind"] == "PodDisruptionBudget"
        and one["spec"]["selector"]["matchLabels"].items() <= labels.items()
    ]
    assert budget["maxUnavailable"] < spec["replicas"]
    (spread,) = pod(name)["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"].items() <= labels.items()


@EACH
def test_it_may_do_no_more_than_it_needs(name: str) -> None:
    one = container(name)
    assert pod(name)["securityContext"]["runAsNonRoot"]
    assert not pod(name)["automountServiceAccountToken"]
    assert one["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert one["resources"]["limits"]["memory"]
    assert not any("value" in variable for variable in one["env"]), "secrets come by reference"


def test_services_and_policies_name_pods_that_there_are() -> None:
    labels = [one["spec"]["template"]["metadata"]["labels"] for one in DEPLOYMENTS.values()]
    selectors = [one["spec"]["selector"] for one in OBJECTS if one["kind"] == "Service"]
    selectors += [
        one["spec"]["podSelector"]["matchLabels"]
        for one in OBJECTS
        if one["kind"] == "NetworkPolicy"
    ]
    assert selectors
    for selector in selectors:
        assert any(selector.items() <= one.items() for one in labels), selector


def test_each_command_names_a_mounted_file() -> None:
    for name in DEPLOYMENTS:
        assert str(parsed(container(name)["command"])["path"]) in mounted(name)
