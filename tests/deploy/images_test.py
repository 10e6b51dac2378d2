#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The images of deploy/docker: what is in them, and how they behave when they are run as docs/operate/docker.md says.

Usage: images_test.py --binaries DIR [--full] [-k PATTERN]

  --binaries DIR  a build tree whose programs go into the images in place of those of the Dockerfile's own build
  --full          the tests that take minutes, instead of the short ones: faults, the client's and CUDA's image
"""

import argparse
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import zipfile

from deploy_tools import ROOT, require, run, skip_unless_root

require("curl", "docker-compose", "prometheus", "prometheus-alertmanager", "hadolint", "podman", "buildah", "debootstrap", "runc", "ip")
skip_unless_root()

import compose
import wheels
from cluster import wait_for
from compose_test import MONITORING_PORTS
from containers import BASE_IMAGE, HARDENED, SERVER_IMAGE, Engine, Network, root_archives

DOCKERFILE = ROOT / "deploy/docker/Dockerfile"
MAX_SERVER_BYTES = 256 << 20
MAX_CLIENT_BYTES = 512 << 20
DEBIANS_PYTHON = "/usr/bin/python3"
# Debian's programs in the place of the images that deploy/compose names, and as the user of those.
MONITORING_FILE = f"""FROM {BASE_IMAGE}
COPY prometheus* /usr/bin/
COPY templates/ /usr/share/prometheus/alertmanager/
COPY --chown=65534:65534 empty/ /prometheus/
COPY --chown=65534:65534 empty/ /alertmanager/
USER 65534:65534
"""
STEPS = 3000  # of a run that is disturbed: some seconds

engine = None
binaries = None


def setUpModule():
    global engine
    engine = unittest.enterModuleContext(Engine())
    engine.build_server(binaries)


def metadata_findings(image, kind):
    """Returns the faults of an image's configuration."""
    config = image["Config"]
    uid = config.get("User", "").split(":")[0]
    if not uid.isdigit() or int(uid) < 10000:
        yield f"runs as root or as a user of the host: User is {config.get('User', '')!r}"
    labels = config.get("Labels") or {}
    for label in ("title", "description", "licenses", "version", "revision"):
        if not labels.get(f"org.opencontainers.image.{label}"):
            yield f"no label {label}"
    if kind != "server":
        return
    if config.get("Entrypoint") != ["precondor-server"]:
        yield f"no exec entrypoint: {config.get('Entrypoint')}"
    if (image.get("Healthcheck") or {}).get("Test") != ["CMD", "precondorctl", "health"]:
        yield "no health check by precondorctl"
    if set(config.get("ExposedPorts", {})) != {"7070/tcp", "9090/tcp"}:
        yield f"ports {config.get('ExposedPorts')}"


def in_image(image, *command):
    return engine.podman("run", "--rm", "--pull=never", "--no-healthcheck", "--network=none", "--entrypoint=", image, *command)


class ImageCase(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.folder.chmod(0o777)
        self.addCleanup(lambda: engine.podman("rm", "--all", "--force", "--time=0", "--volumes"))

    def check_bill(self, image, bill, expected):
        """The bill is valid, names what is expected, and every package in it has its licence in the image."""
        from cyclonedx.schema import SchemaVersion
        from cyclonedx.validation.json import JsonStrictValidator
        text = in_image(image, "sh", "-c", f"cat {bill}")
        self.assertIsNone(JsonStrictValidator(SchemaVersion.V1_5).validate_str(text))
        components = {component["name"]: component for component in json.loads(text)["components"]}
        self.assertLessEqual(expected, set(components))
        licences = in_image(image, "sh", "-c", "find /opt/precondor -path '*/licen[cs]es/*'")
        licences = {f"file:{path}" for path in licences.split()}
        for name, component in components.items():
            for licence in component.get("licenses", []):
                path = licence["license"]["name"].removeprefix("file:")
                self.assertTrue(any(known.endswith(f"/{path.lstrip('/')}") for known in licences), f"{name}: no {path}")


class ShortTest(ImageCase):
    def test_dockerfile_has_no_findings(self):
        run("hadolint", DOCKERFILE)

    def test_server_image(self):
        image = engine.inspect(SERVER_IMAGE)
        self.assertEqual(list(metadata_findings(image, "server")), [])
        self.assertEqual(image["Config"]["Labels"]["org.opencontainers.image.version"], "1.2.3")
        self.assertLess(image["Size"], MAX_SERVER_BYTES)
        self.check_bill(SERVER_IMAGE, "/opt/precondor/sbom.cdx.json",
                        {"libgrpc++1.51", "libopenblas0-pthread", "libprotobuf32", "nlohmann-json3-dev"})

    def test_image_that_runs_as_root_is_found(self):
        engine.build("localhost/root", self.folder, f"FROM {SERVER_IMAGE}\nUSER 0\n")
        self.assertRegex("\n".join(metadata_findings(engine.inspect("localhost/root"), "server")), "^runs as root")
        engine.podman("run", "--detach", "--pull=never", "--no-healthcheck", "--network=none", "--name=root", "localhost/root",
                      "--role=shard")
        self.assertRegex("\n".join(engine.process_findings("root")), "^runs as root(.|\n)*capabilities(.|\n)*written")

    def test_training_between_namespaces_then_drain(self):
        with Network(["coordinator", "client"]) as network:
            engine.start("coordinator", "--advertise=coordinator:7070", "--memory-limit=256MiB", "--data-dir=/data",
                         options=[*network.options("coordinator"), "--volume=data:/data"], health_check=True)
            engine.podman("healthcheck", "run", "coordinator")
            self.assertEqual(list(engine.process_findings("coordinator")), [])
            self.assertEqual(engine.inspect("coordinator")["HostConfig"]["Memory"], 512 << 20)
            limit = "cat /sys/fs/cgroup/memory.max 2>/dev/null || cat /sys/fs/cgroup/memory/memory.limit_in_bytes"
            self.assertEqual(engine.podman("exec", "coordinator", "sh", "-c", limit).strip(), str(512 << 20))
            row = engine.train(network.options("client"), "coordinator:7070", steps=100)
            self.assertGreater(row["curve"][-1][2], 0.9)  # accuracy
            self.assertEqual(engine.stop("coordinator"), 0)
            self.assertRegex(engine.logs("coordinator"), r"draining(.|\n)*stopped abandoned=0")

    def test_container_over_its_memory_is_ended(self):
        with self.assertRaisesRegex(AssertionError, "status 137"):
            engine.podman("run", "--rm", "--pull=never", "--no-healthcheck", "--memory=32m", "--entrypoint=sh", SERVER_IMAGE,
                          "-c", "head -c 200m /dev/zero | tail -c 199m")


class FullTest(ImageCase):
    def start_service(self, network):
        """The servers of deploy/compose, with less memory."""
        for name in ("shard0", "shard1", "coordinator"):
            flags = [flag for flag in compose.services()[name]["command"] if not flag.startswith("--memory-limit=")]
            engine.start(name, *flags, "--memory-limit=256MiB", options=[*network.options(name), f"--volume={name}:/data"])

    def step(self):
        sessions = json.loads(engine.podman("exec", "coordinator", "precondorctl", "sessions", "--json"))["sessions"]
        return sessions[0]["last_step"] if sessions else -1

    def await_standstill(self):
        seen = []

        def still():
            seen.append(self.step())
            return len(seen) > 10 and len(set(seen[-10:])) == 1
        wait_for("the job to stand still", still)

    def await_progress(self):
        before = self.step()
        wait_for("the job to go on", lambda: self.step() > before + 2)

    def test_faults_and_a_rolling_restart_change_no_weight(self):
        def pause():
            engine.podman("kill", "--signal=STOP", "shard0")
            self.await_standstill()
            engine.podman("kill", "--signal=CONT", "shard0")
            self.await_progress()

        def partition():
            network.connect("shard1", False)
            self.await_standstill()
            network.connect("shard1", True)
            self.await_progress()

        def rolling_restart():
            for shard in ("shard0", "shard1"):
                self.assertEqual(engine.stop(shard), 0)
                engine.podman("start", shard)
                engine.await_ready(shard)
                self.await_progress()

        hashes = {}
        with Network(["coordinator", "shard0", "shard1", "client"]) as network:
            self.start_service(network)
            for fault in (None, pause, partition, rolling_restart):
                row = engine.train(network.options("client"), "coordinator:7070", STEPS, fault)
                hashes[fault.__name__ if fault else "none"] = row["weights_hash"]
            for name in ("coordinator", "shard0", "shard1"):
                self.assertEqual(engine.stop(name), 0)
        self.assertEqual(len({tuple(value) for value in hashes.values()}), 1, hashes)

    def test_prometheus_and_alertmanager_beside_the_service(self):
        """Debian's programs with the files and flags of deploy/compose. There is no Grafana to run beside them."""
        programs = {"prometheus": "prometheus", "alertmanager": "prometheus-alertmanager"}
        context = self.folder / "monitoring"
        (context / "empty").mkdir(parents=True)
        for program in programs.values():
            shutil.copy(shutil.which(program), context)
        shutil.copytree("/usr/share/prometheus/alertmanager", context / "templates")
        engine.build("localhost/monitoring", context, MONITORING_FILE)
        services = compose.services()
        servers = ("coordinator", "shard0", "shard1")
        with Network([*servers, *programs]) as network:
            self.start_service(network)
            # It refuses to choose an address outside the private ranges itself.
            services["alertmanager"]["command"].append(f"--cluster.advertise-address={network.addresses['alertmanager']}:9094")
            for name, program in programs.items():
                engine.podman("run", "--detach", "--pull=never", f"--name={name}", "--read-only", "--tmpfs=/tmp", "--cap-drop=ALL",
                              "--security-opt=no-new-privileges", *network.options(name),
                              *(f"--volume={volume}" for volume in services[name]["volumes"]), f"--entrypoint={program}",
                              "localhost/monitoring", *services[name]["command"])

            def ask(name, path):
                url = f"http://{network.addresses[name]}:{MONITORING_PORTS[name]}/api/{path}"
                done = subprocess.run(["ip", "netns", "exec", network.prefix + "prometheus", "curl", "--silent", "--fail", url],
                                      capture_output=True, check=False)
                return json.loads(done.stdout) if done.returncode == 0 else {}

            def prometheus(path):
                return ask("prometheus", f"v1/{path}").get("data", {})

            def up():
                return {series["metric"]["instance"]: series["value"][1] for series in prometheus("query?query=up").get("result", [])}

            def evaluated_rules():
                rules = [rule for group in prometheus("rules").get("groups", []) for rule in group["rules"]]
                return all(rule["health"] == "ok" for rule in rules) and sorted(rule["name"] for rule in rules)

            wait_for("the servers to be up", lambda: up() == {f"{name}:9090": "1" for name in servers})
            text = (ROOT / "deploy/prometheus/precondor.rules.yaml").read_text(encoding="utf-8")
            self.assertEqual(wait_for("all rules", evaluated_rules), sorted(re.findall(r"^ +- (?:alert|record): (\S+)", text, re.M)))
            known = wait_for("Prometheus to know Alertmanager", lambda: prometheus("alertmanagers").get("activeAlertmanagers"))
            self.assertEqual([one["url"].split("/")[2] for one in known], ["alertmanager:9093"])
            status = wait_for("Alertmanager to serve", lambda: ask("alertmanager", "v2/status"))
            self.assertIn("receiver: webhook", status["config"]["original"])

    def check_trains_alone(self, image):
        """Without a network and a compiler the image's Python trains with a server of its own."""
        compilers = "for name in cc c++ gcc g++ clang; do command -v $name; done; true"
        self.assertEqual(in_image(image, "sh", "-c", compilers), "")
        wheels.check_losses(engine.podman(
            "run", "--rm", "--pull=never", "--no-healthcheck", "--network=none", *HARDENED, "--tmpfs=/tmp", f"--volume={ROOT}:/src:ro",
            "--entrypoint=", image, "python3", f"/src/{wheels.LOCAL_TRAINING.relative_to(ROOT)}", f"/src/{wheels.PAGE.relative_to(ROOT)}"))

    def test_the_wheel_on_debian_13(self):
        """Another glibc, none of the libraries of Debian 12, and Debian's Python 3.13."""
        python = wheels.interpreters().get("3.13")
        context = self.folder / "context"
        wheel = wheels.build(python or DEBIANS_PYTHON, context / "wheels")
        with zipfile.ZipFile(wheel) as files:
            files.extractall(context / "opt/wheel")
            has_cuda = "precondor/lib/libprecondor-cuda.so" in files.namelist()  # nvcc was there
        for program in (context / "opt/wheel/precondor/bin").iterdir():
            program.chmod(0o755)
        shutil.copy(root_archives("trixie")[1], context / "root.tar")
        engine.build("localhost/trixie", context, "FROM scratch\nADD root.tar /\nCOPY opt/wheel /opt/wheel\n"
                     "ENV PATH=/opt/wheel/precondor/bin:/usr/bin:/bin\nENTRYPOINT [\"precondor-server\"]\n")
        engine.start("trixie", "--memory-limit=256MiB", image="localhost/trixie", options=["--network=none"])
        self.assertEqual(engine.stop("trixie"), 0)
        if python is None:
            self.skipTest("no Python 3.13 with its headers on this machine; the wheel's server alone has run")
        wheels.download_dependencies(wheel, "3.13")
        (context / "root.tar").unlink()
        engine.build("localhost/trixie-python", context, "FROM localhost/trixie\nCOPY wheels /wheels\nRUN rm -r /opt/wheel "
                     "&& python3 -m venv /opt/precondor && /opt/precondor/bin/pip install --no-index --find-links=/wheels precondor[cuda]\n"
                     "ENV PATH=/opt/precondor/bin:/usr/bin:/bin\n")
        self.check_trains_alone("localhost/trixie-python")
        # CUDA's libraries are there, in packages of Python's; the driver is not, as CUDA itself then says.
        said = in_image("localhost/trixie-python", "sh", "-c", "precondor-server --backend=cuda 2>&1 || echo exit $?")
        self.assertRegex(said, "(?s)driver.*exit 1" if has_cuda else "(?s)no CUDA backend.*exit 1")
        said = in_image("localhost/trixie-python", "sh", "-c", "python3 -c 'import precondor; precondor.cuda_device_id(0)' 2>&1; true")
        self.assertRegex(said, "UnavailableError: .*(driver|no CUDA backend)")

    def test_client_image(self):
        """From the wheel, without the network: the training loop of docs/use/python.md from another host than the server's."""
        wheel = wheels.build(DEBIANS_PYTHON, self.folder / "wheels")
        wheels.download_dependencies(wheel, "3.11")
        engine.build_files("localhost/wheels", wheel.parent, "/wheels/")
        engine.build_target("client", "localhost/precondor:client", BUILD_IMAGE="localhost/wheels")
        image = engine.inspect("localhost/precondor:client")
        self.assertEqual(list(metadata_findings(image, "client")), [])
        self.assertLess(image["Size"], MAX_CLIENT_BYTES)
        self.check_bill("localhost/precondor:client", "/opt/precondor/lib/python3.*/site-packages/precondor-*/sboms/precondor.cdx.json",
                        {"libgrpc++1.51", "nlohmann-json3-dev"})
        self.check_trains_alone("localhost/precondor:client")
        loop = re.search(r"```python\n(import sys\n.*?)```", wheels.PAGE.read_text(encoding="utf-8"), re.S)[1]
        (self.folder / "loop.py").write_text(loop, encoding="utf-8")
        with Network(["coordinator", "client"]) as network:
            engine.start("coordinator", "--advertise=coordinator:7070", "--memory-limit=256MiB",
                         options=network.options("coordinator"))
            wheels.check_losses(engine.podman(
                "run", "--rm", "--pull=never", *HARDENED, *network.options("client"), f"--volume={self.folder}:/job:ro", "localhost/precondor:client",
                "python3", "/job/loop.py", "coordinator:7070"))
        # As docs/operate/docker.md builds on it, with another change of what is installed than a download of torch.
        snippet = re.search(r"^FROM precondor-client:0.1.0\n.*?(?=^```)", (ROOT / "docs/operate/docker.md").read_text(encoding="utf-8"), re.M | re.S)[0]
        change = "pip install --no-cache-dir torch"
        self.assertIn(change, snippet)
        snippet = snippet.replace("precondor-client:0.1.0", "localhost/precondor:client").replace(change, "pip uninstall --yes numpy")
        engine.build("localhost/torch", self.folder, snippet)
        self.assertEqual(list(metadata_findings(engine.inspect("localhost/torch"), "client")), [])

    def test_cuda_image(self):
        """Its stages and configuration; its base and its programs are those of the CPU's image here."""
        toolkit = self.folder / "toolkit"
        (toolkit / "usr/local/cuda/bin").mkdir(parents=True)
        (toolkit / "usr/local/cuda/bin/nvcc").touch()
        engine.build_files("localhost/toolkit", toolkit, "/")
        engine.build_target("server-cuda", "localhost/precondor:cuda", CUDA_IMAGE=BASE_IMAGE, CUDA_DEVEL_IMAGE="localhost/toolkit",
                            BUILD_IMAGE="localhost/programs")
        self.assertEqual(list(metadata_findings(engine.inspect("localhost/precondor:cuda"), "server")), [])
        engine.start("cuda", "--role=shard", "--memory-limit=256MiB", image="localhost/precondor:cuda", options=["--network=none"])
        self.assertEqual(list(engine.process_findings("cuda")), [])
        self.assertEqual(engine.stop("cuda"), 0)


def main():
    global binaries
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binaries", type=pathlib.Path, required=True)
    parser.add_argument("--full", action="store_true")
    arguments, rest = parser.parse_known_args()
    binaries = arguments.binaries.absolute()
    unittest.main(argv=[sys.argv[0], "FullTest" if arguments.full else "ShortTest", *rest], verbosity=2)


if __name__ == "__main__":
    main()
