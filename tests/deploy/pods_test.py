#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The chart's pods run: podman plays the rendered templates, in network namespaces of their own, with the built programs' image.

The test does what the controllers of Kubernetes do: it names the pods and their volumes, expands variables, and puts
addresses in the place of names. It gives a Service's address to the pod that is ready. Also runs the examples' program with
two ranks.

Usage: pods_test.py --binaries DIR [-k PATTERN]
"""

import argparse
import copy
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

from deploy_tools import ROOT, require, run, skip_unless_root

require("etcd", "helm", "podman", "buildah", "debootstrap", "runc", "ip", "nsenter")
skip_unless_root()

import chart_test
import manifests
from cluster import Server, free_port, wait_for
from containers import SERVER_IMAGE, Engine, Network
from monitoring_program import Program

NAMESPACE = "training"  # that of chart_test.template
NOT_IN_PODMAN = ("ports", "readinessProbe", "livenessProbe")  # those of gRPC; ports need a network of podman's
SHARDS = ["precondor-shard-0", "precondor-shard-1"]
COORDINATORS = ["precondor-coordinator-0", "precondor-coordinator-1"]
COORDINATOR = COORDINATORS[0]
SERVICE = "192.0.2.100"
LAST_STEP = 99
STEPS = 1000  # of a run that is disturbed: some seconds
binaries = None


def pod_specs(objects):
    """Name and spec of each pod that the controllers would make, and of the chart's test."""
    for thing in objects:
        if thing["kind"] == "Pod":
            yield thing["metadata"]["name"], copy.deepcopy(thing["spec"])
        elif thing["kind"] == "StatefulSet":
            for i in range(thing["spec"]["replicas"]):
                name, spec = f"{thing['metadata']['name']}-{i}", copy.deepcopy(thing["spec"]["template"]["spec"])
                for claim in thing["spec"].get("volumeClaimTemplates", []):
                    volume = claim["metadata"]["name"]
                    spec["volumes"].append({"name": volume, "persistentVolumeClaim": {"claimName": f"{volume}-{name}"}})
                yield name, spec


class PodsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.engine = cls.enterClassContext(Engine())
        cls.engine.build_server(binaries)

    def setUp(self):
        self.network = self.enterContext(Network(["etcd", "client"]))
        self.bridge = self.network.prefix + "bridge"
        self.processes = {}  # by pod: one in its network namespace

    def render(self, values):
        repository, tag = SERVER_IMAGE.rsplit(":", 1)
        image = {"repository": repository, "tag": tag, "pullPolicy": "Never"}
        self.specs = dict(pod_specs(chart_test.template({"image": image, **values})))
        self.addresses = {name: f"192.0.2.{i + 11}" for i, name in enumerate(self.specs)}
        self.names = {f"{name}.{name.rsplit('-', 1)[0]}.{NAMESPACE}.svc": at for name, at in self.addresses.items()}
        self.names["=precondor:"] = f"={SERVICE}:"  # after --server
        self.names["etcd:2379"] = f"{self.network.addresses['etcd']}:2379"

    def tearDown(self):
        subprocess.run(["podman", "pod", "rm", "--all", "--force", "--time=0"], env=self.engine.environment,
                       capture_output=True, check=False)

    def play(self, name):
        spec = copy.deepcopy(self.specs[name])
        for container in spec["containers"]:
            for key in NOT_IN_PODMAN:
                container.pop(key, None)
            environment = manifests.environment_of(container, NAMESPACE)
            container["env"] = [{"name": key, "value": value} for key, value in environment.items()]
        text = json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec})
        for host, address in self.names.items():
            text = text.replace(host, address)
        file = self.engine.folder / f"{name}.json"
        file.write_text(text, encoding="utf-8")
        self.engine.podman("kube", "play", "--network=none", file)
        infra = self.engine.podman("pod", "inspect", "--format={{.InfraContainerID}}", name).strip()
        process, port = self.engine.inspect(infra)["State"]["Pid"], f"port{list(self.specs).index(name)}"
        run("ip", "-n", self.bridge, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", process)
        run("ip", "-n", self.bridge, "link", "set", port, "master", "bridge", "up")
        self.processes[name] = process
        self.ip(name, "address", "add", f"{self.addresses[name]}/24", "dev", "eth0")
        self.ip(name, "link", "set", "eth0", "up")

    def ip(self, name, *arguments):
        run("nsenter", f"--net=/proc/{self.processes[name]}/ns/net", "ip", *arguments)

    def give_service(self, name):
        """To a pod. The client forgets who had its address before."""
        self.ip(name, "address", "add", f"{SERVICE}/24", "dev", "eth0")
        run("ip", "-n", self.network.prefix + "client", "neighbour", "flush", "dev", "eth0")

    def container(self, name, which=None):
        return f"{name}-{which or self.specs[name]['containers'][0]['name']}"

    def ctl(self, name, *arguments):
        port = 7071 if name in SHARDS else 7070
        return subprocess.run(["podman", "exec", self.container(name), "precondorctl", f"--server=127.0.0.1:{port}", *arguments],
                              env=self.engine.environment, capture_output=True, text=True, check=False)

    def sessions(self, name):
        return json.loads(self.ctl(name, "sessions", "--json").stdout)

    def await_ready(self, name):
        wait_for(f"{name} to be ready", lambda: self.ctl(name, "health").returncode == 0)

    def leaders(self):
        return [name for name in COORDINATORS if self.ctl(name, "health").returncode == 0]

    def check_hardened(self, name):
        self.assertEqual(list(self.engine.process_findings(self.container(name))), [])
        limit = self.specs[name]["containers"][0]["resources"]["limits"]["memory"]
        self.assertEqual(self.engine.inspect(self.container(name))["HostConfig"]["Memory"], manifests.mebibytes(limit) << 20)

    def test_pods_serve_end_in_order_and_come_back(self):
        self.render({})
        for name in (COORDINATOR, *SHARDS):  # in any order
            self.play(name)
        self.give_service(COORDINATOR)
        for name in (COORDINATOR, *SHARDS):
            self.await_ready(name)
            self.check_hardened(name)

        test = "precondor-test"
        self.play(test)
        for which in ("health", "status"):
            container = self.container(test, which)
            self.engine.podman("wait", container)
            self.assertEqual(self.engine.inspect(container)["State"]["ExitCode"], 0, self.engine.logs(container))

        # As in an update of a StatefulSet with OnDelete: the pod ends, and a new one has its volume.
        updated = SHARDS[0]
        self.engine.podman("pod", "stop", f"--time={self.specs[updated]['terminationGracePeriodSeconds']}", updated)
        self.assertEqual(self.engine.inspect(self.container(updated))["State"]["ExitCode"], 0, self.engine.logs(self.container(updated)))
        self.assertNotEqual(self.ctl(COORDINATOR, "--timeout=1s", "status").returncode, 0)
        self.engine.podman("pod", "rm", updated)
        self.play(updated)
        self.await_ready(updated)
        wait_for("the coordinator to see the new pod", lambda: self.ctl(COORDINATOR, "status").returncode == 0)
        self.assertEqual(self.sessions(updated), self.sessions(SHARDS[1]))

    def test_another_coordinator_on_etcd_leads_when_the_leading_one_is_killed(self):
        self.render({"coordinator": {"etcd": {"endpoints": ["etcd:2379"]}, "config": {"etcd_lease_ms": 2000, "lease_steps": 8}}})
        host, url = self.network.prefix + "etcd", f"http://{self.network.addresses['etcd']}:2379"
        folder = self.enterContext(tempfile.TemporaryDirectory())
        self.enterContext(Program(folder, ["ip", "netns", "exec", host, "etcd", f"--data-dir={folder}/etcd",
                                           f"--listen-client-urls={url}", f"--advertise-client-urls={url}"]))
        for name in (*COORDINATORS, *SHARDS):
            self.play(name)
        for name in SHARDS:
            self.await_ready(name)
        first, = wait_for("a coordinator to lead", self.leaders)
        self.give_service(first)
        other, = set(COORDINATORS) - {first}

        def kill():
            self.assertEqual(self.leaders(), [first])
            self.engine.podman("pod", "kill", first)
            self.assertEqual(wait_for("the other coordinator to lead", self.leaders), [other])
            self.give_service(other)

        options = self.network.options("client")
        rows = [self.engine.train(options, f"{SERVICE}:7070", STEPS, disturb) for disturb in (None, kill)]
        self.assertEqual(rows[0]["weights_hash"], rows[1]["weights_hash"])


class ExampleTest(unittest.TestCase):
    def test_two_ranks_train(self):
        python = [sys.executable, ROOT / "tests/python/torch2.py"]
        environment = {**os.environ, "PYTHONPATH": str(binaries / "client/python")}
        if subprocess.run([*python, "-c", "import torch, precondor"], env=environment, capture_output=True, check=False).returncode:
            self.skipTest("no torch, or no Python package in the build tree")
        program = chart_test.KUSTOMIZE / "examples" / "program" / "train.py"
        with tempfile.TemporaryDirectory() as folder:
            server = Server(binaries, folder, "server", [])
            self.addCleanup(server.close)
            server.start()
            environment.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), WORLD_SIZE="2")
            ranks = [subprocess.Popen([*python, program, server.address, "example"], env={**environment, "RANK": str(rank)}, text=True,
                                      stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for rank in (0, 1)]
            for rank in ranks:
                self.addCleanup(rank.wait)
                self.addCleanup(rank.kill)
            printed = "".join(rank.communicate(timeout=300)[0] for rank in ranks)
        losses = {(int(rank), int(step)): float(loss)
                  for rank, step, loss in re.findall(r"rank (\d) step (\d+) loss ([\d.]+)", printed)}
        for rank in (0, 1):
            self.assertIn((rank, LAST_STEP), losses, printed)
            self.assertLess(losses[rank, LAST_STEP], losses[rank, 0] / 10, printed)


def main():
    global binaries
    parser = argparse.ArgumentParser()
    parser.add_argument("--binaries", required=True)
    parser.add_argument("--full", action="store_true", help=argparse.SUPPRESS)  # CMake's; there is no shorter form
    arguments, rest = parser.parse_known_args()
    binaries = pathlib.Path(arguments.binaries)
    unittest.main(argv=[sys.argv[0], *rest])


if __name__ == "__main__":
    main()
