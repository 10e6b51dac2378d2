# SPDX-License-Identifier: Apache-2.0
"""Images built with buildah and containers run with podman, in a store of their own that goes with the test.

Without a registry: the base images are made by debootstrap, once, and kept outside the checkout. Networks are namespaces
of the test's own; addresses are those of RFC 5737.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import re
import shutil
import subprocess
import tempfile

from deploy_tools import CACHE, ROOT, run

from cluster import digits, wait_for

BASE_IMAGE = "docker.io/library/debian:bookworm-slim"
PYTHON_IMAGE = "localhost/python:3.11"
SERVER_IMAGE = "localhost/precondor:server"
# As docs/operate/docker.md says to run them.
HARDENED = ["--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--user=10001:10001", "--pids-limit=4096",
            "--memory=512m"]
TRAINER = "/trainer/digits_trainer"
DATA = "/data/digits.csv"
FOLDERS = "precondor-containers-"  # how the names of the stores' folders begin


def pack_base(root, archive):
    """Writes a root file system without what Debian's slim image leaves out; licences stay."""
    run("chroot", root, "apt-get", "clean")
    for waste in ("usr/share/man", "usr/share/locale", "usr/share/info", "var/lib/apt/lists"):
        shutil.rmtree(root / waste, ignore_errors=True)
    for file in (root / "usr/share/doc").rglob("*"):
        if file.name != "copyright" and not file.is_dir():
            file.unlink()
    run("tar", "-C", root, "--numeric-owner", "-cf", f"{archive}.part", ".")
    os.rename(f"{archive}.part", archive)


def root_archives(release):
    """Root file systems of a release of Debian as archives: as small as Debian's slim image, and the same with Python."""
    folder = CACHE / "images"
    folder.mkdir(parents=True, exist_ok=True)
    slim, python = (folder / f"{release}-{kind}.tar" for kind in ("slim", "python"))
    with open(folder / "lock", "w", encoding="utf-8") as lock, tempfile.TemporaryDirectory() as root:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (slim.exists() and python.exists()):
            run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", root)  # dpkg waits for the disk after each file
            try:
                run("debootstrap", "--variant=minbase", "--include=ca-certificates", release, root)
                pack_base(pathlib.Path(root), slim)
                run("chroot", root, "apt-get", "update")
                run("chroot", root, "apt-get", "install", "--yes", "--no-install-recommends", "python3", "python3-venv")
                pack_base(pathlib.Path(root), python)
            finally:
                run("umount", "--lazy", root)
    return slim, python


def store_environment(folder):
    """The variables with which podman and buildah use the store in `folder`."""
    return {**os.environ, "BUILDAH_ISOLATION": "chroot", "TMPDIR": str(folder),
            "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"), "CONTAINERS_CONF": str(folder / "containers.conf")}


def remove_store(folder):
    """Ends a store's containers and deletes its folder."""
    subprocess.run(["podman", "rm", "--all", "--force", "--time=0"], env=store_environment(folder), capture_output=True, check=False)
    mounts = [line.split()[1] for line in pathlib.Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()]
    for mount in reversed(mounts):
        if mount == str(folder) or mount.startswith(f"{folder}/"):
            subprocess.run(["umount", "--lazy", mount], capture_output=True, check=False)
    shutil.rmtree(folder)


def make_store():
    """A new folder and its lock, which the kernel releases when this process ends. Removes the stores of killed tests."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "containers.lock", "w", encoding="utf-8") as one_at_a_time:
        fcntl.flock(one_at_a_time, fcntl.LOCK_EX)
        for folder in pathlib.Path(tempfile.gettempdir()).glob(f"{FOLDERS}*"):
            # An error: in use, or a process of it still writes there, and a later run removes it.
            with open(folder / "lock", "w", encoding="utf-8") as lock, contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_store(folder)
        folder = pathlib.Path(tempfile.mkdtemp(prefix=FOLDERS))
        run("mount", "-t", "tmpfs", "-o", "mode=700", "tmpfs", folder)  # buildah waits for the disk after each layer
        lock = open(folder / "lock", "w", encoding="utf-8")
        fcntl.flock(lock, fcntl.LOCK_EX)
    return folder, lock


class Engine:
    """podman and buildah over a store in a temporary folder, in memory: 1 to 3 GB. Closing it removes all that was made."""

    def __init__(self):
        self.folder, self.lock = make_store()
        (self.folder / "storage.conf").write_text(
            f'[storage]\ndriver = "overlay"\ngraphroot = "{self.folder}/graph"\nrunroot = "{self.folder}/run"\n')
        (self.folder / "containers.conf").write_text(
            '[containers]\nnetns = "none"\ndefault_ulimits = ["nofile=20000:20000", "nproc=4096:4096"]\n'
            '[engine]\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\nruntime = "runc"\nlock_type = "file"\n'
            f'tmp_dir = "{self.folder}/tmp"\n')
        self.environment = store_environment(self.folder)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        remove_store(self.folder)
        self.lock.close()

    def podman(self, *arguments):
        return run("podman", *arguments, env=self.environment, timeout=300).stdout

    def inspect(self, name):
        return json.loads(self.podman("inspect", name))[0]

    def build(self, tag, context, file=None, **more):
        """Builds context/Dockerfile, or the text `file`; `more` are options and, in capitals, build arguments."""
        options = []
        for name, value in more.items():
            options.append(f"--build-arg={name}={value}" if name.isupper() else f"--{name}={value}")
        if file is not None:
            path = self.folder / "Dockerfile"
            path.write_text(file)
            options.append(f"--file={path}")
        run("buildah", "bud", "--pull=never", "--format=docker", "--layers", f"--tag={tag}", *options, context,
            env=self.environment, timeout=900)

    def build_bases(self):
        for tag, archive in zip((BASE_IMAGE, PYTHON_IMAGE), root_archives("bookworm")):
            context = self.folder / "base"
            context.mkdir()
            shutil.copy(archive, context / "base.tar")
            self.build(tag, context, "FROM scratch\nADD base.tar /\n")
            shutil.rmtree(context)

    def build_files(self, tag, source, target):
        """BASE_IMAGE with one more folder, as BUILD_IMAGE of deploy/docker/Dockerfile, which would build its content."""
        self.build(tag, source, f"FROM {BASE_IMAGE}\nCOPY . {target}\n")

    def build_target(self, target, tag, **arguments):
        self.build(tag, ROOT, target=target, file=(ROOT / "deploy/docker/Dockerfile").read_text(encoding="utf-8"),
                   PYTHON_IMAGE=PYTHON_IMAGE, VERSION="1.2.3", REVISION="0123abc", **arguments)

    def build_server(self, binaries):
        """SERVER_IMAGE and its bases, with the programs of a build tree."""
        self.build_bases()
        self.binaries = pathlib.Path(binaries).resolve()
        run(ROOT / "deploy/pack-server.sh", "--binaries", binaries, "--tree", self.folder / "tree")
        self.build_files("localhost/programs", self.folder / "tree", "/opt/precondor/")
        self.build_target("server", SERVER_IMAGE, BUILD_IMAGE="localhost/programs")

    def start(self, name, *arguments, image=SERVER_IMAGE, options=(), health_check=False):
        """Starts a hardened container and waits until the server in it is ready."""
        if not health_check:
            options = ("--no-healthcheck", *options)
        self.podman("run", "--detach", "--pull=never", f"--name={name}", *HARDENED, *options, image, *arguments)
        self.await_ready(name)

    def train(self, options, coordinator, steps, disturb=None):
        """Trains digits with two workers, in the container `client` with `options` and the libraries of the image; what the run gave.

        `disturb` runs once a tenth is done.
        """
        results = self.folder / "results"
        results.mkdir(exist_ok=True)
        results.chmod(0o777)
        command = ["podman", "run", "--rm", "--pull=never", "--no-healthcheck", "--name=client", *HARDENED, *options,
                   f"--volume={results}:/results", f"--volume={self.binaries}/tests/e2e/trainer:/trainer:ro",
                   f"--volume={ROOT}/client/python/examples/data:/data:ro", f"--entrypoint={TRAINER}", SERVER_IMAGE,
                   f"--coordinator={coordinator}",
                   f"--data={DATA}", "--task=classifier", "--option=rank=16", "--workers=2", f"--steps={steps}",
                   "--csv=/results/run.csv"]
        lines = []
        with subprocess.Popen(command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True) as training:
            for line in training.stdout:
                lines.append(line)
                if disturb and "training: 10 %" in line:
                    disturb()
                    if training.poll() is not None:
                        raise AssertionError(f"the run ended while it was disturbed: {''.join(lines)}")
                    disturb = None
        if training.returncode != 0 or disturb:
            raise AssertionError(f"digits_trainer: status {training.returncode}\n{''.join(lines)}")
        return digits.read_run(results / "run.csv", "".join(lines))

    def await_ready(self, name):
        def ready():
            state = self.inspect(name)["State"]
            if not state["Running"]:
                raise AssertionError(f"{name} ended with {state['ExitCode']}: {self.logs(name)}")
            return subprocess.run(["podman", "exec", name, "precondorctl", "health"], env=self.environment,
                                  capture_output=True, check=False).returncode == 0
        wait_for(f"{name} to be ready", ready)

    def stop(self, name):
        """SIGTERM; the exit status."""
        self.podman("stop", "--time=60", name)
        return self.inspect(name)["State"]["ExitCode"]

    def process_findings(self, name):
        """Returns the faults of a running container's first process, as the kernel shows it."""
        process = pathlib.Path(f"/proc/{self.inspect(name)['State']['Pid']}")
        status = dict(re.findall(r"^(\w+):\s+(.*)$", (process / "status").read_text(encoding="utf-8"), re.M))
        if {*status["Uid"].split(), *status["Gid"].split()} != {"10001"}:
            yield f"runs as root or as another user: Uid {status['Uid']}, Gid {status['Gid']}"
        if int(status["CapEff"], 16) or int(status["CapBnd"], 16):
            yield f"has capabilities {status['CapEff']}, {status['CapBnd']}"
        if (status["NoNewPrivs"], status["Seccomp"]) != ("1", "2"):
            yield f"can gain privileges, or calls are not filtered: {status['NoNewPrivs']}, {status['Seccomp']}"
        root = next(line.split() for line in (process / "mounts").read_text(encoding="utf-8").splitlines() if line.split()[1] == "/")
        if "ro" not in root[3].split(","):
            yield "its root can be written"

    def logs(self, name):
        done = subprocess.run(["podman", "logs", name], env=self.environment, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr


class Network:
    """Hosts in network namespaces of their own, on one bridge; `names` are host names, in the order of their addresses."""

    def __init__(self, names):
        self.prefix = f"pc{os.getpid()}-"
        self.names = names
        self.addresses = {name: f"192.0.2.{i + 1}" for i, name in enumerate(names)}

    def __enter__(self):
        for left in pathlib.Path("/run/netns").glob("pc*-*"):
            if not pathlib.Path("/proc", re.match(r"pc(\d*)-", left.name)[1]).exists():  # of a test that was killed
                subprocess.run(["ip", "netns", "delete", left.name], capture_output=True, check=False)
        with contextlib.ExitStack() as undo:
            undo.callback(self.__exit__)
            bridge = self.prefix + "bridge"
            run("ip", "netns", "add", bridge)
            run("ip", "-n", bridge, "link", "add", "bridge", "type", "bridge")
            run("ip", "-n", bridge, "link", "set", "bridge", "up")
            for name, address in self.addresses.items():
                host = self.prefix + name
                run("ip", "netns", "add", host)
                run("ip", "-n", bridge, "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", host)
                run("ip", "-n", bridge, "link", "set", name, "master", "bridge", "up")
                run("ip", "-n", host, "address", "add", f"{address}/24", "dev", "eth0")
                for device in ("lo", "eth0"):
                    run("ip", "-n", host, "link", "set", device, "up")
            undo.pop_all()
        return self

    def __exit__(self, *_):
        for name in ["bridge", *self.names]:
            subprocess.run(["ip", "netns", "delete", self.prefix + name], capture_output=True, check=False)

    def options(self, name):
        """podman's, for a container on that host."""
        return [f"--network=ns:/run/netns/{self.prefix}{name}",
                *(f"--add-host={other}:{address}" for other, address in self.addresses.items())]

    def connect(self, name, up):
        run("ip", "-n", self.prefix + "bridge", "link", "set", name, "up" if up else "down")
