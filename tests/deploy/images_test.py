#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The images of deploy/docker: what is in them, and how they behave when they are run as docs/docker.md says.

Usage: images_test.py --binaries DIR [--full] [-k PATTERN]

  --binaries DIR  a build tree whose programs go into the images in place of those of the Dockerfile's own build
  --full          the tests that take minutes, instead of the short ones: faults, the client's and CUDA's image
"""

import argparse
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest
import zipfile

from deploy_tools import ROOT, require, run, skip_unless_root

require("docker-compose", "hadolint", "podman", "buildah", "debootstrap", "runc", "ip")
skip_unless_root()

import compose
from cluster import wait_for
from containers import BASE_IMAGE, HARDENED, SERVER_IMAGE, Engine, Network, pack_base

DOCKERFILE = ROOT / "deploy/docker/Dockerfile"
MAX_SERVER_BYTES = 256 << 20
MAX_CLIENT_BYTES = 512 << 20
DATA = "/opt/precondor/share/digits.csv"
STEPS = 3000  # of a run that is disturbed: some seconds

engine = None
binaries = None


def setUpModule():
    global engine
    engine = unittest.enterModuleContext(Engine())
    engine.build_server(binaries)


def metadata_findings(image, kind):
    """What is wrong with an image's configuration."""
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

    def check_bill(self, image, expected):
        """The bill is valid, names what is expected, and every Debian package in it has its licence in the image."""
        from cyclonedx.schema import SchemaVersion
        from cyclonedx.validation.json import JsonStrictValidator
        text = in_image(image, "cat", "/opt/precondor/sbom.cdx.json")
        self.assertIsNone(JsonStrictValidator(SchemaVersion.V1_5).validate_str(text))
        components = {component["name"]: component for component in json.loads(text)["components"]}
        self.assertLessEqual(expected, set(components))
        installed = in_image(image, "dpkg-query", "-W", "-f", "${Package} ${Version}\n").splitlines()
        self.assertGreater(len(installed), 50)
        for package in installed:
            self.assertEqual(components[package.split()[0]]["version"], package.split()[1])
        licences = in_image(image, "sh", "-c", "cd /opt/precondor && find -L $PWD /usr/share/doc -name copyright -o -path '*/licen[cs]es/*'")
        licences = {f"file:{path}" for path in licences.split()}
        for name, component in components.items():
            for licence in component.get("licenses", []):
                path = licence["license"]["name"].removeprefix("file:")
                self.assertTrue(any(known.endswith(f"/{path.lstrip('/')}") for known in licences), f"{name}: no {path}")

    def train(self, network, steps, disturb=None):
        """Trains digits with two workers on host `client`; what the run gave. `disturb` runs once a tenth is done."""
        command = ["podman", "run", "--rm", "--pull=never", "--no-healthcheck", "--name=client", *HARDENED,
                   *network.options("client"), f"--volume={self.folder}:/results", "--entrypoint=precondor-digits", SERVER_IMAGE,
                   "--coordinator=coordinator:7070", f"--data={DATA}", "--task=classifier", "--option=rank=16",
                   "--workers=2", f"--steps={steps}",
                   "--json=/results/runs.json"]
        lines = []
        with subprocess.Popen(command, env=engine.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True) as digits:
            for line in digits.stdout:
                lines.append(line)
                if disturb and "training: 10 %" in line:
                    disturb()
                    self.assertIsNone(digits.poll(), "the run ended while it was disturbed")
                    disturb = None
        self.assertEqual(digits.returncode, 0, "".join(lines))
        self.assertFalse(disturb, "".join(lines))
        return json.loads((self.folder / "runs.json").read_text(encoding="utf-8"))


class ShortTest(ImageCase):
    def test_dockerfile_has_no_findings(self):
        run("hadolint", DOCKERFILE)

    def test_server_image(self):
        image = engine.inspect(SERVER_IMAGE)
        self.assertEqual(list(metadata_findings(image, "server")), [])
        self.assertEqual(image["Config"]["Labels"]["org.opencontainers.image.version"], "1.2.3")
        self.assertLess(image["Size"], MAX_SERVER_BYTES)
        self.check_bill(SERVER_IMAGE, {"libgrpc++1.51", "libopenblas0-pthread", "libprotobuf32", "nlohmann-json3-dev", "libc6"})

    def test_image_that_runs_as_root_is_found(self):
        engine.build("localhost/root", self.folder, f"FROM {SERVER_IMAGE}\nUSER 0\n")
        self.assertRegex("\n".join(metadata_findings(engine.inspect("localhost/root"), "server")), "^runs as root")
        engine.podman("run", "--detach", "--pull=never", "--no-healthcheck", "--network=none", "--name=root", "localhost/root",
                      "--role=shard")
        self.assertRegex("\n".join(engine.process_findings("root")), "^runs as root(.|\n)*capabilities(.|\n)*written")

    def test_training_between_namespaces_then_drain(self):
        with Network(["coordinator", "client"]) as network:
            engine.start("coordinator", "--advertise=coordinator:7070", "--memory-limit=256MiB", "--data-dir=/data",
                         options=[*network.options("coordinator"), "--volume=data:/data"])
            self.assertEqual(list(engine.process_findings("coordinator")), [])
            self.assertEqual(engine.inspect("coordinator")["HostConfig"]["Memory"], 512 << 20)
            limit = "cat /sys/fs/cgroup/memory.max 2>/dev/null || cat /sys/fs/cgroup/memory/memory.limit_in_bytes"
            self.assertEqual(engine.podman("exec", "coordinator", "sh", "-c", limit).strip(), str(512 << 20))
            row = self.train(network, steps=100)
            self.assertGreater(row["final_accuracy"], 0.9)
            self.assertEqual(engine.stop("coordinator"), 0)
            self.assertRegex(engine.logs("coordinator"), r"draining(.|\n)*stopped abandoned=0")

    def test_container_over_its_memory_is_ended(self):
        with self.assertRaisesRegex(AssertionError, "status 137"):
            engine.podman("run", "--rm", "--pull=never", "--no-healthcheck", "--memory=32m", "--entrypoint=sh", SERVER_IMAGE,
                          "-c", "head -c 200m /dev/zero | tail -c 199m")


class FullTest(ImageCase):
    def start_service(self, network):
        """The coordinator and the shards of deploy/compose, with less memory."""
        services = compose.services()
        for name in ("shard0", "shard1", "coordinator"):
            flags = [flag for flag in services[name]["command"] if not flag.startswith("--memory-limit=")]
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
                row = self.train(network, STEPS, fault)
                hashes[fault.__name__ if fault else "none"] = row["weights_hash"]
            for name in ("coordinator", "shard0", "shard1"):
                self.assertEqual(engine.stop(name), 0)
        self.assertEqual(len({tuple(value) for value in hashes.values()}), 1, hashes)

    def build_wheel(self):
        run(ROOT / "deploy/build-wheel.sh", "--python", "/usr/bin/python3", "--output", self.folder / "wheels", timeout=1500)
        (wheel,) = (self.folder / "wheels").glob("precondor-*.whl")
        return wheel

    def test_the_wheels_server_on_debian_13(self):
        """Another glibc, and none of the libraries of Debian 12."""
        root, context = self.folder / "root", self.folder / "context"
        context.mkdir()
        run("debootstrap", "--variant=minbase", "trixie", root, timeout=600)
        with zipfile.ZipFile(self.build_wheel()) as wheel:
            wheel.extractall(root / "opt/wheel")
        for program in (root / "opt/wheel/precondor/bin").iterdir():
            program.chmod(0o755)
        pack_base(root, context / "root.tar")
        engine.build("localhost/trixie", context, "FROM scratch\nADD root.tar /\nENV PATH=/opt/wheel/precondor/bin:/usr/bin:/bin\n"
                     "ENTRYPOINT [\"precondor-server\"]\n")
        engine.start("trixie", "--memory-limit=256MiB", image="localhost/trixie", options=["--network=none"])
        self.assertEqual(engine.stop("trixie"), 0)

    def test_client_image(self):
        """From the wheel, without the network: the training loop of docs/python.md from another host than the server's."""
        wheel = self.build_wheel()
        wheels = wheel.parent
        run(ROOT / "build/wheel/tools/bin/pip", "download", "--quiet", "--dest", wheels, wheel)
        engine.build_files("localhost/wheels", wheels, "/wheels/")
        engine.build_target("client", "localhost/precondor:client", BUILD_IMAGE="localhost/wheels")
        image = engine.inspect("localhost/precondor:client")
        self.assertEqual(list(metadata_findings(image, "client")), [])
        self.assertLess(image["Size"], MAX_CLIENT_BYTES)
        self.check_bill("localhost/precondor:client", {"precondor", "numpy", "libgrpc++1.51", "nlohmann-json3-dev", "libc6"})
        loop = re.search(r"```python\n(import sys\n.*?)```", (ROOT / "docs/python.md").read_text(encoding="utf-8"), re.S)[1]
        (self.folder / "loop.py").write_text(loop, encoding="utf-8")
        with Network(["coordinator", "client"]) as network:
            engine.start("coordinator", "--advertise=coordinator:7070", "--memory-limit=256MiB",
                         options=network.options("coordinator"))
            losses = engine.podman(
                "run", "--rm", "--pull=never", *HARDENED, *network.options("client"), f"--volume={self.folder}:/job:ro", "localhost/precondor:client",
                "python3", "/job/loop.py", "coordinator:7070").split()
        self.assertEqual(len(losses), 40)
        self.assertLess(float(losses[-1]), 0.01 * float(losses[0]))
        # As docs/docker.md builds on it, with another change of what is installed than a download of torch.
        snippet = re.search(r"^FROM precondor-client:0.1.0\n.*?(?=^```)", (ROOT / "docs/docker.md").read_text(encoding="utf-8"), re.M | re.S)[0]
        change = "pip install --no-cache-dir torch"
        self.assertIn(change, snippet)
        snippet = snippet.replace("precondor-client:0.1.0", "localhost/precondor:client").replace(change, "pip uninstall --yes numpy")
        engine.build("localhost/torch", self.folder, snippet)
        self.assertEqual(list(metadata_findings(engine.inspect("localhost/torch"), "client")), [])

    def test_cuda_image(self):
        """Its stages and configuration; its base and its programs are those of the CPU's image here."""
        toolkit = self.folder / "toolkit"
        for file in ("usr/local/cuda/bin/nvcc", "usr/include/nccl.h", "usr/lib/x86_64-linux-gnu/libnccl.so"):
            (toolkit / file).parent.mkdir(parents=True)
            (toolkit / file).touch()
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
