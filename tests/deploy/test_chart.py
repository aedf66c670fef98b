"""The Helm chart and the plain manifest: rendered by helm, valid by Kubernetes' schemas, refusing wrong values."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from quire.config import ServerConfig

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm/quire"
BUILT_IN = (
    "Deployment",
    "Service",
    "PersistentVolumeClaim",
    "PodDisruptionBudget",
    "NetworkPolicy",
    "Secret",
)
VALUES: dict[str, tuple[list[str], set[str]]] = {
    "default": ([], {"Deployment", "Service", "PersistentVolumeClaim"}),
    "no volume": (["persistence.enabled=false", "replicas=3"], {"Deployment", "Service"}),
    "gpu": (["image.tag=gpu", "gpus=1", "model=Qwen/Qwen2.5-0.5B-Instruct"], set()),
    "scaled": (["autoscaling.enabled=true", "persistence.enabled=false"], {"ScaledObject"}),
    "monitored": (["serviceMonitor.enabled=true", "podDisruptionBudget.enabled=true"], {"ServiceMonitor"}),
    "closed": (
        ["networkPolicy.enabled=true", "existingSecret=keys", "env.HF_HUB_OFFLINE=on"],
        {"NetworkPolicy"},
    ),
}  # Name -> values that are set, kinds that are then there.


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("helm", path=str(Path(sys.executable).parent)) or shutil.which("helm")
    assert program is not None, "helm-binary is one of the development tools"
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60, check=False)


def rendered(values: list[str]) -> list[dict[str, Any]]:
    done = helm("template", "mine", str(CHART), *(part for value in values for part in ("--set", value)))
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def check(documents: list[dict[str, Any]]) -> None:
    for document in documents:
        if document["kind"] in BUILT_IN:
            kubernetes_validate.validate(document, "1.33", strict=True)


@pytest.mark.parametrize("name", VALUES)
def test_chart_renders_valid_objects(name: str) -> None:
    values, kinds = VALUES[name]
    documents = rendered(values)
    check(documents)
    assert kinds <= {document["kind"] for document in documents}


def pods() -> list[dict[str, Any]]:
    plain = yaml.safe_load_all((DEPLOY / "kubernetes/quire.yaml").read_text(encoding="utf-8"))
    documents = [*plain, *rendered([])]
    return [one["spec"]["template"]["spec"] for one in documents if one["kind"] == "Deployment"]


def test_plain_manifest_is_valid() -> None:
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes/quire.yaml").read_text(encoding="utf-8")))
    check(documents)
    assert {document["kind"] for document in documents} <= set(BUILT_IN)


def test_pods_drain_and_are_probed_by_the_right_paths() -> None:
    assert len(pods()) == 2
    for pod in pods():
        container = pod["containers"][0]
        drain = float(container["args"][container["args"].index("--shutdown-timeout") + 1])
        assert pod["terminationGracePeriodSeconds"] > drain
        assert drain >= ServerConfig().shutdown_timeout
        paths = {
            kind: container[f"{kind}Probe"]["httpGet"]["path"]
            for kind in ("startup", "readiness", "liveness")
        }
        assert paths == {"startup": "/readyz", "readiness": "/readyz", "liveness": "/livez"}
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert pod["securityContext"]["runAsUser"] == 65534
        assert isinstance(container["resources"]["limits"]["cpu"], int)


def test_gpus_are_a_limit_of_the_container() -> None:
    (pod,) = (one["spec"]["template"]["spec"] for one in rendered(["gpus=2"]) if one["kind"] == "Deployment")
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 2


@pytest.mark.parametrize(
    "value",
    ["replicas=-1", "nothing=1", "model=", "gpus=half", "service.port=99999", "persistence.size=20 apples"],
)
def test_wrong_value_is_refused_by_name(value: str) -> None:
    done = helm("template", "mine", str(CHART), "--set", value)
    assert done.returncode != 0
    assert value.split("=")[0].split(".")[0] in done.stderr


def test_chart_passes_helm_lint() -> None:
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout
