"""The files in deploy/ for Kubernetes and systemd, and the Dockerfile: checked by other programs, and by popgate's own
settings."""

import configparser
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]  # it has no stubs
import pytest
import yaml

from popgate.cli.commands import parser
from popgate.config.options import SETTINGS

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
UNIT = ROOT / "deploy" / "systemd" / "popgate.service"
VERSIONS = ("1.30", "1.35")
"""The oldest and the newest Kubernetes whose schemas the files are checked against."""
CUSTOM = ("ServiceMonitor",)
"""Kinds that are not Kubernetes' own."""
DOCKER_USER = "10001"
NAMESPACE = "popgate"
FILES_WITH_IMAGES = ("Dockerfile", "docker-compose.yml")


def documents(folder: Path) -> Iterator[dict[str, Any]]:
    """The objects of the files that a kustomization names, and the kustomization itself."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    names = set(kustomization["resources"])
    assert names == {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"}
    for name in sorted(names):
        yield from yaml.safe_load_all((folder / name).read_text())


OBJECTS = [(folder.name, one) for folder in sorted(KUBERNETES.iterdir()) for one in documents(folder)]
NAMES = [f"{folder} {one['kind']}" for folder, one in OBJECTS]
WORKLOADS = [(folder, one) for folder, one in OBJECTS if one["kind"] in ("Deployment", "StatefulSet", "CronJob")]


def pod_of(workload: dict[str, Any]) -> dict[str, Any]:
    spec = workload["spec"]
    pod: dict[str, Any] = (spec["jobTemplate"]["spec"] if workload["kind"] == "CronJob" else spec)["template"]
    return pod


@pytest.mark.parametrize(("folder", "document"), OBJECTS, ids=NAMES)
def test_an_object_of_kubernetes_fits_its_schema(folder: str, document: dict[str, Any]) -> None:
    if document["kind"] not in CUSTOM:
        for version in VERSIONS:
            kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize(
    ("folder", "workload"), WORKLOADS, ids=[f"{folder} {one['kind']}" for folder, one in WORKLOADS]
)
def test_a_pod_is_restricted_and_refers_to_what_exists(folder: str, workload: dict[str, Any]) -> None:
    pod = pod_of(workload)["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert str(pod["securityContext"]["runAsUser"]) == DOCKER_USER
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    claims = {one["metadata"]["name"] for one in workload["spec"].get("volumeClaimTemplates", ())}
    assert {one["name"] for one in container["volumeMounts"]} == claims | {one["name"] for one in pod["volumes"]}
    here = {(one["kind"], one["metadata"]["name"]) for name, one in OBJECTS if name == folder}
    for volume in pod["volumes"]:
        if "configMap" in volume:
            assert ("ConfigMap", volume["configMap"]["name"]) in here
        if "secret" in volume:
            documented = (ROOT / "docs" / "deployment.md").read_text()
            assert re.search(rf"create secret \w+ {volume['secret']['secretName']}\b", documented)
            assert volume["secret"]["defaultMode"] == 0o440
    for variable in container.get("env", ()):
        if variable["name"].startswith("POPGATE_"):
            assert variable["name"] in {setting.variable for setting in SETTINGS}


@pytest.mark.parametrize("folder", ["cluster", "single"])
def test_a_proxy_has_probes_a_drain_and_settings_that_exist(folder: str) -> None:
    kinds = {one["kind"]: one for name, one in OBJECTS if name == folder}
    workload = kinds["Deployment" if folder == "cluster" else "StatefulSet"]
    pod = pod_of(workload)
    (container,) = pod["spec"]["containers"]
    assert container["livenessProbe"]["httpGet"]["path"] == container["startupProbe"]["httpGet"]["path"] == "/healthz"
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    (_, seconds) = container["lifecycle"]["preStop"]["exec"]["command"]
    assert int(seconds) + 10 < pod["spec"]["terminationGracePeriodSeconds"]
    settings = tomllib.loads(kinds["ConfigMap"]["data"]["popgate.toml"])
    assert set(settings) <= {setting.name for setting in SETTINGS}
    mounts = tuple(one["mountPath"] for one in container["volumeMounts"])
    assert all(str(value).startswith(mounts) for name, value in settings.items() if name.endswith("_file"))
    parsed = parser().parse_args(container["args"])
    assert parsed.config in mounts
    labels = pod["metadata"]["labels"]
    assert kinds["Service"]["spec"]["selector"].items() <= labels.items()
    assert workload["spec"]["selector"]["matchLabels"].items() <= labels.items()
    if folder == "cluster":
        selector = kinds["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"]
        assert selector.items() <= labels.items()
        assert kinds["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"].items() <= labels.items()


def test_the_monitor_finds_the_service() -> None:
    service = next(one for folder, one in OBJECTS if folder == "cluster" and one["kind"] == "Service")
    monitor = next(one for _, one in OBJECTS if one["kind"] == "ServiceMonitor")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["spec"]["endpoints"][0]["port"] in {one["name"] for one in service["spec"]["ports"]}


def test_what_kustomize_makes_of_the_folders_fits_the_schemas() -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    for folder in sorted(KUBERNETES.iterdir()):
        done = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        for document in yaml.safe_load_all(done.stdout):
            if document["kind"] not in CUSTOM:
                assert document["kind"] == "Namespace" or document["metadata"]["namespace"] == NAMESPACE
                for version in VERSIONS:
                    kubernetes_validate.validate(document, version, strict=True)


def test_the_network_lets_the_proxies_prometheus_and_keda_through() -> None:
    policy = next(one["spec"] for _, one in OBJECTS if one["kind"] == "NetworkPolicy")
    (outside, peers) = policy["ingress"]
    labels = [one["namespaceSelector"]["matchLabels"] for one in outside["from"]]
    assert labels[1:] == [{"kubernetes.io/metadata.name": name} for name in ("monitoring", "keda")]
    assert outside["ports"] == [{"port": "https"}]
    deployment = next(one for _, one in OBJECTS if one["kind"] == "Deployment")
    (container,) = pod_of(deployment)["spec"]["containers"]
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert (peers["ports"], policy["egress"][0]["ports"]) == ([{"port": "peers"}], [{"port": ports["peers"]}])
    assert peers["from"] == policy["egress"][0]["to"] == [{"podSelector": policy["podSelector"]}]


def test_keda_asks_the_service_that_exists() -> None:
    scaled, authentication = yaml.safe_load_all((ROOT / "deploy" / "keda" / "scaledobject.yaml").read_text())
    (trigger,) = scaled["spec"]["triggers"]
    service = next(one for folder, one in OBJECTS if folder == "cluster" and one["kind"] == "Service")
    (port,) = service["spec"]["ports"]
    host = f"https://{service['metadata']['name']}.{NAMESPACE}.svc:{port['port']}/"
    assert trigger["metadata"]["url"].startswith(host)
    assert trigger["authenticationRef"]["name"] == authentication["metadata"]["name"]


def test_the_images_are_pinned_by_the_digests_that_the_registry_has(tmp_path: Path) -> None:
    for name in FILES_WITH_IMAGES:
        shutil.copy(ROOT / name, tmp_path)
    docker = tmp_path / "bin" / "docker"
    docker.parent.mkdir()
    docker.write_text('#!/bin/sh\nfor last; do :; done\necho "$last" >> asked\ncat digest\n')
    docker.chmod(0o755)
    written: list[str] = []
    for digit in "12":  # the second time, pinned ones are replaced
        (tmp_path / "digest").write_text(f"sha256:{digit * 64}\n")
        path = f"{docker.parent}:{os.environ['PATH']}"
        subprocess.run([ROOT / ".ci" / "pin-images", tmp_path], check=True, env={"PATH": path}, capture_output=True)
        written = [(tmp_path / name).read_text() for name in FILES_WITH_IMAGES]
        images = [re.findall(r"^ *(?:FROM|image:) (\S+:\S+)", text, re.MULTILINE) for text in written]
        assert [len(one) for one in images] == [3, 3]
        assert all(one.endswith(f"@sha256:{digit * 64}") and one.count("@") == 1 for one in [*images[0], *images[1]])
    unpinned = [re.sub(r"@sha256:\w+", "", text) for text in written]
    assert unpinned == [re.sub(r"@sha256:\w+", "", (ROOT / name).read_text()) for name in FILES_WITH_IMAGES]
    asked = set((tmp_path / "asked").read_text().split())
    assert asked == {"python:3.12-slim-bookworm", "rabbitmq:4.3-management", "redis:7", "haproxy:3.0"}


def test_the_unit_starts_popgate_with_flags_that_exist() -> None:
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # the documented way to keep the case
    unit.read_string(UNIT.read_text())
    _, *words = unit["Service"]["ExecStart"].split()
    assert parser().parse_args(words).config == "/etc/popgate/popgate.toml"
    _, *words = unit["Service"]["ExecStartPre"].split()
    assert parser().parse_args(words).file == "/etc/popgate/popgate.toml"
    assert unit["Service"]["DynamicUser"] == "yes"


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "popgate.service"
    unit.write_text(UNIT.read_text().replace("/opt/popgate/bin/popgate", str(Path(sys.executable).parent / "popgate")))
    done = subprocess.run([analyze, "verify", unit], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_image_is_linted_and_does_not_run_as_root() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    # DL3066: a user without a number. The pipeline's image does not run where this matters.
    done = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout
    last = (ROOT / "Dockerfile").read_text().rpartition("\nFROM ")[2]
    assert f"USER {DOCKER_USER}" in last
    assert "HEALTHCHECK" in last
    assert all(image.count("-") >= 2 for image in re.findall(r"FROM (python:\S+)", (ROOT / "Dockerfile").read_text()))
