"""The chart, without a cluster: linted, rendered by Helm, and held to Kubernetes' own schemas."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from outrider.server.config.server_settings import ServerSettings
from outrider.server.config.settings_loader import load_settings

pytestmark = pytest.mark.scale("helm-python-sdk", "kubernetes-validate")

CHART = Path(__file__).parents[2] / "deploy/helm"
PROGRAM = Path(__file__).parent / "programs/render_chart.py"
SERVED = {"server": {"served_model_name": "m"}}
LLM_D = yaml.safe_load((CHART / "values-llm-d.yaml").read_text()) | {"settings": SERVED}
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "on GPUs": {
        "gpus": 2,
        "image": {"repository": "registry/outrider", "tag": "cuda"},
        "imagePullSecrets": [{"name": "pull"}],
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "nodeSelector": {"gpu": "h100"},
        "affinity": {"podAntiAffinity": {}},
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
        ],
    },
    "with secrets": {
        "apiKeys": {"list": ["one", "two"]},
        "huggingFace": {"existingSecret": "hf"},
        "podAnnotations": {"a": "b"},
    },
    "with a claim": {"modelCache": {"kind": "claim", "storageClass": "nfs"}},
    "scaled by KEDA": {"autoscaling": {"by": "keda"}, "podMonitor": {"enabled": True}},
    "scaled by an HPA": {"autoscaling": {"by": "hpa"}, "podDisruptionBudget": {"enabled": False}},
    "behind llm-d": LLM_D,
}
CUSTOM = ("ScaledObject", "PodMonitor")  # the schemas of which nobody ships

Manifests = list[dict[str, Any]]
Render = Callable[[dict[str, Any]], Manifests]


@pytest.fixture(scope="session")
def helm(installed: Path) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def call(values: dict[str, Any]) -> dict[str, Any]:
        python = installed / "helm-python-sdk/bin/python"
        command = [python, "-P", PROGRAM, CHART, "web", "models"]
        said = subprocess.run(
            command, input=json.dumps(values), capture_output=True, text=True, check=True
        )
        answer: dict[str, Any] = json.loads(said.stdout)
        return answer

    return call


@pytest.fixture(scope="session")
def render(helm: Callable[[dict[str, Any]], dict[str, Any]]) -> Render:
    def call(values: dict[str, Any]) -> Manifests:
        answer = helm(values)
        assert "error" not in answer, answer["error"]
        assert [m for m in answer["lint"]["messages"] if m["severity"] > 1] == []
        files = [text for path, text in answer["rendered"].items() if not path.endswith(".txt")]
        return [found for text in files for found in yaml.safe_load_all(text) if found]

    return call


def one(manifests: Manifests, kind: str, component: str = "server") -> dict[str, Any]:
    label = "app.kubernetes.io/component"
    (found,) = [
        m for m in manifests if m["kind"] == kind and m["metadata"]["labels"][label] == component
    ]
    return found


def container(manifests: Manifests, component: str = "server") -> dict[str, Any]:
    (found,) = one(manifests, "Deployment", component)["spec"]["template"]["spec"]["containers"]
    return found


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS)
def test_every_manifest_is_strictly_what_kubernetes_knows(
    render: Render, values: dict[str, Any], installed: Path, tmp_path: Path
) -> None:
    manifests = [m for m in render(values) if m["kind"] not in CUSTOM]
    file = tmp_path / "manifests.yaml"
    file.write_text(yaml.safe_dump_all(manifests))
    command = [installed / "kubernetes-validate/bin/kubernetes-validate", "--strict", file]
    said = subprocess.run(command, capture_output=True, text=True)
    assert said.returncode == 0, said.stdout + said.stderr


@pytest.mark.parametrize(
    "wrong",
    [
        {"replica": 2},
        {"image": {"name": "x"}},
        {"gpus": -1},
        {"settings": {"schedulers": {"max_num_seqs": 1}}},
        {"autoscaling": {"by": "magic"}},
        {"apiKeys": {"list": ["two words"]}},
        {"metricsPort": 0},
        {"router": {"enabled": "yes"}},
    ],
    ids=str,
)
def test_values_that_mean_nothing_are_refused(
    helm: Callable[[dict[str, Any]], dict[str, Any]], wrong: dict[str, Any]
) -> None:
    assert "at '" in helm(wrong)["error"]  # names the place


def test_kv_events_need_the_name_of_the_model(
    helm: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    assert "served_model_name" in helm({"kvEvents": {"enabled": True}})["error"]


@pytest.mark.parametrize("gpus", [0, 1, 2])
def test_more_ranks_than_gpus_of_the_pod_are_refused(
    helm: Callable[[dict[str, Any]], dict[str, Any]], gpus: int
) -> None:
    """Such a pod would start, fetch the models, and fail again and again."""

    def answer(num_ranks: int, role: str = "target") -> dict[str, Any]:
        return helm({"gpus": gpus, "settings": {role: {"tensor_parallel": num_ranks}}})

    most = max(1, gpus)
    assert "rendered" in answer(most)
    for role in ("target", "draft"):
        reason = answer(most + 1, role)["error"]
        assert f"settings.{role}.tensor_parallel is {most + 1}, but gpus is {gpus}" in reason
        assert f"set gpus to {most + 1}, or tensor_parallel to {most} at most" in reason


def test_the_server_understands_its_environment(render: Render) -> None:
    settings = {
        "server": {"cors_origins": ["https://a.example"], "reasoning_content": True},
        "scheduler": {"max_num_batched_tokens": 1_000_000},
    }
    values = LLM_D | {"settings": settings | {"server": settings["server"] | SERVED["server"]}}
    values |= {"apiKeys": {"existingSecret": "keys"}, "drainSeconds": 20}
    (args, env) = (container(render(values))[name] for name in ("args", "env"))
    assert args == ["serve", "--config", "default"]
    environ = {entry["name"]: entry["value"] for entry in env if "value" in entry}
    loaded = load_settings(Path("default"), environ=environ)
    assert loaded.server.cors_origins == ("https://a.example",)
    assert loaded.server.reasoning_content
    assert loaded.server.metrics_port == 9000
    assert loaded.server.shutdown_timeout_s == 20
    assert str(loaded.server.api_key_file) == "/etc/outrider/keys"
    assert loaded.scheduler.max_num_batched_tokens == 1_000_000
    assert loaded.cache.kv_events_endpoint == "tcp://*:5556"
    assert loaded.cache.kv_events_topic == "kv@$(POD_IP):8000@m"
    names = [entry["name"] for entry in env]  # a variable can name only those before it
    assert names.index("POD_IP") < names.index("OUTRIDER_CACHE__KV_EVENTS_TOPIC")


def test_a_pod_is_given_time_to_start_and_to_drain(render: Render) -> None:
    manifests = render({"drainSeconds": 100, "preStopSeconds": 7, "startupMinutes": 20})
    server, spec = container(manifests), one(manifests, "Deployment")["spec"]
    startup = server["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 20 * 60
    assert spec["progressDeadlineSeconds"] > 20 * 60
    assert server["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "7"]
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] > 107
    paths = {name: server[f"{name}Probe"]["httpGet"]["path"] for name in ("readiness", "liveness")}
    assert paths == {"readiness": "/ready", "liveness": "/live"}


def test_drain_is_the_servers_own_unless_said(render: Render) -> None:
    env = {entry["name"]: entry.get("value") for entry in container(render({}))["env"]}
    assert float(env["OUTRIDER_SERVER__SHUTDOWN_TIMEOUT_S"] or 0) == (
        ServerSettings().shutdown_timeout_s
    )


def test_gpus_are_asked_for_and_never_needed_twice(render: Render) -> None:
    manifests = render({"gpus": 2})
    resources = container(manifests)["resources"]
    assert resources["limits"]["nvidia.com/gpu"] == resources["requests"]["nvidia.com/gpu"] == "2"
    rolling = one(manifests, "Deployment")["spec"]["strategy"]["rollingUpdate"]
    assert (rolling["maxSurge"], rolling["maxUnavailable"]) == (0, 1)
    assert "nvidia.com/gpu" not in container(render({}))["resources"]["limits"]


def test_nothing_writes_but_to_its_volumes(render: Render) -> None:
    manifests = render({"modelCache": {"kind": "claim", "existingClaim": "mine"}})
    server, spec = container(manifests), one(manifests, "Deployment")["spec"]["template"]["spec"]
    assert server["securityContext"]["readOnlyRootFilesystem"]
    assert spec["securityContext"]["runAsUser"] == 10001
    mounts = {mount["mountPath"]: mount["name"] for mount in server["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes[mounts["/cache"]]["persistentVolumeClaim"] == {"claimName": "mine"}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert not any(m["kind"] == "PersistentVolumeClaim" for m in manifests)


def test_keys_are_a_secret_of_which_the_pod_reads_a_file(render: Render) -> None:
    manifests = render({"apiKeys": {"list": ["one", "two"]}})
    secret = one(manifests, "Secret")
    assert secret["stringData"] == {"keys": "one\ntwo", "router-key": "one"}
    spec = one(manifests, "Deployment")["spec"]["template"]["spec"]
    (volume,) = [volume for volume in spec["volumes"] if volume["name"] == "keys"]
    name = secret["metadata"]["name"]
    assert volume["secret"] == {"secretName": name, "items": [{"key": "keys", "path": "keys"}]}
    router = container(manifests, "router")
    assert "--api-key=$(ROUTER_KEY)" in router["args"]
    (entry,) = router["env"]
    reference = {"name": name, "key": "router-key"}
    assert entry == {"name": "ROUTER_KEY", "valueFrom": {"secretKeyRef": reference}}
    others = [m for m in manifests if m["kind"] != "Secret"]
    assert "one\\ntwo" not in json.dumps(others)


def test_keda_scales_on_what_waits_and_keeps_what_runs(render: Render) -> None:
    manifests = render({"autoscaling": {"by": "keda", "minReplicas": 1, "waitingPerPod": 3}})
    scaled = one(manifests, "ScaledObject")
    where = "http://prometheus-operated.monitoring.svc:9090"
    pods = '{namespace="models",pod=~"web-outrider-.+"}'

    def trigger(state: str, threshold: str) -> dict[str, Any]:
        query = f"sum(outrider_requests_{state}{pods})"
        metadata = {"serverAddress": where, "query": query, "threshold": threshold}
        return {"type": "prometheus", "metricType": "AverageValue", "metadata": metadata}

    behavior = {"scaleDown": {"stabilizationWindowSeconds": 300}}
    assert scaled["apiVersion"] == "keda.sh/v1alpha1"
    assert scaled["spec"] == {
        "scaleTargetRef": {"name": one(manifests, "Deployment")["metadata"]["name"]},
        "minReplicaCount": 1,
        "maxReplicaCount": 8,
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": behavior}},
        "triggers": [trigger("waiting", "3"), trigger("running", "24")],
    }
    assert "replicas" not in one(manifests, "Deployment")["spec"]


def test_pod_monitor_reads_the_port_without_keys(render: Render) -> None:
    manifests = render({"podMonitor": {"enabled": True, "labels": {"release": "prom"}}})
    monitor, deployment = one(manifests, "PodMonitor"), one(manifests, "Deployment")
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    assert monitor["metadata"]["labels"]["release"] == "prom"
    assert monitor["spec"] == {
        "selector": {"matchLabels": deployment["spec"]["selector"]["matchLabels"]},
        "podMetricsEndpoints": [{"port": "metrics", "path": "/metrics", "interval": "15s"}],
    }
    ports = {port["name"]: port["containerPort"] for port in container(manifests)["ports"]}
    assert ports["metrics"] == 9000


def test_the_router_finds_the_servers_and_nothing_else(render: Render) -> None:
    manifests = render({})
    args = container(manifests, "router")["args"]
    start = args.index("--selector") + 1
    selector = dict(arg.split("=") for arg in args[start : start + 3])
    assert selector == one(manifests, "Deployment")["spec"]["selector"]["matchLabels"]
    assert "--service-discovery-namespace=models" in args
    (rule,) = one(manifests, "Role", "router")["rules"]
    assert rule == {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
    service = one(manifests, "Service", "router")
    assert service["spec"]["selector"]["app.kubernetes.io/component"] == "router"
    without = render({"router": {"enabled": False}})
    assert one(without, "Service")["spec"]["selector"]["app.kubernetes.io/component"] == "server"
    assert not any(m["kind"] in ("Role", "ServiceAccount") for m in without)
