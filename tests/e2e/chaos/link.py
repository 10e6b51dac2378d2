#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A network between two namespaces that loses, delays and reorders packets as it is told.

The servers are in the network namespace of the caller, which must be one of its own (`enter_own_network`); what
`Link.prefix` starts is in another. Between the two goes one process, this file's main: it has a TUN device in each and
carries every packet from one to the other.

Usage: link.py SEED SERVERS    serves until standard input ends; used by Link
"""

import collections
import ctypes
import dataclasses
import errno
import fcntl
import heapq
import json
import os
import pathlib
import random
import selectors
import shutil
import struct
import subprocess
import sys
import time

DEVICE = "link0"
WORKERS_ADDRESS = "192.0.2.1"
DIRECTIONS = ("to_servers", "to_workers")
CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
TCP, SYN, ACK = 6, 0x02, 0x10


def server_address(i):
    return f"198.51.100.{i + 1}"


@dataclasses.dataclass(frozen=True)
class Fault:
    """The treatment of the packets of one direction."""

    loss: float = 0.0      # probability that one is lost
    delay_s: float = 0.0
    jitter_s: float = 0.0  # each is delayed by delay_s and up to as much more or less, uniformly; they overtake each other


@dataclasses.dataclass
class Counters:
    """Counts of one direction, since the link's start."""

    bytes: int = 0       # that came, with IP and TCP headers
    connects: int = 0    # of the packets, first ones of a TCP connection
    dropped: int = 0
    delivered: int = 0
    delay_s: float = 0   # of all that were delivered, in sum
    reordered: int = 0   # delivered after one that had come later


class Link:
    """The other end of a link's process. Use as a context manager; `servers` is the number of server addresses."""

    def __init__(self, seed, servers):
        self.process = subprocess.Popen([sys.executable, "-B", __file__, str(seed), str(servers)],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if not self.process.stdout.readline():
            self.close()
            raise OSError(f"the link's process ended with {self.process.returncode} before it served")
        # A command that executes what follows on the workers' side.
        self.prefix = ["nsenter", f"--net=/proc/{self.process.pid}/ns/net"]

    def set(self, to_servers=Fault(), to_workers=Fault()):
        """From now on; packets that are under way arrive as planned."""
        self._call({"to_servers": dataclasses.asdict(to_servers), "to_workers": dataclasses.asdict(to_workers)})

    def counters(self):
        """Counters by direction."""
        return {direction: Counters(**values) for direction, values in self._call({}).items()}

    def retransmits(self):
        """TCP segments that were sent again so far, by the direction that they were sent in."""
        return {direction: _retransmits(pid)
                for direction, pid in (("to_servers", self.process.pid), ("to_workers", "self"))}

    def _call(self, message):
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def _retransmits(pid):
    names, values = [line.split() for line in pathlib.Path(f"/proc/{pid}/net/snmp").read_text().splitlines()
                     if line.startswith("Tcp:")]
    return int(values[names.index("RetransSegs")])


def enter_own_network(arguments):
    """Starts this program again in a network namespace of its own; what forbids it, or None in that namespace.

    Without root it takes a user namespace too.
    """
    if os.environ.get("CHAOS_OWN_NETWORK") == "1":
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        return None
    for program in ("ip", "nsenter", "unshare"):
        if shutil.which(program) is None:
            return f"no {program} on this machine: deploy/install.sh --test installs it"
    unshare = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--net", "--user", "--map-root-user"]
    tried = subprocess.run([*unshare, "true"], check=False, capture_output=True, text=True)
    if tried.returncode != 0:
        return f"no network namespace of our own: {tried.stderr.strip()}"
    os.execvpe(unshare[0], [*unshare, sys.executable, *arguments], {**os.environ, "CHAOS_OWN_NETWORK": "1"})
    return None  # not reached


def why_no_link():
    """Returns the reason why a Link is impossible here, or None."""
    try:
        os.close(_open_tun("probe0"))
    except OSError as error:
        return f"no TUN device: {error}"
    return None


# --- the link's process ----------------------------------------------------------------------------------------------
def _open_tun(name):
    """A TUN device in the namespace of the caller, which it stays in wherever the caller goes."""
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    except OSError:
        os.close(tun)
        raise
    return tun


def _make_end(addresses, route):
    tun = _open_tun(DEVICE)
    for address in addresses:
        subprocess.run(["ip", "address", "add", f"{address}/32", "dev", DEVICE], check=True)
    for device in ("lo", DEVICE):
        subprocess.run(["ip", "link", "set", device, "up"], check=True)
    # Long enough for all that the workers have under way: what is lost is lost by us.
    subprocess.run(["ip", "link", "set", DEVICE, "txqueuelen", "10000"], check=True)
    subprocess.run(["ip", "route", "add", route, "dev", DEVICE], check=True)
    return tun


def _is_connect(packet):
    header = (packet[0] & 15) * 4
    return packet[9] == TCP and packet[header + 13] & (SYN | ACK) == SYN


class Forwarder:
    """Carries packets: what comes out of one device goes into the other, if and when its direction's fault lets it."""

    def __init__(self, seed, servers, workers):
        self.random = random.Random(seed)
        self.source = {"to_servers": workers, "to_workers": servers}
        self.target = {"to_servers": servers, "to_workers": workers}
        self.faults = {direction: Fault() for direction in DIRECTIONS}
        self.counters = {direction: Counters() for direction in DIRECTIONS}
        self.held = []  # a heap of (due, serial, came, direction, packet)
        self.serial = 0
        self.last_delivered = collections.Counter()  # serial by direction

    def take(self, direction):
        fault, counters = self.faults[direction], self.counters[direction]
        while True:
            try:
                packet = os.read(self.source[direction], 1 << 16)
            except BlockingIOError:
                return
            if packet[0] >> 4 != 4:
                continue  # IPv6 looking for neighbours
            counters.bytes += len(packet)
            counters.connects += _is_connect(packet)
            if self.random.random() < fault.loss:
                counters.dropped += 1
                continue
            now = time.monotonic()
            due = now + max(0.0, fault.delay_s + fault.jitter_s * self.random.uniform(-1, 1))
            self.serial += 1
            heapq.heappush(self.held, (due, self.serial, now, direction, packet))

    def deliver(self):
        """Returns the packets that are due, and the seconds until more are; None when nothing is held."""
        while self.held:
            now = time.monotonic()
            due, serial, came, direction, packet = self.held[0]
            if due > now:
                return due - now
            heapq.heappop(self.held)
            counters = self.counters[direction]
            counters.delivered += 1
            counters.delay_s += now - came
            counters.reordered += serial < self.last_delivered[direction]
            self.last_delivered[direction] = max(serial, self.last_delivered[direction])
            try:
                os.write(self.target[direction], packet)
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
        return None

    def obey(self, line):
        for direction, fault in json.loads(line).items():
            self.faults[direction] = Fault(**fault)
        print(json.dumps({direction: dataclasses.asdict(counters) for direction, counters in self.counters.items()}),
              flush=True)


def serve(seed, servers):
    servers_end = _make_end([server_address(i) for i in range(servers)], WORKERS_ADDRESS)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare: " + os.strerror(ctypes.get_errno()))
    workers_end = _make_end([WORKERS_ADDRESS], server_address(-1) + "/24")
    forwarder = Forwarder(seed, servers_end, workers_end)
    print("serving", flush=True)
    with selectors.DefaultSelector() as selector:
        for direction in DIRECTIONS:
            selector.register(forwarder.source[direction], selectors.EVENT_READ, direction)
        selector.register(sys.stdin, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select(forwarder.deliver()):
                if key.data:
                    forwarder.take(key.data)
                    continue
                line = sys.stdin.readline()
                if not line:
                    return
                forwarder.obey(line)


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))
