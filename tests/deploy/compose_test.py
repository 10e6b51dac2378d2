#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""deploy/compose against what it refers to: the programs' flags, its own ports and services, the files that it mounts.

Usage: compose_test.py --server PROGRAM [-k PATTERN]

It does not run here, because Docker is missing. images_test.py --full runs its coordinator and shards with podman, and Debian's
Prometheus and Alertmanager with its files.
"""

import argparse
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

from deploy_tools import require

require("docker-compose", "prometheus", "prometheus-alertmanager")

import yaml

import compose

# The port that each other image listens on by default.
MONITORING_PORTS = {"prometheus": "9090", "alertmanager": "9093", "grafana": "3000"}
OURS = ("coordinator", "shard0", "shard1")

server = None


def option(service, name, default=""):
    for argument in service.get("command", []):
        if argument.startswith(f"--{name}="):
            return argument.partition("=")[2]
    return default


def listened_ports(name, service):
    if name in MONITORING_PORTS:
        return {MONITORING_PORTS[name]}
    addresses = option(service, "listen", "0.0.0.0:7070")  # the image's default
    return {address.rpartition(":")[2] for address in addresses.split(",")} | {"9090"}


def bytes_of(text):
    number, unit = re.fullmatch(r"(\d+)([a-zA-Z]*)", str(text)).groups()
    return int(number) << {"": 0, "b": 0, "k": 10, "m": 20, "g": 30, "mib": 20, "gib": 30}[unit.lower()]


def refused_flags(name, service):
    if name in OURS:
        done = subprocess.run([server, "--check-config", *service["command"]], capture_output=True, text=True, check=False, env={})
        if done.returncode != 0:
            yield f"{name}: {done.stderr.strip() or done.stdout.strip()}"
    elif "command" in service:
        program = {"prometheus": "prometheus", "alertmanager": "prometheus-alertmanager"}[name]
        done = subprocess.run([program, "--help"], capture_output=True, text=True, check=False)
        for argument in service["command"]:
            flag = argument.split("=")[0]
            if not re.search(rf"{flag}\b", done.stdout + done.stderr):
                yield f"{name}: {program} has no flag {flag}"


def unsafe_settings(name, service):
    if service.get("cap_drop") != ["ALL"] or not service.get("read_only"):
        yield f"{name}: capabilities or a root that can be written"
    if service.get("security_opt") != ["no-new-privileges:true"]:
        yield f"{name}: can gain privileges"
    if name in OURS and service.get("user") != "10001:10001":
        yield f"{name}: runs as root or as another user: {service.get('user')}"
    for port in service.get("ports", []):
        if not port.startswith("127.0.0.1:"):
            yield f"{name}: port {port} is open to other machines by default"
    if name.startswith("shard") and bytes_of(service["mem_limit"]) < bytes_of(option(service, "memory-limit")) + (2 << 30):
        yield f"{name}: sessions may reserve more than its container has"


def dead_references(services):
    """Ports and services that are named and not there."""
    def check(what, address):
        name, _, port = address.rpartition(":")
        if name not in services or port not in listened_ports(name, services[name]):
            yield f"{what}: nothing listens on {address}"

    for name, service in services.items():
        for published in service.get("ports", []):
            yield from check(f"{name}'s port", f"{name}:{published.rpartition(':')[2].removesuffix('/tcp')}")
        for shard in filter(None, option(service, "shards").split(",")):
            yield from check(f"{name}'s shards", shard)
        if option(service, "advertise"):
            yield from check(f"{name} advertises", option(service, "advertise"))
    files = {}
    for name, service in services.items():
        for mount in service.get("volumes", []):
            source, target = mount.split(":")[:2]
            if source.startswith("/"):
                if not pathlib.Path(source).exists():
                    yield f"{name}: no file {source}"
                files[name, target] = pathlib.Path(source)
    prometheus = yaml.safe_load((files["prometheus", "/etc/prometheus"] / "prometheus.yaml").read_text(encoding="utf-8"))
    targets = [entry for job in prometheus["scrape_configs"] for entry in job["static_configs"]]
    targets += [entry for manager in prometheus["alerting"]["alertmanagers"] for entry in manager["static_configs"]]
    for entry in targets:
        for target in entry["targets"]:
            yield from check("prometheus.yaml", target)
    scraped = {target.split(":")[0] for entry in targets for target in entry["targets"]}
    if not scraped.issuperset(OURS):
        yield f"prometheus.yaml scrapes {scraped} alone"
    for file in files["grafana", "/etc/grafana/provisioning"].glob("datasources/*.yaml"):
        for source in yaml.safe_load(file.read_text(encoding="utf-8"))["datasources"]:
            yield from check(file.name, source["url"].removeprefix("http://"))
    for file in files["grafana", "/etc/grafana/provisioning"].glob("dashboards/*.yaml"):
        for provider in yaml.safe_load(file.read_text(encoding="utf-8"))["providers"]:
            folder = files.get(("grafana", provider["options"]["path"]))
            if folder is None or not list(folder.glob("*.json")):
                yield f"{file.name}: no dashboards in {provider['options']['path']}"


def findings(services):
    for name, service in services.items():
        yield from refused_flags(name, service)
        yield from unsafe_settings(name, service)
    yield from dead_references(services)


class ComposeTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.services = compose.services()

    def test_has_no_findings(self):
        self.assertLessEqual({*OURS, *MONITORING_PORTS}, set(self.services))
        self.assertEqual(list(findings(self.services)), [])

    def test_workers_outside_dial_the_given_host(self):
        services = compose.services(PRECONDOR_HOST="192.0.2.7")
        self.assertEqual([option(services[name], "advertise") for name in ("shard0", "shard1")], ["192.0.2.7:7071", "192.0.2.7:7072"])

    def test_planted_faults_are_found(self):
        text = yaml.safe_dump(self.services)
        for old, new, finding in [
                ("--role=shard", "--roll=shard", "roll"),
                ("--storage.path=", "--storage.pat=", "no flag --storage.pat$"),
                ("--shards=shard0:7070", "--shards=shard9:7070", "nothing listens on shard9:7070"),
                (":7071:7071", ":7071:7079", "nothing listens on shard0:7079"),
                ("deploy/grafana:", "deploy/graphana:", "no file .*graphana"),
                ("user: 10001:10001", "user: '0'", "runs as root"),
                ("read_only: true", "read_only: false", "root that can be written"),
                ("127.0.0.1:3000", "0.0.0.0:3000", "open to other machines"),
                ("mem_limit: 10g", "mem_limit: 8g", "more than its container has")]:
            with self.subTest(new):
                self.assertIn(old, text)
                self.assertRegex("\n".join(findings(yaml.safe_load(text.replace(old, new)))), re.compile(finding, re.MULTILINE))
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write(compose.FILE.read_text(encoding="utf-8").replace("pids_limit:", "pid_limit:"))
            file.flush()
            with self.assertRaisesRegex(AssertionError, "pid_limit"):
                compose.services(file.name)


def main():
    global server
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", type=pathlib.Path, required=True)
    arguments, rest = parser.parse_known_args()
    server = arguments.server.absolute()
    unittest.main(argv=[sys.argv[0], *rest], verbosity=2)


if __name__ == "__main__":
    main()
