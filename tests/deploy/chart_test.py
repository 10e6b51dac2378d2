#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The Helm chart and the example jobs: rendered, held to schemas and to each other, and planted faults found.

With --full the pods run: the rendered templates in podman, the examples' program with two ranks.
"""

import argparse
import copy
import json
import pathlib
import re
import sys
import tarfile
import tempfile
import unittest

import deploy_tools
from deploy_tools import ROOT, run

import manifests

CHART = ROOT / "deploy" / "helm" / "precondor"
RULES = ["files/prometheus/precondor.rules.yaml"]
DASHBOARDS = [f"files/grafana/{path.name}" for path in sorted((ROOT / "deploy" / "grafana").glob("*.json"))]
EXAMPLES = ("job", "jobset", "pytorchjob", "trainjob")
# Options that no deployment sets: files and processes of one host, other devices than all of the pod's.
NOT_DEPLOYED = {"port-file", "metrics-port-file", "exit-with-pid", "advertise", "config", "cuda-device",
                "device-plane-bytes"}
ACTIONS = {"check-config", "print-config", "version", "help", "name"}  # of the command line alone
VALUES = {
    "defaults": {},
    "other names": {"fullnameOverride": "pre", "serviceAccount": {"create": True, "name": "trainers"},
                    "imagePullSecrets": [{"name": "pull"}], "image": {"repository": "registry/precondor-server", "tag": "x"}},
    "etcd": {"coordinator": {"etcd": {"endpoints": ["etcd-0.etcd:2379", "etcd-1.etcd:2381"]}}},
    "gpus": {"shard": {"gpus": 1, "replicas": 3, "memoryLimitMiB": 131072, "cpu": 8}},
    "no volumes": {"shard": {"persistence": {"enabled": False}}, "coordinator": {"persistence": {"enabled": False}}},
    "bare": {"networkPolicy": {"enabled": False}, "podDisruptionBudget": {"enabled": False}},
    "monitoring": {"podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
                   "prometheusRule": {"enabled": True}, "dashboards": {"enabled": True}},
    "options": {"config": {"log_level": "debug", "window_steps": 3, "max_message_bytes": 268435456},
                "shard": {"config": {"snapshot_interval_steps": 1000000, "log_level": "warning"}, "drainSeconds": 60},
                "coordinator": {"config": {"session_snapshot_steps": 500}, "cpu": 1}},
    "tracing": {"tracing": {"endpoint": "http://localhost:4318", "ratio": 0.5}},
    "tls": {"tls": {"secret": "certificates"}},
    "tls and who may what": {"tls": {"secret": "certificates", "accessSecret": "callers"}},
    "tls and tokens": {"tls": {"secret": "certificates", "accessSecret": "callers", "clientCertificates": False}},
    "scheduling": {"shard": {"nodeSelector": {"disk": "ssd"}, "tolerations": [{"key": "train", "operator": "Exists"}],
                             "priorityClassName": "high", "spread": "DoNotSchedule", "podAnnotations": {"a": "b"},
                             "affinity": {"nodeAffinity": {}}, "persistence": {"storageClass": "fast", "size": "1Ti"}}},
}
REFUSED = {
    "unknown value": ({"shard": {"replica": 2}}, "replica"),
    "not a number": ({"shard": {"replicas": "two"}}, "replicas"),
    "no shard": ({"shard": {"replicas": 0}}, "replicas"),
    "option that the server does not have": ({"config": {"log_levle": "debug"}}, "log_levle"),
    "option that the chart sets": ({"shard": {"config": {"data_dir": "/tmp"}}}, "data_dir"),
    "etcd by a path": ({"coordinator": {"etcd": {"endpoints": ["etcd/etcd:2379"]}}}, "endpoints"),
    "fraction of a core": ({"shard": {"cpu": "500m"}}, "cpu"),
    "size without a unit that is known": ({"shard": {"persistence": {"size": "10GB"}}}, "size"),
    "collector without a port": ({"tracing": {"endpoint": "http://localhost"}}, "endpoint"),
    "who may what, in plaintext": ({"tls": {"accessSecret": "callers"}}, "secret"),
    "policy without a client": ({"networkPolicy": {"clients": []}}, "clients"),
}
programs = None  # manifests.Programs


def load(text):
    import yaml
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return [thing for thing in yaml.load_all(text, Loader=loader) if thing]


def template(values, namespace="training"):
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        json.dump(values, file)
        file.flush()
        return load(run("helm", "template", "precondor", CHART, "--namespace", namespace, "--values", file.name).stdout)


def example(name):
    """The objects of an example, after those of the chart that it needs."""
    return template({}, namespace="precondor") + load(run("kubectl", "kustomize", ROOT / "deploy/kustomize/examples" / name).stdout)


def find(objects, kind, name):
    return next(thing for thing in objects if (thing["kind"], thing["metadata"]["name"]) == (kind, name))


def shard(objects):
    return find(objects, "StatefulSet", "precondor-shard")["spec"]["template"]["spec"]


class ChartTest(unittest.TestCase):
    def test_lint_and_package(self):
        run("helm", "lint", "--strict", CHART)
        with tempfile.TemporaryDirectory() as folder:
            run("helm", "package", CHART, "--destination", folder)
            archive, = pathlib.Path(folder).iterdir()
            with tarfile.open(archive) as files:
                names = files.getnames()
                rules, = (files.extractfile(f"precondor/{name}").read() for name in RULES)
        self.assertIn("precondor/values.schema.json", names)
        self.assertEqual(sorted(name for name in names if "/files/" in name), sorted(f"precondor/{name}" for name in RULES + DASHBOARDS))
        self.assertEqual(rules, (ROOT / "deploy/prometheus/precondor.rules.yaml").read_bytes())

    def test_rules_and_dashboards_reach_a_cluster(self):
        objects = template(VALUES["monitoring"])
        rules, = (thing["spec"] for thing in objects if thing["kind"] == "PrometheusRule")
        self.assertEqual([rules], load((ROOT / "deploy/prometheus/precondor.rules.yaml").read_text(encoding="utf-8")))
        self.assertEqual(find(objects, "ConfigMap", "precondor-dashboards")["data"],
                         {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "deploy/grafana").glob("*.json")})

    def test_a_chart_without_its_links_is_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            copied = pathlib.Path(folder) / "precondor"
            run("cp", "-R", CHART, copied)
            for name in ("prometheus", "grafana"):
                (copied / "files" / name).unlink()
                (copied / "files" / name).write_text("../../../" + name, encoding="utf-8")  # a checkout without links
            run("helm", "template", "precondor", copied)
            for name, value in (("prometheus", "prometheusRule"), ("grafana", "dashboards")):
                with self.assertRaisesRegex(AssertionError, f"files/{name} is a link to deploy/{name}"):
                    run("helm", "template", "precondor", copied, f"--set={value}.enabled=true")

    def test_version_is_that_of_the_project(self):
        version = re.search(r"project\(precondor VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")).group(1)
        chart, = load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
        self.assertEqual((chart["version"], chart["appVersion"]), (version, version))

    def test_every_set_of_values_renders_without_a_finding(self):
        for name, values in VALUES.items():
            with self.subTest(name):
                self.assertEqual(manifests.findings(template(values), programs), [])

    def test_values_reach_the_objects(self):
        self.assertNotIn("PersistentVolumeClaim", json.dumps(template(VALUES["no volumes"])))
        self.assertFalse({"NetworkPolicy", "PodDisruptionBudget"} & {thing["kind"] for thing in template(VALUES["bare"])})
        etcd = template(VALUES["etcd"])
        coordinators = find(etcd, "StatefulSet", "precondor-coordinator")["spec"]
        self.assertEqual((coordinators["replicas"], coordinators.get("volumeClaimTemplates")), (2, None))
        for name in ("precondor-coordinator", "precondor-shard"):  # an upgrade replaces no pod of these
            self.assertEqual(find(etcd, "StatefulSet", name)["spec"]["updateStrategy"]["type"], "OnDelete")
        egress = find(etcd, "NetworkPolicy", "precondor-coordinator")["spec"]["egress"]
        self.assertIn({"ports": [{"port": 2379}, {"port": 2381}]}, egress)
        self.assertIn("--plaintext=any", shard(template({}))["containers"][0]["args"])
        for values, ours, others in (("tls", {"--tls-client-ca=/tls/ca.crt"}, {"--access-file=/access/access"}),
                                     ("tls and who may what", {"--tls-client-ca=/tls/ca.crt", "--access-file=/access/access"},
                                      {"--token-file=/access/token"}),
                                     ("tls and tokens", {"--access-file=/access/access", "--token-file=/access/token"},
                                      {"--tls-client-ca=/tls/ca.crt"})):
            objects = template(VALUES[values])
            coordinator = find(objects, "StatefulSet", "precondor-coordinator")["spec"]["template"]["spec"]["containers"][0]
            self.assertLessEqual(ours | {"--tls-cert=/tls/tls.crt", "--tls-ca=/tls/ca.crt"}, set(coordinator["args"]))
            self.assertFalse((others | {"--plaintext=any"}) & set(coordinator["args"]))
        gpu = shard(template(VALUES["gpus"]))["containers"][0]
        self.assertEqual(gpu["resources"]["limits"], {"cpu": 8, "memory": "16384Mi", "nvidia.com/gpu": 1})
        self.assertEqual(gpu["image"], "precondor-server-cuda:0.1.0")
        options = manifests.environment_of(shard(template(VALUES["options"]))["containers"][0])
        self.assertLessEqual({"PRECONDOR_WINDOW_STEPS": "3", "PRECONDOR_SNAPSHOT_INTERVAL_STEPS": "1000000",
                              "PRECONDOR_LOG_LEVEL": "warning", "PRECONDOR_DRAIN_DEADLINE_MS": "60000"}.items(), options.items())

    def test_spans_get_out_of_the_pods(self):
        objects = template(VALUES["tracing"])
        for pod in manifests.pod_templates(objects):
            for container in filter(manifests.is_server, pod.containers):
                options = manifests.environment_of(container)
                self.assertEqual((options["PRECONDOR_TRACE_ENDPOINT"], options["PRECONDOR_TRACE_RATIO"]),
                                 ("http://localhost:4318", "0.5"))
        policies = [thing["spec"]["egress"] for thing in objects if thing["kind"] == "NetworkPolicy"]
        self.assertEqual(len(policies), 2)
        for egress in policies:
            self.assertIn({"ports": [{"port": 4318}]}, egress)

    def test_alerts_choose_what_the_pod_monitor_scrapes(self):
        objects = template({**VALUES["monitoring"], **VALUES["other names"]})
        endpoint, = find(objects, "PodMonitor", "pre")["spec"]["podMetricsEndpoints"]
        job, = [step["replacement"] for step in endpoint["relabelings"] if step["targetLabel"] == "job"]
        rules = json.dumps([thing["spec"] for thing in objects if thing["kind"] == "PrometheusRule"])
        chosen = re.findall(r'job=~\\"(.*?)\\"', rules)
        self.assertTrue(chosen)
        for pattern in chosen:
            self.assertRegex(job, f"^(?:{pattern})$")

    def test_schema_refuses(self):
        for name, (values, word) in REFUSED.items():
            with self.subTest(name), self.assertRaisesRegex(AssertionError, word):
                template(values)

    def test_every_option_of_the_server_is_set_or_left_to_the_user_or_not_for_deployments(self):
        schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
        users = {name.replace("_", "-") for name in schema["$defs"]["config"]["propertyNames"]["enum"]}
        charts = set()
        for values in VALUES.values():
            for pod in manifests.pod_templates(template({key: value for key, value in values.items() if key != "config"})):
                for container in filter(manifests.is_server, pod.containers):
                    charts |= set(re.findall(r"--([a-z-]+)=", " ".join(container.get("args") or [])))
                    charts |= {key[len("PRECONDOR_"):].lower().replace("_", "-")
                               for key in manifests.environment_of(container) if key.startswith("PRECONDOR_")}
        options = {flag[2:] for flag in programs.flags("precondor-server")} - ACTIONS
        self.assertEqual(users | charts | NOT_DEPLOYED, options,
                         "an option is in values.schema.json under config, or a template sets it, or it is in NOT_DEPLOYED")

    def test_the_page_has_the_defaults(self):
        page = (ROOT / "docs" / "operate" / "kubernetes.md").read_text(encoding="utf-8")
        values, = load((CHART / "values.yaml").read_text(encoding="utf-8"))
        rows = re.findall(r"^\| (`.*?) \| (.*?) \|", page.split("\n## Values\n")[1].split("\n## ")[0], re.MULTILINE)
        self.assertGreater(len(rows), 10)
        told = {}
        for names, defaults in rows:
            names, defaults = re.findall(r"`([\w.]+)`", names), defaults.split(", ")
            told.update(zip(names, defaults if len(defaults) > 1 else defaults * len(names), strict=True))
        shown_as = {"False": "false", str([{"podSelector": {}}]): "all pods of the namespace", str([{"namespaceSelector": {}}]): "of the cluster"}
        for name, text in told.items():
            value = values
            for key in name.split("."):
                value = value[key]
            if name.endswith(".persistence"):
                value = value["size"]
            with self.subTest(name):
                shown = shown_as.get(str(value), str(value)) if value or text != "none" else "none"
                self.assertEqual(shown, text)

    def test_every_value_is_in_the_schema(self):
        schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
        values, = load((CHART / "values.yaml").read_text(encoding="utf-8"))

        def compare(place, value, part):
            part = schema["$defs"][part["$ref"].rsplit("/", 1)[1]] if "$ref" in part else part
            if "properties" in part:
                self.assertEqual(set(value), set(part["properties"]) - {"global"}, place)
                for key in value:
                    compare(f"{place}.{key}", value[key], part["properties"][key])

        compare("values", values, schema)


class ExamplesTest(unittest.TestCase):
    def test_examples_have_no_finding_beside_the_chart(self):
        for name in EXAMPLES:
            with self.subTest(name):
                objects = example(name)
                self.assertEqual(manifests.findings(objects, programs), [])
                self.assertIn("wait" if name != "trainjob" else "until precondorctl", json.dumps(objects[-1]))


class PlantedFaultTest(unittest.TestCase):
    """Each fault alone, in objects that are good without it."""

    @classmethod
    def setUpClass(cls):
        cls.good = template(VALUES["monitoring"])
        cls.examples = {name: example(name) for name in EXAMPLES}

    def found(self, plant, objects=None):
        objects = copy.deepcopy(objects or self.good)
        plant(objects)
        return manifests.findings(objects, programs)

    def assert_found(self, text, plant, objects=None):
        self.assertIn(text, "\n".join(self.found(plant, objects)))

    def test_misspelt_fields(self):
        def plant(objects):
            shard(objects)["containers"][0]["imagePulPolicy"] = "Always"
        self.assert_found("imagePulPolicy", plant)
        for kind, place, text in (("PodMonitor", lambda spec: spec["podMetricsEndpoints"][0], "scrapeIntervall"),
                                  ("NetworkPolicy", lambda spec: spec["ingress"][0], "form")):
            def plant_there(objects, kind=kind, place=place, text=text):
                place(next(thing for thing in objects if thing["kind"] == kind)["spec"])[text] = "10s"
            self.assert_found(text, plant_there)
        for name in EXAMPLES:
            text = "trainning" if name == "job" else "spec.trainning: its project's definition has no such field"
            self.assert_found(text, lambda objects: objects[-1]["spec"].update(trainning=1), self.examples[name])
        for field in ("template", "replicatedJobs", "metadata", "labels", "runAsUser", "containers", "drop", "mountPath", "configMap"):
            def plant_in_patch(objects, field=field):
                spec = objects[-1]["spec"]
                spec["runtimePatches"] = json.loads(json.dumps(spec["runtimePatches"]).replace(f'"{field}":', f'"{field}X":'))
            self.assert_found(f"'{field}X'", plant_in_patch, self.examples["trainjob"])

    def test_wrong_types_and_unknown_kinds(self):
        for name, field, value in (("jobset", "replicatedJobs", "one"), ("pytorchjob", "runPolicy", None), ("trainjob", "trainer", "one")):
            def plant(objects, wrong={field: value}):
                objects[-1]["spec"].update(wrong)
            self.assert_found("its project's definition: ", plant, self.examples[name])
        self.assert_found("'one' is not of type", lambda objects: find(
            objects, "StatefulSet", "precondor-shard")["spec"].update(replicas="one"))
        self.assert_found("no such kind", lambda objects: objects[0].update(kind="NetworkPolice"))

    def test_selectors_that_match_nothing(self):
        for kind, name in (("Service", "precondor"), ("Service", "precondor-shard"), ("StatefulSet", "precondor-shard"),
                           ("PodDisruptionBudget", "precondor-shard"), ("PodMonitor", "precondor")):
            def plant(objects, kind=kind, name=name):
                selector = find(objects, kind, name)["spec"]["selector"]
                selector.get("matchLabels", selector)["app.kubernetes.io/name"] = "precondr"
            self.assert_found(f"{kind}/{name}: selector matches no pod", plant)
        self.assert_found("podSelector matches no pod", lambda objects: find(
            objects, "NetworkPolicy", "precondor-shard")["spec"]["podSelector"]["matchLabels"].update(a="b"))
        self.assert_found("topologySpreadConstraints do not match", lambda objects: shard(objects)[
            "topologySpreadConstraints"][0]["labelSelector"]["matchLabels"].update(a="b"))

    def test_names_that_lead_nowhere(self):
        self.assert_found("has no port grcp", lambda objects: find(
            objects, "Service", "precondor")["spec"]["ports"][0].update(targetPort="grcp"))
        self.assert_found("volume dta is missing", lambda objects: shard(
            objects)["containers"][0]["volumeMounts"][0].update(name="dta"))
        self.assert_found("volume data is not mounted", lambda objects: shard(
            objects)["containers"][0]["volumeMounts"][0].update(name="dta"))
        self.assert_found("no ServiceAccount other", lambda objects: shard(objects).update(serviceAccountName="other"))
        self.assert_found("no headless Service", lambda objects: find(
            objects, "StatefulSet", "precondor-shard")["spec"].update(serviceName="precondor"))
        self.assert_found("no ConfigMap", lambda objects: objects.remove(find(
            objects, "ConfigMap", "precondor-example")), self.examples["job"])
        self.assert_found("no Service precondor:7070", lambda objects: objects.remove(find(
            objects, "Service", "precondor")), self.examples["trainjob"])

    def test_flags_and_variables(self):
        container = lambda objects: shard(objects)["containers"][0]  # noqa: E731
        self.assert_found("no option shards-file", lambda objects: container(objects)["args"].append("--shards-file=x"))
        self.assert_found("no option log-levle", lambda objects: container(objects)["env"].append(
            {"name": "PRECONDOR_LOG_LEVLE", "value": "debug"}))
        self.assert_found("expected debug, info, warning, error", lambda objects: container(objects)["env"].append(
            {"name": "PRECONDOR_LOG_LEVEL", "value": "loud"}))
        self.assert_found("precondorctl has no flag --wait", lambda objects: find(
            objects, "Pod", "precondor-test")["spec"]["containers"][0]["args"].append("--wait"))

        def expand_too_early(objects):
            find(objects, "StatefulSet", "precondor-coordinator")["spec"]["template"]["spec"]["containers"][0]["env"].reverse()
        self.assert_found("no variable before it", expand_too_early)
        self.assert_found("the coordinator knows", lambda objects: find(
            objects, "StatefulSet", "precondor-shard")["spec"].update(replicas=3))

    def test_containers_as_root_or_with_rights(self):
        self.assert_found("runAsUser is 0", lambda objects: shard(objects)["securityContext"].update(runAsUser=0))
        self.assert_found("runAsNonRoot is None", lambda objects: shard(objects)["securityContext"].pop("runAsNonRoot"))
        self.assert_found("runAsNonRoot is False", lambda objects: shard(
            objects)["containers"][0]["securityContext"].update(runAsNonRoot=False))
        for key in ("readOnlyRootFilesystem", "allowPrivilegeEscalation", "capabilities"):
            self.assert_found(f"{key} is None", lambda objects, key=key: shard(
                objects)["containers"][0]["securityContext"].pop(key))
        self.assert_found("requests are not the limits", lambda objects: shard(
            objects)["containers"][0]["resources"].update(requests={"cpu": "100m"}))
        self.assert_found("automountServiceAccountToken", lambda objects: shard(
            objects).pop("automountServiceAccountToken"))
        self.assert_found("runAsNonRoot is None", lambda objects: find(objects, "Job", "train-job")["spec"]["template"][
            "spec"].pop("securityContext"), self.examples["job"])

    def test_probes_ports_memory_and_time_to_end(self):
        container = lambda objects: shard(objects)["containers"][0]  # noqa: E731
        self.assert_found("probes are", lambda objects: container(objects)["livenessProbe"]["grpc"].pop("service"))
        self.assert_found("no volume for /tls/tls.crt", lambda objects: container(objects)["args"].append("--tls-cert=/tls/tls.crt"))
        self.assert_found("ports", lambda objects: container(objects)["ports"][0].update(containerPort=7070))
        self.assert_found("no volume at /dat", lambda objects: container(objects)["args"].append("--data-dir=/dat"))
        self.assert_found("leaves 0 MiB", lambda objects: container(objects)["resources"]["limits"].update(memory="1Gi"))
        self.assert_found("terminationGracePeriodSeconds is less", lambda objects: shard(
            objects).update(terminationGracePeriodSeconds=15))


def main():
    global programs
    parser = argparse.ArgumentParser()
    parser.add_argument("--server", required=True)
    parser.add_argument("--ctl", required=True)
    parser.add_argument("--full", action="store_true")
    arguments, rest = parser.parse_known_args()
    deploy_tools.require("helm", "kubectl", "kubernetes-validate")
    programs = manifests.Programs(arguments.server, arguments.ctl)
    unittest.main(argv=[sys.argv[0], *rest])


if __name__ == "__main__":
    main()
