"""The manifests of examples/kubernetes: what they refer to is there, and they follow Kubernetes' published schemas."""

from __future__ import annotations

import json
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.multimodal.media.connector import MediaConnector
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.pages import ROOT
from tests.support.processes import clients_python

FOLDER = ROOT / "examples" / "kubernetes"
CARDS = {"server": set(), "gaudi": {"habana.ai/gaudi"}, "ascend": {"huawei.com/Ascend910"}}
MONITORING = "monitoring"
KUBERNETES = "1.34"
# By what kustomize joins the lists of a patch with those of what it patches; other lists are replaced.
MERGE_KEYS = {"containers": "name", "env": "name", "volumes": "name", "volumeMounts": "mountPath"}


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def merged(old: Any, new: Any, name: str = "") -> Any:
    """As kustomize does with a strategic merge patch."""
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{key: merged(old.get(key), value, key) for key, value in new.items()}}
    if isinstance(old, list) and (key := MERGE_KEYS.get(name)):
        by_key = {item[key]: item for item in old}
        return list((by_key | {item[key]: merged(by_key.get(item[key]), item) for item in new}).values())
    return new


def manifests(folder: str) -> dict[str, dict[str, Any]]:
    """By kind, as `kubectl apply -k` would send them."""
    (kustomization,) = documents(FOLDER / folder / "kustomization.yaml")
    found: dict[str, dict[str, Any]] = {}
    for resource in kustomization["resources"]:
        path = FOLDER / folder / resource
        inner = manifests(path.resolve().name) if path.is_dir() else {one["kind"]: one for one in documents(path)}
        assert not set(inner) & set(found)
        found |= inner
    for patch in kustomization.get("patches", ()):
        (change,) = documents(FOLDER / folder / patch["path"])
        assert change["metadata"]["name"] == found[change["kind"]]["metadata"]["name"]
        found[change["kind"]] = merged(found[change["kind"]], change)
    return found


def container(folder: str) -> dict[str, Any]:
    (only,) = manifests(folder)["Deployment"]["spec"]["template"]["spec"]["containers"]
    return only


def test_every_folder_is_looked_at() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {*CARDS, MONITORING}


@pytest.mark.parametrize("folder", CARDS)
def test_a_server_needs_nothing_that_a_cluster_may_lack(folder: str) -> None:
    """`kubectl apply` refuses kinds of operators that are not there."""
    assert set(manifests(folder)) == {"PersistentVolumeClaim", "Deployment", "Service", "NetworkPolicy"}


@pytest.mark.parametrize("folder", CARDS)
def test_variables_of_the_service_are_none_of_vllms(folder: str) -> None:
    """Kubernetes gives a pod some for each service, by its name, unless `enableServiceLinks` is false."""
    from vllm import envs

    found = manifests(folder)
    name = found["Service"]["metadata"]["name"].upper().replace("-", "_")
    links = found["Deployment"]["spec"]["template"]["spec"].get("enableServiceLinks", True)
    injected = {f"{name}_PORT", f"{name}_SERVICE_HOST", f"{name}_SERVICE_PORT"} if links else set()
    assert not injected & set(envs.environment_variables)


def test_replicas_fit_the_volume() -> None:
    modes = manifests("server")["PersistentVolumeClaim"]["spec"]["accessModes"]
    assert modes == ["ReadWriteMany"] or manifests(MONITORING)["HorizontalPodAutoscaler"]["spec"]["maxReplicas"] == 1


@pytest.mark.parametrize("folder", CARDS)
def test_parts_refer_to_each_other(folder: str) -> None:
    found = manifests(folder) | manifests(MONITORING)
    deployment = found["Deployment"]
    pod = deployment["spec"]["template"]
    labels = pod["metadata"]["labels"].items()
    for selector in (
        deployment["spec"]["selector"]["matchLabels"],
        found["Service"]["spec"]["selector"],
        found["PodMonitor"]["spec"]["selector"]["matchLabels"],
        found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
    ):
        assert selector.items() <= labels
    (port,) = container(folder)["ports"]
    ports = [container(folder)[probe]["httpGet"]["port"] for probe in ("startupProbe", "livenessProbe")]
    ports += [
        found["NetworkPolicy"]["spec"]["ingress"][0]["ports"][0]["port"],
        found["PodMonitor"]["spec"]["podMetricsEndpoints"][0]["port"],
        found["Service"]["spec"]["ports"][0]["targetPort"],
    ]
    assert set(ports) == {port["name"]}
    target = found["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", deployment["metadata"]["name"])
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    mounts = {mount["mountPath"]: volumes.pop(mount["name"]) for mount in container(folder)["volumeMounts"]}
    assert not volumes
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    claim = mounts["/home/vllm/.cache"]["persistentVolumeClaim"]["claimName"]
    assert claim == found["PersistentVolumeClaim"]["metadata"]["name"]


@pytest.mark.parametrize("folder", CARDS)
def test_it_is_what_the_dockerfile_makes(folder: str) -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    (user, group) = re.findall(r"^USER (\d+):(\d+)$", dockerfile, re.M)[0]
    context = manifests(folder)["Deployment"]["spec"]["template"]["spec"]["securityContext"]
    assert (context["runAsUser"], context["runAsGroup"]) == (int(user), int(group))
    found = container(folder)
    assert f"EXPOSE {found['ports'][0]['containerPort']}\n" in dockerfile
    assert f" AS {found['image'].rpartition(':')[2]}\n" in dockerfile
    assert "command" not in found, "the image's entry point"
    # The longest time that the page about containers gives to a start.
    startup = found["startupProbe"]
    hours = 2 if CARDS[folder] else 1  # of which warm-up may take one
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 3600 * hours
    assert f'"python", "{found["readinessProbe"]["exec"]["command"][1]}"' in dockerfile
    for probe in ("readinessProbe", "livenessProbe"):
        assert found[probe]["timeoutSeconds"] >= 10, "the default of one second is short for a busy front end"


@pytest.mark.parametrize("folder", CARDS)
def test_a_server_may_do_no_more_than_it_needs(folder: str) -> None:
    pod = manifests(folder)["Deployment"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not pod["automountServiceAccountToken"]
    assert container(folder)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    (names,) = manifests(folder)["NetworkPolicy"]["spec"]["egress"]
    assert {port["port"] for port in names["ports"]} == {53}


@pytest.mark.parametrize("folder", CARDS)
def test_media_are_fetched_from_no_host(folder: str) -> None:
    """An empty list of domains would allow all of them."""
    words = container(folder)["args"]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    connector = MediaConnector(allowed_media_domains=args.allowed_media_domains)
    with pytest.raises(ValueError, match="allowed domains"):
        connector.fetch_image("http://127.0.0.1:1/metadata.png")


@pytest.mark.parametrize("folder", CARDS)
def test_cards_and_huge_pages_are_asked_for_as_kubernetes_wants_it(folder: str) -> None:
    resources = container(folder)["resources"]
    special = {name for name in resources["limits"] if "/" in name or name.startswith("hugepages-")}
    assert {name for name in special if "/" in name} == CARDS[folder]
    for name in special:
        assert resources["limits"][name] == resources["requests"][name], "more than the request cannot be had"
    assert ("hugepages-2Mi" in special) == (folder == "gaudi")


def test_the_queue_is_a_metric_of_vllms() -> None:
    vllm = find_spec("vllm")
    assert vllm is not None
    assert vllm.origin is not None
    (metric,) = manifests(MONITORING)["HorizontalPodAutoscaler"]["spec"]["metrics"]
    name = metric["pods"]["metric"]["name"].replace("vllm_", "vllm:", 1)
    assert f'name="{name}"' in (Path(vllm.origin).parent / "v1" / "metrics" / "loggers.py").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("folder", [*CARDS, MONITORING])
def test_schemas_of_kubernetes(folder: str, tmp_path: Path) -> None:
    """Strictly: unknown keys are errors. Of the operator's PodMonitor no schema is published with them."""
    python = clients_python()
    code = (
        "import json, sys, kubernetes_validate as k\n"
        "for one in json.load(sys.stdin): k.validate(one, sys.argv[1], strict=True)\n"
    )
    found = [one for kind, one in manifests(folder).items() if kind != "PodMonitor"]
    assert len(found) == (1 if folder == MONITORING else 4)

    def validate(manifests: list[dict[str, Any]]) -> subprocess.CompletedProcess[str]:
        command = [python, "-c", code, KUBERNETES]
        return subprocess.run(command, input=json.dumps(manifests), capture_output=True, text=True, check=False)

    done = validate(found)
    assert done.returncode == 0, done.stderr
    for one in found:
        broken = json.loads(json.dumps(one))
        broken["spec"]["no_such_key"] = 1
        done = validate([broken])
        assert done.returncode != 0
        assert "no_such_key" in done.stderr
