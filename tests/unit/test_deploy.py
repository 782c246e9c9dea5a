"""The files in deploy/ for Kubernetes and systemd, and the Dockerfile: checked by other programs, and by popgate's own
settings."""

import configparser
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


def test_kustomize_accepts_the_folders() -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    for folder in sorted(KUBERNETES.iterdir()):
        done = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr


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
