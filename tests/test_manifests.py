"""The manifests of deploy/kubernetes: complete, consistent, and in flags that exist."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from vertumnus_router.io.discovery.config import FileDiscovery, KubernetesDiscovery

from sgl_vertumnus import launch_router, launch_server
from tests.router.io.harness import run, running

FOLDER = Path(__file__).parents[1] / "deploy" / "kubernetes"
#: What an API server of today serves.
VERSIONS = {
    "Deployment": "apps/v1",
    "Kustomization": "kustomize.config.k8s.io/v1beta1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "Role": "rbac.authorization.k8s.io/v1",
    "RoleBinding": "rbac.authorization.k8s.io/v1",
    "Service": "v1",
    "ServiceAccount": "v1",
    "StatefulSet": "apps/v1",
}
WORKLOADS = ("Deployment", "StatefulSet")
OBJECTS: list[dict[str, Any]] = [
    one
    for path in sorted(FOLDER.glob("*.yaml"))
    for one in yaml.safe_load_all(path.read_text(encoding="utf-8"))
]


def the(kind: str, name: str) -> dict[str, Any]:
    (found,) = (one for one in OBJECTS if one["kind"] == kind and one["metadata"]["name"] == name)
    return found


def container(workload: dict[str, Any]) -> dict[str, Any]:
    (only,) = workload["spec"]["template"]["spec"]["containers"]
    return dict(only)


def flags(workload: dict[str, Any]) -> list[str]:
    """With a value for each variable, which must be declared."""
    one = container(workload)
    declared = {entry["name"] for entry in one["env"]}
    used = set(re.findall(r"\$\((\w+)\)", " ".join(one["args"])))
    assert used == declared
    return [re.sub(r"\$\((\w+)\)", "127.0.0.1", arg) for arg in one["args"]]


ROUTER, POOL = the("Deployment", "vertumnus-router"), the("StatefulSet", "vertumnus-pool")


def test_every_object_has_a_kind_a_version_and_a_name() -> None:
    for one in OBJECTS:
        assert one["apiVersion"] == VERSIONS[one["kind"]]
        if one["kind"] != "Kustomization":
            assert re.fullmatch(r"[a-z0-9-]+", one["metadata"]["name"])
    (kustomization,) = (one for one in OBJECTS if one["kind"] == "Kustomization")
    files = {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml"}
    assert set(kustomization["resources"]) == files
    images = {container(one)["image"] for one in (ROUTER, POOL)}
    assert {image["name"] for image in kustomization["images"]} == images


@pytest.mark.parametrize("kind", WORKLOADS)
def test_selectors_match_labels_and_ports_match_names(kind: str) -> None:
    for workload in (one for one in OBJECTS if one["kind"] == kind):
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert workload["spec"]["selector"]["matchLabels"].items() <= labels.items()
        service = the("Service", workload["metadata"]["name"])
        assert service["spec"]["selector"].items() <= labels.items()
        ports = {port["name"] for port in container(workload)["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
        for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
            asked = container(workload).get(probe)
            assert asked is None or asked["httpGet"]["port"] in ports
        mounted = {mount["name"] for mount in container(workload)["volumeMounts"]}
        assert mounted == {one["name"] for one in workload["spec"]["template"]["spec"]["volumes"]}
    assert POOL["spec"]["serviceName"] == the("Service", "vertumnus-pool")["metadata"]["name"]
    policy = the("NetworkPolicy", "vertumnus-pool")["spec"]
    sources = [peer["podSelector"]["matchLabels"] for peer in policy["ingress"][0]["from"]]
    assert sources == [one["spec"]["template"]["metadata"]["labels"] for one in (ROUTER, POOL)]


def test_the_router_s_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    config = launch_router.router_config(launch_router._parser().parse_args(flags(ROUTER)))
    (port,) = (port["containerPort"] for port in container(ROUTER)["ports"])
    assert config.port == port
    (found,) = config.discovery
    assert isinstance(found, KubernetesDiscovery)
    service = the("Service", "vertumnus-pool")
    assert dict(found.workers).items() <= service["metadata"]["labels"].items()
    assert len(service["spec"]["ports"]) == 1, "else --service-discovery-port is needed"
    pod = ROUTER["spec"]["template"]["spec"]
    sleep_s = int(container(ROUTER)["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > sleep_s + config.limits.stop_s
    annotations = ROUTER["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(port)


def test_the_router_may_do_what_it_does() -> None:
    account = ROUTER["spec"]["template"]["spec"]["serviceAccountName"]
    assert the("ServiceAccount", account)
    binding = the("RoleBinding", "vertumnus-router")
    assert [subject["name"] for subject in binding["subjects"]] == [account]
    (rule,) = the("Role", binding["roleRef"]["name"])["rules"]
    assert rule == {
        "apiGroups": ["discovery.k8s.io"],
        "resources": ["endpointslices"],
        "verbs": ["list", "watch"],
    }


def test_the_router_s_probes_are_answered(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(discovery=(FileDiscovery(tmp_path / "none"),)) as it:
            for probe, status in (("livenessProbe", 200), ("readinessProbe", 503)):
                async with it.client.get(container(ROUTER)[probe]["httpGet"]["path"]) as answer:
                    assert answer.status == status

    run(scenario())


def test_the_pool_s_flags() -> None:
    options, passed = launch_server._parse(flags(POOL))
    assert options.no_router
    config = launch_server._pool_config(options, passed)
    assert config.size == 4
    (port,) = (port["containerPort"] for port in container(POOL)["ports"])
    assert f"--port={port}" in passed
    pod = POOL["spec"]["template"]["spec"]
    sleep_s = int(container(POOL)["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > sleep_s


def test_what_the_pool_passes_on_is_sglang_s() -> None:
    pytest.importorskip("sglang", reason="needs sglang")
    import argparse

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    _, passed = launch_server._parse(flags(POOL))
    parser.parse_args([*passed, "--model-path", "m"])
