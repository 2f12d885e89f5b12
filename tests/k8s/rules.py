"""Our own mistakes in manifests, which a schema does not know. Pure: rendered objects in, sentences out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from tests.k8s import coordinator_rules, policy_rules, route_rules
from tests.k8s.pods import Object, Pod, matches, pods

PROBES: Final = ("startupProbe", "readinessProbe", "livenessProbe")
MARGIN_S: Final = 30
"""Between the longest generation and the moment in which a pod is ended for good."""


def probes_of_ports_that_are_not_there(objects: Sequence[Object]) -> Iterator[str]:
    for pod in pods(objects):
        for container in pod.containers:
            ports = {
                known for port in container.get("ports", ()) for known in (port.get("name"), port["containerPort"])
            }
            for kind in PROBES:
                for action in ("httpGet", "tcpSocket", "grpc"):
                    port = container.get(kind, {}).get(action, {}).get("port")
                    if port is not None and port not in ports:
                        yield f"{pod.owner}: {kind} asks port {port}, which {container['name']} does not have"


def names_that_nobody_declares(
    objects: Sequence[Object], secrets: Sequence[str], claims: Sequence[str]
) -> Iterator[str]:
    """secrets, claims: that whoever installs it makes (`docs/operations/kubernetes.md`)."""
    declared = {(each["kind"], each["metadata"]["name"]) for each in objects}
    declared |= {("Secret", name) for name in secrets}
    declared |= {("PersistentVolumeClaim", name) for name in claims}
    declared |= {("Secret", each["spec"]["secretName"]) for each in objects if each["kind"] == "Certificate"}
    declared |= {
        ("ResourceClaimTemplate", each["metadata"]["name"])
        for each in objects
        if each["kind"] == "ResourceClaimTemplate"
    }
    for pod in pods(objects):
        account = pod.spec.get("serviceAccountName")
        if account and ("ServiceAccount", account) not in declared:
            yield f"{pod.owner}: there is no ServiceAccount {account}"
        for kind, name in _references(pod):
            if (kind, name) not in declared:
                yield f"{pod.owner}: there is no {kind} {name}"
        priority = pod.spec.get("priorityClassName")
        if priority and ("PriorityClass", priority) not in declared:
            yield f"{pod.owner}: there is no PriorityClass {priority}"


def _references(pod: Pod) -> Iterator[tuple[str, str]]:
    volumes = pod.spec.get("volumes", ())
    for volume in volumes:
        if "secret" in volume:
            yield "Secret", volume["secret"]["secretName"]
        if "configMap" in volume:
            yield "ConfigMap", volume["configMap"]["name"]
        if "persistentVolumeClaim" in volume:
            yield "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]
    for claim in pod.spec.get("resourceClaims", ()):
        yield "ResourceClaimTemplate", claim["resourceClaimTemplateName"]
    for container in pod.containers:
        for source in container.get("envFrom", ()):
            yield "Secret", source["secretRef"]["name"]
        for variable in container.get("env", ()):
            source = variable.get("valueFrom", {})
            for key, kind in (("secretKeyRef", "Secret"), ("configMapKeyRef", "ConfigMap")):
                if key in source:
                    yield kind, source[key]["name"]
        mounted = {mount["name"] for mount in container.get("volumeMounts", ())}
        for name in mounted - {volume["name"] for volume in volumes} - pod.claims:
            yield "volume", name


def ports_that_stand_open(objects: Sequence[Object]) -> Iterator[str]:
    """Workers that others reach without a certificate, unless that is said; where there are certificates it may not be
    said. Probes that would need one. Coordinators that ask for no key, would not miss their keys, or let Ray's ports be
    anybody's."""
    has_certificates = any(
        each["kind"] == "Certificate" or (each["kind"] == "Secret" and each["metadata"]["name"].endswith("-tls"))
        for each in objects
    )
    for pod in pods(objects):
        for container in pod.spec["containers"]:
            words = [*container.get("command", ()), *container.get("args", ())]
            if not {"target_worker", "draft_worker", "draft_worker.memory"} & set(words):
                continue
            is_closed = any(word.startswith("--tls-dir=") for word in words)
            if has_certificates and ("--insecure" in words or not is_closed):
                yield f"{pod.owner}: {container['name']} does not use its certificates"
            if not is_closed and "--insecure" not in words:
                yield f"{pod.owner}: {container['name']} would refuse to start in the clear"
            ports = {container.get(kind, {}).get("grpc", {}).get("port") for kind in PROBES} - {None}
            healthy = {int(word.partition("=")[2]) for word in words if word.startswith("--health-port=")}
            if is_closed and not ports <= healthy:
                yield f"{pod.owner}: probes of {container['name']} have no certificate for ports {ports - healthy}"
    for each in objects:
        if each["kind"] == "RayService":
            cluster = each["spec"]["rayClusterConfig"]
            if cluster.get("authOptions", {}).get("mode") != "token":
                yield f"{each['metadata']['name']}: Ray's ports are for everybody"
    for pod in pods(objects):
        for container in pod.spec["containers"]:
            names = {variable["name"] for variable in container.get("env", ())}
            if pod.name in ("coordinator", "ray-head") and "OUTRIDER_API_KEYS" not in names:
                yield f"{pod.owner}: {container['name']} asks for no key"
            if "OUTRIDER_INSECURE" in names:
                yield f"{pod.owner}: {container['name']} would serve everybody if its keys were lost"
            if has_certificates and "OUTRIDER_METRICS_INSECURE" in names:
                yield f"{pod.owner}: {container['name']} does not use its certificates"


def selectors_that_choose_nothing(objects: Sequence[Object]) -> Iterator[str]:
    """Sentences about services, budgets and policies that match no pod, and workloads that miss their own pods."""
    labels = [pod.labels for pod in pods(objects)]
    for each in objects:
        name = f"{each['kind']}/{each['metadata']['name']}"
        match each["kind"]:
            case "Service":
                chosen: Object = {"matchLabels": each["spec"].get("selector", {})}
            case "PodDisruptionBudget":
                chosen = each["spec"]["selector"]
            case "NetworkPolicy":
                chosen = each["spec"]["podSelector"]
            case "Deployment" | "StatefulSet":
                own = each["spec"]["template"]["metadata"]["labels"]
                if not matches(each["spec"]["selector"], own):
                    yield f"{name} does not choose its own pods"
                continue
            case _:
                continue
        if not any(matches(chosen, found) for found in labels):
            yield f"{name} chooses no pod"


def pods_that_are_ended_too_soon(objects: Sequence[Object], longest_s: Mapping[str, float]) -> Iterator[str]:
    """longest_s: by the name label, what a pod may have to finish, seconds."""
    for pod in pods(objects):
        needed = longest_s.get(pod.name)
        grace = pod.spec.get("terminationGracePeriodSeconds", 30)
        if needed is None:
            continue
        if grace < needed + MARGIN_S:
            yield f"{pod.owner} is ended after {grace} s and may have to finish what takes {needed:g}"
        if pod.owner.startswith("RayService/"):
            yield from coordinator_rules.nodes_that_end_too_soon(pod, needed + MARGIN_S, grace)


def containers_that_may_too_much(objects: Sequence[Object]) -> Iterator[str]:
    """The profile `restricted`, a root file system that is read-only, and bounds of memory."""
    for pod in pods(objects):
        own = pod.spec.get("securityContext", {})
        if not own.get("runAsNonRoot") or own.get("seccompProfile", {}).get("type") != "RuntimeDefault":
            yield f"{pod.owner} may run as root, or without a seccomp profile"
        if pod.spec.get("automountServiceAccountToken", True) and pod.name != "certificates":
            yield f"{pod.owner} has a token for the cluster"
        for container in pod.containers:
            context = container.get("securityContext", {})
            name = f"{pod.owner}: {container['name']}"
            if context.get("allowPrivilegeEscalation", True) or context.get("capabilities", {}).get("drop") != ["ALL"]:
                yield f"{name} may gain privileges"
            if not context.get("readOnlyRootFilesystem"):
                yield f"{name} may write to its root"
            resources = container.get("resources", {})
            if "memory" not in resources.get("limits", {}) or {"cpu", "memory"} - resources.get("requests", {}).keys():
                yield f"{name} does not say what it needs"


def monitors_that_find_nothing(objects: Sequence[Object]) -> Iterator[str]:
    """Prometheus says nothing of a port that no pod has: the graphs stay empty, and alerts silent."""
    for each in objects:
        if each["kind"] != "PodMonitor":
            continue
        name = f"PodMonitor/{each['metadata']['name']}"
        chosen = [pod for pod in pods(objects) if matches(each["spec"]["selector"], pod.labels)]
        if not chosen:
            yield f"{name} chooses no pod"
        ports = {
            port.get("name") for pod in chosen for container in pod.containers for port in container.get("ports", ())
        }
        for endpoint in each["spec"]["podMetricsEndpoints"]:
            if chosen and endpoint["port"] not in ports:
                yield f"{name} asks port {endpoint['port']}, which its pods do not have"


def ranks_that_are_ended_too_soon(objects: Sequence[Object], longest_s: Mapping[str, float]) -> Iterator[str]:
    """torchrun ends the ranks that it started 30 s after it was told to end, unless it is told otherwise."""
    for pod in pods(objects):
        needed = longest_s.get(pod.name)
        for container in pod.spec["containers"]:
            command = container.get("command", ())
            if needed is None or "torchrun" not in command:
                continue
            given = [word.partition("=")[2] for word in command if word.startswith("--shutdown-timeout=")]
            timeout = float(given[0]) if given else 30
            if not needed <= timeout < pod.spec.get("terminationGracePeriodSeconds", 30):
                yield f"{pod.owner}: torchrun ends its ranks after {timeout:g} s, and they may need {needed:g}"


def ranks_without_shared_memory(objects: Sequence[Object]) -> Iterator[str]:
    """Ranks on one node exchange what they computed in /dev/shm, of which a container has 64 MiB by itself."""
    for pod in pods(objects):
        memory = {
            volume["name"]
            for volume in pod.spec.get("volumes", ())
            if volume.get("emptyDir", {}).get("medium") == "Memory"
        }
        for container in pod.spec["containers"]:
            words = [word for word in container.get("command", ()) if word.startswith("--nproc-per-node=")]
            shared = {mount["name"] for mount in container.get("volumeMounts", ()) if mount["mountPath"] == "/dev/shm"}
            if words and words != ["--nproc-per-node=1"] and not shared & memory:
                yield f"{pod.owner}: the ranks of {container['name']} have no memory to share"


def pools_that_an_apply_resets(objects: Sequence[Object]) -> Iterator[str]:
    """A number of replicas beside an autoscaler: every apply would bring it back, and end workers that are needed."""
    for scaled in objects:
        if scaled["kind"] not in ("ScaledObject", "HorizontalPodAutoscaler"):
            continue
        target = scaled["spec"]["scaleTargetRef"]
        kind = target.get("kind", "Deployment")
        found = [each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, target["name"])]
        if not found:
            yield f"{scaled['kind']}/{scaled['metadata']['name']}: there is no {kind} {target['name']}"
        for each in found:
            if "replicas" in each["spec"]:
                yield f"{kind}/{target['name']} says how many it is, which is its autoscaler's matter"


def ray_nodes_that_call_wget(objects: Sequence[Object]) -> Iterator[str]:
    """KubeRay adds the probes that are not there, and some of its releases add commands that images may not have."""
    for pod in pods(objects):
        missing = [kind for kind in ("livenessProbe", "readinessProbe") if kind not in pod.spec["containers"][0]]
        if pod.owner.startswith("RayService/") and missing:
            yield f"{pod.owner}: KubeRay may add a {' and a '.join(missing)} that calls wget"


def sets_that_never_start(objects: Sequence[Object]) -> Iterator[str]:
    """Groups whose leader waits for followers that are not made, or cannot be found by name before all are ready."""
    for each in objects:
        if each["kind"] != "LeaderWorkerSet":
            continue
        name, spec = each["metadata"]["name"], each["spec"]
        if spec.get("startupPolicy") == "LeaderReady":
            yield f"LeaderWorkerSet/{name}: its leader is ready when its followers are, which are made after that"
        if any(one["kind"] == "Service" and one["metadata"]["name"] == name for one in objects):
            yield f"LeaderWorkerSet/{name}: a Service of its name is in the place of the controller's own"
        if spec["leaderWorkerTemplate"].get("restartPolicy") != "RecreateGroupOnPodRestart":
            yield f"LeaderWorkerSet/{name}: a rank that restarts alone finds no group"
        group = spec["leaderWorkerTemplate"]
        if "readinessProbe" not in group.get("leaderTemplate", group["workerTemplate"])["spec"]["containers"][0]:
            yield f"LeaderWorkerSet/{name}: its leader is ready before it serves"
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            if kind in group["workerTemplate"]["spec"]["containers"][0]:
                yield f"LeaderWorkerSet/{name}: {kind} of followers, which serve nothing"


def policies_that_shut_out_all_others(objects: Sequence[Object]) -> Iterator[str]:
    """A policy permits something where nothing is permitted; alone it forbids everything else."""
    policies = {each["metadata"]["name"] for each in objects if each["kind"] == "NetworkPolicy"}
    if policies and not any(name.endswith("nothing-by-default") for name in policies):
        yield f"nothing is denied by default beside {', '.join(sorted(policies))}"


def workers_that_may_fall_to_the_cpu(objects: Sequence[Object]) -> Iterator[str]:
    """A worker that asks for a GPU and does not say so starts without one, and is a hundred times slower."""
    for pod in pods(objects):
        for container in pod.spec["containers"]:
            resources = container.get("resources", {})
            has_gpu = bool(resources.get("claims")) or any(
                "nvidia.com/" in name for name in resources.get("limits", {})
            )
            words = container.get("args", ())
            if {"target_worker", "draft_worker"} & set(words) and has_gpu is not ("--device=cuda" in words):
                yield f"{pod.owner}: the GPUs of {container['name']} and its --device differ"


def broken(
    objects: Sequence[Object],
    *,
    secrets: Sequence[str],
    claims: Sequence[str],
    longest_s: Mapping[str, float],
) -> list[str]:
    """Sentences about every rule that the objects break; empty if they break none.

    secrets, claims: names of those that are not among the objects, because whoever installs them makes them.
    """
    secrets = [*secrets, *(each["metadata"]["name"] for each in objects if each["kind"] == "Secret")]
    rules: list[Callable[[Sequence[Object]], Iterator[str]]] = [
        probes_of_ports_that_are_not_there,
        lambda every: names_that_nobody_declares(every, secrets, claims),
        selectors_that_choose_nothing,
        lambda every: pods_that_are_ended_too_soon(every, longest_s),
        containers_that_may_too_much,
        ports_that_stand_open,
        monitors_that_find_nothing,
        lambda every: ranks_that_are_ended_too_soon(every, longest_s),
        ranks_without_shared_memory,
        workers_that_may_fall_to_the_cpu,
        pools_that_an_apply_resets,
        ray_nodes_that_call_wget,
        sets_that_never_start,
        policies_that_shut_out_all_others,
        policy_rules.pods_that_are_not_looked_at,
        policy_rules.hops_that_are_shut,
        policy_rules.hops_that_stand_open,
        coordinator_rules.heads_that_wait_for_nobody,
        coordinator_rules.ports_that_haproxy_has,
        lambda every: coordinator_rules.limits_that_cut_texts_off(every, longest_s["coordinator"]),
        coordinator_rules.replicas_without_room,
        coordinator_rules.budgets_that_refuse_every_eviction,
        coordinator_rules.certificates_that_name_no_address,
        lambda every: coordinator_rules.memories_that_are_not_there(every, secrets),
        route_rules.backends_that_are_not_there,
        route_rules.gateways_that_are_not_there,
        route_rules.routes_that_shut_each_other_out,
        lambda every: route_rules.certificates_that_nobody_declares(every, secrets),
        route_rules.paths_without_a_route,
        route_rules.routes_that_open_too_much,
        lambda every: route_rules.routes_that_end_too_soon(every, longest_s["coordinator"]),
    ]
    return [sentence for rule in rules for sentence in rule(objects)]
