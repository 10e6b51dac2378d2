#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every text file: licence line, size limits, no private paths or unknown hosts, no leftovers, tidy whitespace; and
which parts of the product may ask for the time of the wall clock, which may name a method, and which makes channels."""

import re

from lint_support import Case, line_of, main, without_comments

SPDX = "SPDX-License-Identifier: Apache-2.0"
SOURCES = (".cc", ".cu", ".h", ".cuh", ".py", ".sh", ".cmake", "CMakeLists.txt", ".proto", ".ci/run", "pre-commit")
TEXT = SOURCES + (".md", ".yaml", ".yml", ".json", ".txt", ".in")
LIMITS = [((".h", ".cuh"), 300), ((".cc", ".cu", ".py", ".sh"), 700)]
# Markdown: bytes of all pages together, and of a page that a user or an operator reads.
ALL_PAGES_BYTES = 250 * 1024
PAGE_BYTES = 10 * 1024
SHORT_PAGES = ("README.md", "docs/use/", "docs/operate/")
TOP_FOLDERS = {"proto", "server", "client", "kernels", "deploy", "tests", "docs"}

# Hosts that a document or a licence may name.
HOSTS = {"github.com", "arxiv.org", "doi.org", "www.apache.org", "www.w3.org", "creativecommons.org",
         "archive.ics.uci.edu", "buf.build", "localhost", "127.0.0.1",
         "shard0", "prometheus"}  # the last two are services of deploy/compose
ADDRESS = re.compile(r"(?<![\d.])(\d{1,3}(?:\.\d{1,3}){3})(?![\d.])")
OPEN_ADDRESSES = re.compile(r"^(127\.|0\.0\.0\.0$|192\.0\.2\.|255\.)")  # loopback, any, RFC 5737 documentation
PATTERNS = [
    (re.compile(r"(?<![\w.$}/-])/(home|root|work|Users|mnt)/[\w.-]+"), "an absolute path of some machine"),
    (re.compile(r"\b(TODO|FIXME|XXX|HACK)\b"), "do it, or say in the docs that it is missing"),
    (re.compile(r"[ \t]+$", re.MULTILINE), "trailing white space"),
    (re.compile(r"\bissue #?\d+\b|\bworktree\b", re.IGNORECASE), "the repository speaks of the project alone"),
]
# Anything that waits, times or compares does so in monotonic time (kernels/base/clock.h), since a wall clock may be set.
WALL_CLOCK = re.compile(
    r"\babsl::(Now|GetCurrentTimeNanos|ToChronoTime)\(|\b(system_clock|high_resolution_clock|CLOCK_REALTIME)\b"
    r"|\b(gettimeofday|std::time|time\.time|time\.time_ns|datetime\.(now|utcnow|today))\(|\bWall\(\)")
PRODUCT = ("kernels/", "proto/", "server/", "client/")
PROGRAMS = (".cc", ".cu", ".h", ".cuh", ".py")
MAY_ASK_FOR_WALL_CLOCK = {
    "kernels/base/clock.h",  # the clock itself
    "kernels/base/log.cc",  # times of log lines
    "proto/wire/channel.h",  # gRPC turns it into monotonic time at once
    "server/metrics/metrics_observer.cc",  # Unix times, which Prometheus compares with its own
    "server/rpc/server_security.cc",  # what a certificate's validity is compared with
    "server/trace/tracer.cc",  # spans have Unix times
    "server/app/app.cc",  # number of a process' memory
    "server/core/coordinator/coordinator_opening.cc",  # session ids, beyond those of a journal that is lost
    "server/core/shard/fencing_gate.cc",  # bound of fencing tokens, which may be times
    "server/core/coordinator/coordinator.cc",  # fencing tokens, beyond those of a journal that is lost
    "client/cpp/src/client.cc",  # incarnations, beyond those of the processes before
}
# gRPC's own functions make channels that may dial a proxy in place of the address.
CHANNELS = re.compile(r"\bgrpc::(CreateChannel|CreateCustomChannel)\(")
MAKES_CHANNELS = "proto/wire/channel.cc"
# Methods describe themselves (MethodTraits): code elsewhere that names one would have to be changed for the next.
METHODS = "kernels/methods/"
TRAITS = re.compile(r'\bMethodTraits k\w+Traits = \{\s*\.name = "(\w+)"')
DOCSTRING = re.compile(r'""".*?"""', re.DOTALL)
# File or folder -> the method that it may name; None: any.
MAY_NAME_METHODS = {
    METHODS: None,
    "kernels/base/session_spec.h": None,  # the default
    "client/python/precondor/_session.py": None,  # likewise
    "client/python/precondor/torch/_recipe.py": None,  # which methods a model gets by default
    "client/python/precondor/optax.py": None,         # what a tree of JAX gets
    "client/python/precondor/migrate.py": None,       # each library has one of them
    "client/python/precondor/torch/_preconditioner.py": None,  # likewise
    "client/python/examples/": None,  # they choose
    "client/cpp/tools/perf": None,  # they measure what they name
    "client/cpp/tools/ctl_render.cc": "identity",  # a decision
    "server/http/status_pages.cc": "identity",
}
EXEMPT = ("LICENSE", "tests/lint/check_files.py")


def _check_text(path, text):
    for pattern, reason in PATTERNS:
        match = pattern.search(text)
        if match:
            yield f"{path}:{line_of(text, match.start())}: '{match.group(0)}': {reason}"
    for match in re.finditer(r"https?://([\w.-]+)", text):
        if match.group(1) not in HOSTS:
            yield f"{path}:{line_of(text, match.start())}: host {match.group(1)} is not in the list of tests/lint"
    for match in ADDRESS.finditer(text):
        if not OPEN_ADDRESSES.match(match.group(1)):
            yield f"{path}:{line_of(text, match.start())}: address {match.group(1)}"
    if text and not text.endswith("\n"):
        yield f"{path}: no newline at the end"


def _check_clock(path, text):
    if not path.startswith(PRODUCT) or not path.endswith(PROGRAMS) or path in MAY_ASK_FOR_WALL_CLOCK:
        return
    code = text if path.endswith(".py") else without_comments(text)
    for match in WALL_CLOCK.finditer(code):
        yield f"{path}:{line_of(code, match.start())}: '{match.group(0)}': the wall clock; use monotonic time"


def _check_channels(path, text):
    if path.startswith(PRODUCT) and path != MAKES_CHANNELS:
        for match in CHANNELS.finditer(text):
            yield f"{path}:{line_of(text, match.start())}: '{match.group(0)}': use MakeDirectChannel (proto/wire/channel.h)"


def _check_method_names(path, text, methods):
    if not path.startswith(PRODUCT) or not path.endswith(PROGRAMS):
        return
    text = DOCSTRING.sub(lambda match: re.sub(r"[^\n]", " ", match.group(0)), text)
    for match in re.finditer(r"""(["'])(\w+)\1""", text):
        allowed = any(path.startswith(home) and name in (None, match.group(2)) for home, name in MAY_NAME_METHODS.items())
        if match.group(2) in methods and not allowed:
            yield f"{path}:{line_of(text, match.start())}: {match.group(0)}: ask the method's traits (kernels/base/method_traits.h)"


def _check_size(path, text):
    for suffixes, limit in LIMITS:
        lines = text.count("\n")
        if path.endswith(suffixes) and lines > limit:
            yield f"{path}: {lines} lines; the limit is {limit}: split it"


def _check_pages(tree):
    sizes = {path: len(tree.read(path).encode()) for path in tree.paths(".md")}
    for path, size in sizes.items():
        if path.startswith(SHORT_PAGES) and size > PAGE_BYTES:
            yield f"{path}: {size} bytes; the limit of a page is {PAGE_BYTES}: shorten or split it"
    if sum(sizes.values()) > ALL_PAGES_BYTES:
        yield f"docs: {sum(sizes.values())} bytes in {len(sizes)} pages; the limit is {ALL_PAGES_BYTES} in all"


def check(tree):
    findings = []
    for path in tree.paths():
        top = path.split("/")[0]
        if "/" in path and top not in TOP_FOLDERS and not top.startswith("."):
            findings.append(f"{path}: a folder at the top beyond the seven")
    methods = {name for path in tree.paths(".h") if path.startswith(METHODS) for name in TRAITS.findall(tree.read(path))}
    for path in tree.paths(*TEXT):
        if path in EXEMPT:
            continue
        text = tree.read(path)
        head = "\n".join(text.split("\n")[:3])
        if path.endswith(SOURCES) and SPDX not in head:
            findings.append(f"{path}:1: no line '{SPDX}'")
        if path.endswith((".h", ".cuh")) and "\n#pragma once\n" not in text:
            findings.append(f"{path}: no '#pragma once'")
        findings += _check_size(path, text)
        findings += _check_text(path, text)
        findings += _check_clock(path, text)
        findings += _check_channels(path, text)
        findings += _check_method_names(path, text, methods)
    return findings + [*_check_pages(tree)]


_OK = f"// {SPDX}\n"
_ONCE = _OK + "#pragma once\n"
CASES = [
    Case("clean", {"kernels/a.cc": _OK + "// https://arxiv.org/abs/1 version 1.2.3, 127.0.0.1:0, docs/work/x\n",
                   "tests/run.sh": f"#!/bin/sh\n# {SPDX}\n", "README.md": "# Title\n"}, []),
    Case("no licence", {"kernels/a.h": "\n#pragma once\n"}, ["no line 'SPDX"]),
    Case("long header", {"kernels/a.h": _ONCE + "\n" * 299}, ["301 lines; the limit is 300"]),
    Case("longest header", {"kernels/a.h": _ONCE + "\n" * 298}, []),
    Case("long source", {"kernels/a.cc": _OK + "\n" * 700}, ["701 lines; the limit is 700"]),
    Case("included twice", {"kernels/a.h": _OK}, ["no '#pragma once'"]),
    Case("home path", {"README.md": "see /home/ann/x\n"}, ["absolute path"]),
    Case("unknown host", {"README.md": "https://mirror.example.net/x\n"}, ["host mirror.example.net"]),
    Case("private address", {"docs/a.md": "10.1.2.3\n"}, ["address 10.1.2.3"]),
    Case("leftover", {"kernels/a.cc": _OK + "// TODO: later\n"}, ["a.cc:2: 'TODO'"]),
    Case("trailing space", {"docs/a.md": "a \n"}, ["trailing"]),
    Case("no newline", {"docs/a.md": "a"}, ["no newline"]),
    Case("wall clock", {"server/a.cc": _OK + "auto end = absl::Now() + pause;\n",
                        "client/b.py": f"# {SPDX}\nend = time.time() + 5\n",
                        "kernels/c.h": _ONCE + "return clock.Wall();\n"},
         ["b.py:2: 'time.time\\('", "c.h:3: 'Wall", "a.cc:2: 'absl::Now"]),
    Case("clocks that may be asked", {"server/a.cc": _OK + "clock.Now(); MonotonicNow(); // not absl::Now()\n",
                                      "kernels/base/log.cc": _OK + "clock.Wall();\n",
                                      "tests/unit/a.cc": _OK + "absl::Now();\n"}, []),
    Case("channel that may dial a proxy", {"server/a.cc": _OK + "auto channel = grpc::CreateCustomChannel(target, credentials, arguments);\n",
                                           MAKES_CHANNELS: _OK + "return grpc::CreateCustomChannel(target, credentials, arguments);\n"},
         ["a.cc:2: 'grpc::CreateCustomChannel"]),
    Case("list of methods", {"kernels/methods/soap.h": _ONCE + 'constexpr MethodTraits kSoapTraits = {\n    .name = "soap",\n};\n',
                             "client/a.py": f"# {SPDX}\n\"\"\"x = 'soap'\"\"\"\nWHOLE = ('soap', 'muon')\n",
                             "client/cpp/tools/perf_b.cc": _OK + 'Run("soap");\n',
                             "server/c.cc": _OK + 'if (name == "soap" || name == "soaps") Do();\n'},
         ["a.py:3: 'soap'", 'c.cc:2: "soap"']),
    Case("longest pages", {"README.md": "x" * (PAGE_BYTES - 1) + "\n", "docs/develop/a.md": "x" * PAGE_BYTES + "\n"}, []),
    Case("long pages", {"README.md": "x" * PAGE_BYTES + "\n", "docs/operate/a.md": "\u20ac" * 3414 + "\n", "docs/use/b/a.md": "x" * PAGE_BYTES + "\n"},
         ["README.md: 10241 bytes; the limit of a page is 10240", "operate/a.md: 10243 bytes", "use/b/a.md: 10241 bytes"]),
    Case("most bytes in all", {"docs/develop/a.md": "x" * (ALL_PAGES_BYTES - 3) + "\n", "tests/README.md": "x\n"}, []),
    Case("too many bytes in all", {"docs/develop/a.md": "x" * (ALL_PAGES_BYTES - 2) + "\n", "tests/README.md": "x\n"},
         ["docs: 256001 bytes in 2 pages; the limit is 256000 in all"]),
    Case("eighth folder", {"misc/a.md": "a\n"}, ["beyond the seven"]),
]

if __name__ == "__main__":
    main(check, CASES)
