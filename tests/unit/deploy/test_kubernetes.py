"""deploy/kubernetes fits Kubernetes' own schemas, and its parts fit each other and the fleet."""

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from loraport.deploy import site
from loraport.deploy.credentials import Materials
from services.shared.metrics import METRICS

FOLDER = Path(__file__).resolve().parents[3] / "deploy" / "kubernetes"
BASE = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
OBJECTS: list[dict[str, Any]] = [
    each for name in BASE["resources"] for each in yaml.safe_load_all((FOLDER / name).read_text())
]
VERSIONS = ("1.30", "1.37")
FLEET = ("registry", "router", "node", "board")


def of(kind: str) -> dict[str, dict[str, Any]]:
    """Returns the objects of a kind by name."""
    return {each["metadata"]["name"]: each for each in OBJECTS if each["kind"] == kind}


WORKLOADS = {**of("Deployment"), **of("StatefulSet")}


def pod(name: str) -> dict[str, Any]:
    spec: dict[str, Any] = WORKLOADS[name]["spec"]["template"]["spec"]
    return spec


def containers(name: str) -> list[dict[str, Any]]:
    return [*pod(name).get("initContainers", ()), *pod(name)["containers"]]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("object_", OBJECTS, ids=lambda each: f"{each['kind']}-{each['metadata']['name']}")
def test_it_fits_the_schema(object_: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(object_, version, strict=True)


def test_the_schema_refuses_what_it_does_not_know() -> None:
    broken = {**WORKLOADS["router"], "spec": {**WORKLOADS["router"]["spec"], "replica": 2}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSIONS[-1], strict=True)


def test_kustomizations_name_files_and_images_that_are_there() -> None:
    assert sorted(BASE["resources"]) == sorted(p.name for p in FOLDER.glob("*.yaml") if p.name != "kustomization.yaml")
    images = {image["name"]: image["newTag"] for image in BASE["images"]}
    assert {each["image"] for name in WORKLOADS for each in containers(name)} == set(images)
    assert all(re.match(r"\d", tag) for tag in images.values())
    gpu = yaml.safe_load((FOLDER / "gpu" / "kustomization.yaml").read_text())
    for patch in gpu["patches"]:
        change = yaml.safe_load((FOLDER / "gpu" / patch["path"]).read_text())
        target = WORKLOADS[change["metadata"]["name"]]
        assert change["kind"] == target["kind"]
        named = {each["name"] for each in change["spec"]["template"]["spec"]["containers"]}
        assert named <= {each["name"] for each in containers(change["metadata"]["name"])}


@pytest.mark.parametrize("name", FLEET)
def test_pods_are_restricted(name: str) -> None:
    spec = pod(name)
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for each in containers(name):
        context = each["securityContext"]
        assert context["readOnlyRootFilesystem"] is True, each["name"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert each["resources"]["limits"]["memory"]
        assert not [e for e in each.get("env", ()) if "value" in e and re.search("PASSWORD|SECRET|KEY", e["name"])]
    for each in pod(name)["containers"]:
        assert {"readinessProbe", "livenessProbe"} <= set(each), each["name"]
        if name != "board":
            assert "startupProbe" in each


def test_selectors_select_the_pods_that_they_mean() -> None:
    labels = {name: w["spec"]["template"]["metadata"]["labels"] for name, w in WORKLOADS.items()}
    for name, workload in WORKLOADS.items():
        assert workload["spec"]["selector"]["matchLabels"].items() <= labels[name].items()
    for kind in ("Service", "PodDisruptionBudget", "NetworkPolicy"):
        for name, each in of(kind).items():
            spec = each["spec"]
            wanted = spec["selector"] if kind == "Service" else spec.get("selector", spec.get("podSelector"))
            wanted = wanted.get("matchLabels", wanted)
            if wanted and name != "operator":
                assert [w for w in labels.values() if wanted.items() <= w.items()], (kind, name)
    assert set(of("PodDisruptionBudget")) == {"registry", "router", "node"}


def test_services_lead_to_ports_that_containers_have() -> None:
    for name, service in of("Service").items():
        wanted = service["spec"]["selector"].items()
        (workload,) = [w for w in WORKLOADS.values() if wanted <= w["spec"]["template"]["metadata"]["labels"].items()]
        ports = {
            port["name"]: port["containerPort"]
            for each in workload["spec"]["template"]["spec"]["containers"]
            for port in each["ports"]
        }
        for port in service["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"], name


def test_ports_and_directories_are_those_of_the_configurations(tmp_path: Path) -> None:
    ports = {
        port["name"]: port["containerPort"]
        for name in WORKLOADS
        for c in containers(name)
        for port in c.get("ports", ())
    }
    assert ports["executor"] == site.EXECUTOR
    assert ports["loader"] == site.LOADER
    assert ports["upload"] == site.LOADER_UPLOAD
    assert ports["admin"] == site.ROUTER_ADMIN
    assert (ports["metrics"], ports["loader-metrics"]) == (site.METRICS, site.LOADER_METRICS)
    for name in ("registry", "router", "node"):
        for each in pod(name)["containers"]:
            mounts = {mount["mountPath"] for mount in each["volumeMounts"]}
            assert site.KEYS in mounts
            assert name == "registry" or site.STATE in mounts
            assert each["name"] in ("registry", "loader") or site.BASE in mounts
            probe = each["readinessProbe"]["exec"]["command"]
            assert int(probe[-1]) in {port["containerPort"] for port in each["ports"]}
    made = site.kubernetes_site(base_model="base", nodes=4, namespace=BASE["namespace"], public=())
    Materials(tmp_path, made, nodes=True).make({})
    for name in WORKLOADS:
        for volume in pod(name)["volumes"]:
            if "secret" in volume:
                secret = volume["secret"]["secretName"].removeprefix("loraport-")
                assert (tmp_path / secret).is_dir(), f"init makes nothing for {secret}"


def test_the_autoscaler_goes_by_a_metric_that_routers_export_and_to_nodes_that_routers_know() -> None:
    (scaler,) = of("HorizontalPodAutoscaler").values()
    target = scaler["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("StatefulSet", "node")
    exported = {name for metric in METRICS.values() if "router" in metric.services for name in metric.series_names}
    for metric in scaler["spec"]["metrics"]:
        assert metric["external"]["metric"]["name"] in exported
    made = site.kubernetes_site(base_model="base", nodes=scaler["spec"]["maxReplicas"], namespace="loraport", public=())
    assert [executor.name for executor in made.executors] == [f"node-{index}" for index in range(4)]
    assert WORKLOADS["node"]["spec"]["serviceName"] == "nodes"
    assert made.executors[0].address.startswith("node-0.nodes.loraport.svc")


def test_the_network_is_closed_but_for_what_the_fleet_needs() -> None:
    policies = of("NetworkPolicy")
    assert policies["nothing"]["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    assert set(FLEET) <= set(policies)

    def out(name: str) -> set[tuple[str, int]]:
        return {
            (peer["podSelector"]["matchLabels"]["app.kubernetes.io/name"], port["port"])
            for rule in policies[name]["spec"].get("egress", ())
            for peer in rule["to"]
            if "podSelector" in peer
            for port in rule["ports"]
        }

    assert out("registry") == {("database", 5432)}
    assert out("router") == {("registry", 7401), ("node", 7403), ("board", 6379)}
    assert out("node") == {("registry", 7401), ("board", 6379), ("store", 9000)}
    assert out("board") == set()
    # An operator asks every service itself.
    assert out("operator") >= {("registry", 7401), ("router", 7410), ("node", 7402), ("node", 7403), ("node", 7412)}
    # What leaves a pod must be let in by the other.
    for source in (*FLEET, "operator"):
        for target, port in out(source):
            if target not in policies:
                continue  # outside: the cluster's own
            rules = policies[target]["spec"]["ingress"]
            names = {
                peer.get("podSelector", {}).get("matchLabels", {}).get("app.kubernetes.io/name")
                for rule in rules
                if port in {each["port"] for each in rule["ports"]}
                for peer in rule.get("from", [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": source}}}])
            }
            assert source in names, (source, target, port)
    worldwide = [name for name in FLEET if "ipBlock" in str(policies[name])]
    assert worldwide == ["node"]
