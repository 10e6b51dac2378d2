# SPDX-License-Identifier: Apache-2.0
"""Checks of Kubernetes objects: their fields, and what they say of each other and of the programs that they run.

Each check is a generator of findings, texts that begin with Kind/name.
"""

import functools
import json
import pathlib
import re
import subprocess
import types
import urllib.parse

KUBERNETES = "1.35"
USER = 10001
CUSTOM_RESOURCES = pathlib.Path(__file__).with_name("custom_resources.schema.json")
VARIABLE = re.compile(r"\$\((\w+)\)")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
MEMORY_UNITS = {"Mi": 1, "Gi": 1024, "MiB": 1, "GiB": 1024}


def name_of(thing):
    return f"{thing['kind']}/{thing['metadata']['name']}"


def mebibytes(text):
    number, unit = re.fullmatch(r"(\d+)(\w+)", text).groups()
    return int(number) * MEMORY_UNITS[unit]


# ---- Fields ----
@functools.cache
def _schemas():
    """Kubernetes' definitions, all closed to unknown fields, with ours of custom resources beside them."""
    import kubernetes_validate  # found once deploy_tools.require has been called
    import referencing
    folder = pathlib.Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema" / f"v{KUBERNETES}.0-local-strict"
    definitions = json.loads((folder / "_definitions.json").read_text(encoding="utf-8"))
    custom = json.loads(CUSTOM_RESOURCES.read_text(encoding="utf-8"))
    base = definitions["$id"]
    custom["$id"] = urllib.parse.urljoin(base, CUSTOM_RESOURCES.name)
    resources = [referencing.Resource.from_contents(contents, referencing.jsonschema.DRAFT202012)
                 for contents in (definitions, custom)]
    return folder, base, custom, resources @ referencing.Registry()


@functools.cache
def _validator(api_version, kind):
    import jsonschema
    folder, base, custom, registry = _schemas()
    if f"{api_version}/{kind}" in custom["$defs"]:
        key = f"{api_version}/{kind}".replace("/", "~1")
        schema = {"$id": urllib.parse.urljoin(base, "custom"), "$ref": f"{CUSTOM_RESOURCES.name}#/$defs/{key}"}
    else:
        group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
        file = folder / f"{kind.lower()}-{group}.json"
        if not file.is_file():
            return None
        schema = json.loads(file.read_text(encoding="utf-8"))
    return jsonschema.Draft202012Validator(schema, registry=registry)


def _as_its_project_has_it(thing):
    """The object read into the class that the resource's own project makes of its definition, and written again.

    None for other objects. ValueError: a field is missing or has another type.
    """
    if thing["kind"] in ("JobSet", "TrainJob"):
        import kubeflow_trainer_api.models as models
        model = {"JobSet": models.JobsetV1alpha2JobSet, "TrainJob": models.TrainerV1alpha1TrainJob}[thing["kind"]]
        return model.from_dict(thing).to_dict()
    if thing["kind"] == "PyTorchJob":
        from kubeflow.training.api_client import ApiClient
        client, answer = ApiClient(), types.SimpleNamespace(data=json.dumps(thing))
        return client.sanitize_for_serialization(client.deserialize(answer, "KubeflowOrgV1PyTorchJob"))
    return None


def _lost(before, after, path=()):
    """Paths of what an object has and its copy does not."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key, value in before.items():
            if key not in after:
                yield ".".join((*path, key))
            else:
                yield from _lost(value, after[key], (*path, key))
    elif isinstance(before, list) and isinstance(after, list):
        for i, (one, other) in enumerate(zip(before, after)):
            yield from _lost(one, other, (*path, str(i)))


def _fields_of_a_custom_resource(thing):
    try:
        known = _as_its_project_has_it(thing)
    except ValueError as error:
        yield f"{name_of(thing)}: its project's definition: {str(error)[:300]}"
        return
    for path in _lost(thing, known) if known is not None else ():
        yield f"{name_of(thing)}: {path}: its project's definition has no such field"


def fields(objects):
    for thing in objects:
        yield from _fields_of_a_custom_resource(thing)
        validator = _validator(thing["apiVersion"], thing["kind"])
        if validator is None:
            yield f"{name_of(thing)}: no such kind in {thing['apiVersion']}"
            continue
        for error in validator.iter_errors(thing):
            yield f"{name_of(thing)}: {'.'.join(map(str, error.absolute_path))}: {error.message[:300]}"


# ---- Pods ----
class PodTemplate:
    def __init__(self, owner, template, replicas=1, claims=()):
        self.owner = owner
        self.labels = template.get("metadata", {}).get("labels") or {}
        self.spec = template["spec"]
        self.replicas = replicas
        self.claims = {claim["metadata"]["name"] for claim in claims}
        self.init_containers = self.spec.get("initContainers") or []
        self.containers = self.spec["containers"]

    def ports(self):
        return {port["name"]: port["containerPort"] for c in self.containers for port in c.get("ports") or []}


def pod_templates(objects):
    for thing in objects:
        owner, spec = name_of(thing), thing.get("spec") or {}
        if thing["kind"] == "Pod":
            yield PodTemplate(owner, thing)
        elif thing["kind"] in ("StatefulSet", "Job"):
            yield PodTemplate(owner, spec["template"], spec.get("replicas", 1), spec.get("volumeClaimTemplates") or [])
        elif thing["kind"] == "PyTorchJob":
            for replica in spec["pytorchReplicaSpecs"].values():
                yield PodTemplate(owner, replica["template"], replica["replicas"])
        elif thing["kind"] == "JobSet":
            for job in spec["replicatedJobs"]:
                yield PodTemplate(owner, job["template"]["spec"]["template"], job["replicas"])


def selects(selector, labels):
    """A LabelSelector with matchLabels, and matchExpressions of the operator In."""
    wanted = (selector.get("matchLabels") or {}).items()
    return all(labels.get(key) == value for key, value in wanted) and all(
        labels.get(one["key"]) in one["values"] for one in selector.get("matchExpressions") or [])


def _selectors(thing):
    """(place, LabelSelector, names of ports that the selected pods are to have) of an object that selects pods."""
    spec, kind = thing.get("spec") or {}, thing["kind"]
    if kind == "Service":
        yield "selector", {"matchLabels": spec["selector"]}, [port.get("targetPort") for port in spec["ports"]]
    elif kind in ("StatefulSet", "PodDisruptionBudget"):
        yield "selector", spec["selector"], []
    elif kind == "PodMonitor":
        yield "selector", spec["selector"], [endpoint["port"] for endpoint in spec["podMetricsEndpoints"]]
    elif kind == "NetworkPolicy":
        ingress = [port["port"] for rule in spec.get("ingress") or [] for port in rule["ports"]]
        yield "podSelector", spec["podSelector"], ingress
        for rule in spec.get("egress") or []:
            for peer in rule.get("to") or []:
                if "podSelector" in peer:
                    yield "egress", peer["podSelector"], [port["port"] for port in rule["ports"]]
        for rule in spec.get("ingress") or []:
            for peer in rule["from"]:
                if "app.kubernetes.io/name" in (peer.get("podSelector") or {}).get("matchLabels", {}):
                    yield "ingress", peer["podSelector"], []  # others are users' pods


def selectors(objects):
    pods = list(pod_templates(objects))
    for thing in objects:
        for place, selector, ports in _selectors(thing):
            chosen = [pod for pod in pods if selects(selector, pod.labels)]
            if not chosen:
                yield f"{name_of(thing)}: {place} matches no pod: {json.dumps(selector)}"
            for pod in chosen:
                for port in ports:
                    if isinstance(port, str) and port not in pod.ports():
                        yield f"{name_of(thing)}: {pod.owner} has no port {port}"
    for pod in pods:
        for constraint in pod.spec.get("topologySpreadConstraints") or []:
            if not selects(constraint["labelSelector"], pod.labels):
                yield f"{pod.owner}: topologySpreadConstraints do not match its own pods"


def references(objects):
    """Names of Services, volumes, ConfigMaps and ServiceAccounts."""
    named = {(thing["kind"], thing["metadata"]["name"]): thing for thing in objects}
    for thing in objects:
        if thing["kind"] == "StatefulSet":
            service = named.get(("Service", thing["spec"]["serviceName"]))
            labels = thing["spec"]["template"]["metadata"]["labels"]
            if service is None or service["spec"].get("clusterIP") != "None":
                yield f"{name_of(thing)}: no headless Service {thing['spec']['serviceName']}"
            elif not selects({"matchLabels": service["spec"]["selector"]}, labels):
                yield f"{name_of(thing)}: Service {thing['spec']['serviceName']} does not select its pods"
    for pod in pod_templates(objects):
        account = pod.spec.get("serviceAccountName")
        if account and ("ServiceAccount", account) not in named:
            yield f"{pod.owner}: no ServiceAccount {account}"
        if pod.spec.get("automountServiceAccountToken") is not False:
            yield f"{pod.owner}: automountServiceAccountToken is not false"
        volumes = {volume["name"]: volume for volume in pod.spec.get("volumes") or []}
        mounted = {mount["name"] for c in pod.init_containers + pod.containers for mount in c.get("volumeMounts") or []}
        for name in sorted(mounted ^ (set(volumes) | pod.claims)):
            yield f"{pod.owner}: volume {name} is " + ("missing" if name in mounted else "not mounted")
        for volume in volumes.values():
            if "configMap" in volume and ("ConfigMap", volume["configMap"]["name"]) not in named:
                yield f"{pod.owner}: no ConfigMap {volume['configMap']['name']}"


def hardening(objects):
    for pod in pod_templates(objects):
        context = pod.spec.get("securityContext") or {}
        for container in pod.init_containers + pod.containers:
            own = container.get("securityContext") or {}
            merged = {**context, **own}
            wanted = {"runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER,
                      "seccompProfile": {"type": "RuntimeDefault"}, "allowPrivilegeEscalation": False,
                      "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
            for key, value in wanted.items():
                if merged.get(key) != value:
                    yield f"{pod.owner}: container {container['name']}: {key} is {merged.get(key)}, not {value}"
            resources = container.get("resources") or {}
            if {"cpu", "memory"} - set(resources.get("limits") or {}):
                yield f"{pod.owner}: container {container['name']}: no limits of cpu and memory"
            elif resources.get("requests", resources["limits"]) != resources["limits"]:
                yield f"{pod.owner}: container {container['name']}: requests are not the limits, the pod is not Guaranteed"


# ---- Programs ----
class Programs:
    """The built programs: what their help lists, and what the server's own check of its configuration says."""

    def __init__(self, server, ctl):
        self.server = server
        self._flags = {name: set(FLAG.findall(self._run([path, "--help"]).stdout)) for name, path in
                       (("precondor-server", server), ("precondorctl", ctl))}

    @staticmethod
    def _run(command, **arguments):
        return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60, check=False,
                              **arguments)

    def flags(self, program):
        return self._flags[program]

    def refusal(self, flags, environment):
        """Why the server does not take them; None if it does."""
        done = self._run([self.server, *flags, "--check-config"], env=environment)
        return None if done.returncode == 0 else (done.stdout + done.stderr).strip()


def environment_of(container, namespace="default"):
    """Variables as the kubelet expands them: by those before, and what is unknown stays."""
    variables = {}
    for entry in container.get("env") or []:
        reference = (entry.get("valueFrom") or {}).get("fieldRef", {}).get("fieldPath")
        value = namespace if reference == "metadata.namespace" else entry.get("value", "")
        variables[entry["name"]] = VARIABLE.sub(lambda match: variables.get(match.group(1), match.group(0)), value)
    return variables


def is_server(container):
    return "precondor-server" in container["image"] and not container.get("command")


def _port(address):
    return int(address.rsplit(":", 1)[1])


def _server(pod, container, programs):
    flags = container.get("args") or []
    environment = environment_of(container)
    options = {key[len("PRECONDOR_"):].lower().replace("_", "-"): value for key, value in environment.items()
               if key.startswith("PRECONDOR_")}
    options.update(flag[2:].split("=", 1) for flag in flags)  # flags win
    for option in options:
        if f"--{option}" not in programs.flags("precondor-server"):
            yield f"precondor-server has no option {option}"
    for value in [*flags, *environment.values()]:
        if VARIABLE.search(value):
            yield f"{value}: no variable before it has that name"
    refusal = programs.refusal(flags, environment)
    if refusal:
        yield refusal
    ports = pod.ports()
    address, _, socket = options["listen"].partition(",")
    if (_port(address), _port(options["metrics-listen"])) != (ports.get("grpc"), ports.get("metrics")):
        yield f"ports {ports} are not those that it listens on"
    how = "exec" if socket else "grpc"  # the kubelet's own know no TLS
    services = {probe: (container.get(f"{probe}Probe") or {}).get(how) for probe in ("readiness", "liveness")}
    ask = ["precondorctl", f"--server={socket}", "--timeout=5s", "health"]
    expected = ({"readiness": {"command": ask}, "liveness": {"command": [*ask, "liveness"]}} if socket else
                {"readiness": {"port": ports.get("grpc")}, "liveness": {"port": ports.get("grpc"), "service": "liveness"}})
    if services != expected:
        yield f"probes are {services}"
    if ("tls-cert" in options) != bool(socket):
        yield "expected a socket for probes with TLS, and none without"
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    for name in ("tls-cert", "tls-key", "tls-client-ca", "tls-ca", "access-file", "token-file"):
        if name in options and options[name].rpartition("/")[0] not in mounts:
            yield f"no volume for {options[name]}"
    if "data-dir" in options and options["data-dir"] not in mounts:
        yield f"no volume at {options['data-dir']}"
    if not {"data-dir", "etcd-endpoints"} & set(options):
        yield "nothing is kept: neither data-dir nor etcd-endpoints"
    if pod.spec["terminationGracePeriodSeconds"] * 1000 < int(options["drain-deadline-ms"]) + 10000:
        yield "terminationGracePeriodSeconds is less than the drain and 10 s"
    if options.get("backend") == "cpu":
        room = mebibytes(container["resources"]["limits"]["memory"]) - mebibytes(options["memory-limit"])
        if room < 128:
            yield f"the memory limit leaves {room} MiB beside what sessions may reserve"


def servers(objects, programs):
    for pod in pod_templates(objects):
        for container in filter(is_server, pod.containers):
            for finding in _server(pod, container, programs):
                yield f"{pod.owner}: container {container['name']}: {finding}"


def shard_addresses(objects):
    """Coordinators know each pod of the shards, and no other, by an address that a headless Service publishes."""
    expected, known = set(), {}
    for thing in objects:
        if thing["kind"] != "StatefulSet":
            continue
        pod = next(pod_templates([thing]))
        for container in filter(is_server, pod.containers):
            variables = environment_of(container, "some-namespace")
            if "--role=shard" in container["args"]:
                expected |= {f"{thing['metadata']['name']}-{i}.{thing['spec']['serviceName']}.some-namespace.svc:{pod.ports()['grpc']}"
                             for i in range(thing["spec"]["replicas"])}
            else:
                known[name_of(thing)] = set(variables["PRECONDOR_SHARDS"].split(","))
    for owner, addresses in known.items():
        if addresses != expected:
            yield f"{owner}: shards are {sorted(expected)}, the coordinator knows {sorted(addresses)}"


def commands(objects, programs):
    """Calls of precondorctl: its flags, and that the server that they name is a Service."""
    services = {(thing["metadata"]["name"], port["port"]) for thing in objects if thing["kind"] == "Service"
                for port in thing["spec"]["ports"]}
    for thing in objects:
        containers = [c for pod in pod_templates([thing]) for c in pod.init_containers + pod.containers]
        if thing["kind"] == "TrainJob":
            containers.append(thing["spec"]["trainer"])
        for container in containers:
            text = " ".join((container.get("command") or []) + (container.get("args") or []))
            if "precondorctl" not in text:
                continue
            call = text[text.index("precondorctl"):].split("done")[0]
            for flag in FLAG.findall(call):
                if flag not in programs.flags("precondorctl"):
                    yield f"{name_of(thing)}: precondorctl has no flag {flag}"
            for host, port in re.findall(r"--server=([\w-]+):(\d+)", call):
                if (host, int(port)) not in services:
                    yield f"{name_of(thing)}: no Service {host}:{port}"


def findings(objects, programs):
    wrong = list(fields(objects))
    if wrong:
        return wrong  # the other checks rely on the fields
    return [finding for check in (selectors, references, hardening, shard_addresses) for finding in check(objects)] + [
        finding for check in (servers, commands) for finding in check(objects, programs)]
