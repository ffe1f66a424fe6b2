"""The manifests of examples/kubernetes: what they refer to is there, and they follow Kubernetes' published schemas."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from vllm.multimodal.media.connector import MediaConnector
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.pages import ROOT
from tests.support.processes import kubernetes_python
from tests.support.releases import make_arg_parser

FOLDER = ROOT / "examples" / "kubernetes"
DISAGGREGATED = "disaggregated"
ROLES = {f"{DISAGGREGATED}/prefill": "kv_producer", f"{DISAGGREGATED}/decode": "kv_consumer"}
SERVERS = ["server", "gaudi", "ascend", *ROLES]
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
        name = os.path.normpath(f"{folder}/{resource}")
        path = FOLDER / name
        inner = manifests(name) if path.is_dir() else {one["kind"]: one for one in documents(path)}
        assert not set(inner) & set(found)
        found |= inner
    for patch in kustomization.get("patches", ()):
        (change,) = documents(FOLDER / folder / patch["path"])
        assert change["metadata"]["name"] == found[change["kind"]]["metadata"]["name"]
        found[change["kind"]] = merged(found[change["kind"]], change)
    if suffix := kustomization.get("nameSuffix"):
        for one in found.values():
            one["metadata"]["name"] += suffix
        for volume in found["Deployment"]["spec"]["template"]["spec"]["volumes"]:
            if "persistentVolumeClaim" in volume:
                volume["persistentVolumeClaim"]["claimName"] += suffix
    return found


def container(folder: str) -> dict[str, Any]:
    (only,) = manifests(folder)["Deployment"]["spec"]["template"]["spec"]["containers"]
    return only


@pytest.mark.parametrize("folder", SERVERS)
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
    assert folder in ROLES or (target["kind"], target["name"]) == ("Deployment", deployment["metadata"]["name"])
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    mounts = {mount["mountPath"]: volumes.pop(mount["name"]) for mount in container(folder)["volumeMounts"]}
    assert not volumes
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    claim = mounts["/home/vllm/.cache"]["persistentVolumeClaim"]["claimName"]
    assert claim == found["PersistentVolumeClaim"]["metadata"]["name"]


@pytest.mark.parametrize("folder", SERVERS)
def test_media_are_fetched_from_no_host(folder: str) -> None:
    """An empty list of domains would allow all of them."""
    words = container(folder)["args"]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    connector = MediaConnector(allowed_media_domains=args.allowed_media_domains)
    with pytest.raises(ValueError, match="allowed domains"):
        connector.fetch_image("http://127.0.0.1:1/metadata.png")


def test_router_reaches_both_servers_and_they_each_other() -> None:
    router, service, admitted, transfer = documents(FOLDER / DISAGGREGATED / "router.yaml")
    pod = router["spec"]["template"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert admitted["spec"]["podSelector"] == router["spec"]["selector"]
    assert service["metadata"]["name"] == manifests("server")["Service"]["metadata"]["name"]
    words, (key,) = (pod["spec"]["containers"][0][part] for part in ("args", "env"))
    for folder, role in ROLES.items():
        found = manifests(folder)
        url = urlsplit(words[words.index(f"--{Path(folder).name}") + 1])
        server = found["Service"]
        assert (url.hostname, url.port) == (server["metadata"]["name"], server["spec"]["ports"][0]["port"])
        labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
        assert server["spec"]["selector"] == labels
        (clients, _) = found["NetworkPolicy"]["spec"]["ingress"][0]["from"]
        assert clients["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        reached = [admitted["spec"]["egress"][1]["to"], transfer["spec"]["egress"][0]["to"]]
        for peers in (*reached, [{"podSelector": transfer["spec"]["podSelector"]}]):
            assert peers[0]["podSelector"]["matchLabels"].items() <= labels.items()
        assert transfer["spec"]["ingress"][0]["from"] == transfer["spec"]["egress"][0]["to"]
        args = make_arg_parser(FlexibleArgumentParser()).parse_args(container(folder)["args"])
        assert args.kv_transfer_config.kv_role == role
        assert key | {"name": "VLLM_API_KEY"} in container(folder)["env"]


@pytest.mark.slow
@pytest.mark.parametrize("folder", [*SERVERS, DISAGGREGATED, MONITORING])
def test_schemas_of_kubernetes(folder: str, tmp_path: Path) -> None:
    """Strictly: unknown keys are errors. Of the operator's PodMonitor no schema is published with them."""
    python = kubernetes_python()
    code = (
        "import json, sys, kubernetes_validate as k\n"
        "for one in json.load(sys.stdin): k.validate(one, sys.argv[1], strict=True)\n"
    )
    if folder == DISAGGREGATED:
        found = documents(FOLDER / folder / "router.yaml")
    else:
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
