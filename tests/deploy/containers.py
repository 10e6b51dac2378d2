# SPDX-License-Identifier: Apache-2.0
"""Images built with buildah and containers run with podman, in a store of their own that goes with the test.

Without a registry: the base images are made by debootstrap, once, and kept outside the checkout. Networks are namespaces
of the test's own; addresses are those of RFC 5737.
"""

import contextlib
import fcntl
import itertools
import json
import os
import pathlib
import select
import shutil
import subprocess
import tempfile
import time

from deploy_tools import CACHE

ROOT = pathlib.Path(__file__).resolve().parents[2]
BASE_IMAGE = "docker.io/library/debian:bookworm-slim"
PYTHON_IMAGE = "localhost/python:3.11"
SERVER_IMAGE = "localhost/precondor:server"
# As docs/docker.md says to run them.
HARDENED = ["--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--user=10001:10001", "--pids-limit=4096",
            "--memory=512m"]
DEADLINE_S = 60.0


def wait_for(what, condition, deadline_s=DEADLINE_S):
    """The first true value of `condition()`."""
    end = time.monotonic() + deadline_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not within {deadline_s:g} s: {what}")
        select.select([], [], [], 0.02)  # lets others run


def run(*command, **more):
    """The finished process, its output as text; an AssertionError with what it said where it failed."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **more)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(map(str, command))}: status {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return done


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


def base_archives():
    """Root file systems of Debian 12 as archives: as small as Debian's slim image, and the same with Python."""
    folder = CACHE / "images"
    folder.mkdir(parents=True, exist_ok=True)
    slim, python = folder / "bookworm-slim.tar", folder / "bookworm-python.tar"
    with open(folder / "lock", "w", encoding="utf-8") as lock, tempfile.TemporaryDirectory() as root:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (slim.exists() and python.exists()):
            run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", root)  # dpkg waits for the disk after each file
            try:
                run("debootstrap", "--variant=minbase", "--include=ca-certificates", "bookworm", root)
                pack_base(pathlib.Path(root), slim)
                run("chroot", root, "apt-get", "update")
                run("chroot", root, "apt-get", "install", "--yes", "--no-install-recommends", "python3", "python3-venv")
                pack_base(pathlib.Path(root), python)
            finally:
                run("umount", "--lazy", root)
    return slim, python


class Engine:
    """podman and buildah over a store in a temporary folder. Closing it removes all that was made."""

    def __init__(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="precondor-containers-"))
        (self.folder / "storage.conf").write_text(
            f'[storage]\ndriver = "overlay"\ngraphroot = "{self.folder}/graph"\nrunroot = "{self.folder}/run"\n')
        (self.folder / "containers.conf").write_text(
            '[containers]\nnetns = "none"\ndefault_ulimits = ["nofile=20000:20000", "nproc=4096:4096"]\n'
            '[engine]\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\nruntime = "runc"\nlock_type = "file"\n'
            f'tmp_dir = "{self.folder}/tmp"\n')
        self.environment = {**os.environ, "BUILDAH_ISOLATION": "chroot", "TMPDIR": str(self.folder),
                            "CONTAINERS_STORAGE_CONF": str(self.folder / "storage.conf"),
                            "CONTAINERS_CONF": str(self.folder / "containers.conf")}
        self.namespaces = itertools.count()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        subprocess.run(["podman", "rm", "--all", "--force", "--time=0"], env=self.environment, capture_output=True, check=False)
        mounts = [line.split()[1] for line in pathlib.Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()]
        for mount in reversed(mounts):
            if mount.startswith(f"{self.folder}/"):
                subprocess.run(["umount", "--lazy", mount], capture_output=True, check=False)
        shutil.rmtree(self.folder)

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
        for tag, archive in zip((BASE_IMAGE, PYTHON_IMAGE), base_archives()):
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
        run(ROOT / "deploy/pack-server.sh", "--binaries", binaries, "--tree", self.folder / "tree")
        self.build_files("localhost/programs", self.folder / "tree", "/opt/precondor/")
        self.build_target("server", SERVER_IMAGE, BUILD_IMAGE="localhost/programs")

    def start(self, name, *arguments, image=SERVER_IMAGE, options=()):
        """Starts a hardened container and waits until the server in it is ready."""
        self.podman("run", "--detach", "--pull=never", "--no-healthcheck", f"--name={name}", *HARDENED, *options, image, *arguments)
        self.await_ready(name)

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
