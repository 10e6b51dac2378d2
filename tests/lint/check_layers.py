#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The one-way rule (docs/develop/architecture.md): who may include, link and call what."""

import posixpath
import re

from lint_support import Case, line_of, main, without_comments

KERNEL_SEAM = ["kernels/base/", "kernels/backend.h", "kernels/device_matrix.h", "kernels/device_plane.h",
               "kernels/region_copy_queue.h", "kernels/operation.h"]
CORE = KERNEL_SEAM + ["kernels/methods/", "server/policy/"]

# Folder or file prefix -> prefixes of ours that it may include besides itself; the first match counts.
OURS = [
    ("kernels/base/", []),
    ("kernels/device_matrix", ["kernels/base/"]),
    ("kernels/device_plane", ["kernels/base/"]),
    ("kernels/region_copy_queue", ["kernels/base/", "kernels/device_plane.h"]),
    ("kernels/backend", ["kernels/base/", "kernels/device_matrix.h", "kernels/operation.h"]),
    ("kernels/primitive_operations", ["kernels/base/"]),
    ("kernels/composite_operations", ["kernels/base/", "kernels/device_matrix.h", "kernels/primitive_operations.h"]),
    ("kernels/operation", ["kernels/composite_operations.h", "kernels/primitive_operations.h"]),
    ("kernels/grouping/", KERNEL_SEAM),
    ("kernels/methods/", KERNEL_SEAM),
    ("kernels/cpu/", KERNEL_SEAM),
    ("kernels/cuda/", KERNEL_SEAM),
    ("proto/wire/", ["kernels/base/", "precondor/v1/"]),
    ("server/policy/", ["kernels/base/"]),
    ("server/core/api/", CORE),
    ("server/core/resources/", CORE + ["server/core/api/"]),
    ("server/core/executors/", ["kernels/base/", "server/core/api/"]),
    ("server/core/layer/", CORE + ["server/core/api/", "server/core/resources/"]),
    ("server/core/shard/", CORE + ["server/core/api/", "server/core/resources/", "server/core/layer/"]),
    ("server/core/coordinator/", CORE + ["server/core/api/", "server/core/resources/"]),
    ("server/core/", []),  # its folders are above
    ("server/net/", ["kernels/base/", "proto/wire/"]),
    ("server/http/", CORE + ["server/core/"]),
    ("server/metrics/", CORE + ["server/core/", "server/http/"]),
    # It stores bytes that the layers above it hand down.
    ("server/store/", ["kernels/base/"]),
    ("server/etcd/", ["kernels/base/", "server/policy/", "server/core/api/coordinator_journal.h", "server/recovery/record_codec.h",
                      "proto/wire/"]),
    ("server/trace/", ["kernels/base/"]),
    ("server/rpc/", CORE + ["server/core/", "server/store/", "server/trace/", "proto/wire/", "precondor/v1/"]),
    ("server/recovery/", CORE + ["server/core/", "server/store/", "server/rpc/convert.h", "proto/wire/", "precondor/v1/"]),
    ("server/app/config", ["kernels/base/", "server/policy/"]),
    ("server/", CORE + ["server/", "kernels/cpu/", "kernels/cuda/", "kernels/grouping/", "proto/wire/", "precondor/v1/"]),
    ("client/cpp/include/", ["kernels/base/", "precondor/"]),
    # A user of the library sees these, and no more.
    ("client/python/", ["kernels/base/", "precondor/", "client/python/"]),
    # It reads what shards left on their disks.
    ("client/cpp/tools/ctl_restore", ["kernels/base/", "proto/wire/", "precondor/", "client/cpp/", "server/recovery/",
                                      "server/store/"]),
    # It reserves and places as a server does.
    ("client/cpp/tools/plan", KERNEL_SEAM + ["kernels/methods/", "client/cpp/", "server/core/resources/", "server/policy/"]),
    # Tools and examples also precondition locally, to compare with.
    ("client/cpp/", KERNEL_SEAM + ["kernels/methods/", "kernels/cpu/cpu_backend.h", "kernels/cuda/cuda_module.h", "proto/wire/",
                                   "precondor/", "client/cpp/"]),
    # Expected values must not come from what is tested.
    ("tests/reference/", ["kernels/base/"]),
    ("tests/unit/kernels/", ["kernels/", "tests/reference/", "tests/support/"]),
    ("tests/conformance/", ["kernels/", "tests/reference/", "tests/support/"]),
    (
        "tests/sim/",
        [
            "kernels/",
            "server/core/",
            "server/policy/",
            "server/recovery/",
            "server/store/",
            "client/cpp/src/contribution.h",
            "client/cpp/src/local_factors.h",
            "client/cpp/src/outbox.h",
            "client/cpp/src/result_state.h",
            "client/cpp/src/step_ledger.h",
            "tests/reference/",
            "tests/support/",
        ],
    ),
    ("tests/", ["kernels/", "server/", "client/", "proto/", "precondor/", "tests/"]),
]
OUR_ROOTS = ("kernels/", "server/", "client/", "proto/", "precondor/", "tests/")

# Third-party headers -> prefixes where they are welcome, with the reason for the message.
THIRD_PARTY = [
    (r"^(cuda|cublas|cusolver|cusparse|curand|device_launch)",
     ["kernels/cuda/", "tests/conformance/device_",
      "tests/bench/cuda_timer", "tests/support/cuda_host/"],
     "only kernels/cuda knows CUDA"),
    (r"^prometheus/", ["server/metrics/", "tests/unit/server/metrics/"], "only server/metrics knows prometheus-cpp"),
    (r"^(microhttpd|curl/)", ["server/http/"], "only server/http knows libmicrohttpd and libcurl"),
    (r"^(grpc|grpcpp)/",
     ["proto/wire/", "server/rpc/", "server/etcd/", "server/app/app", "server/net/", "server/main", "client/cpp/src/", "client/cpp/tools/",
      "tests/unit/proto/", "tests/unit/server/rpc/", "tests/unit/client/", "tests/loopback/", "tests/golden/",
      "tests/support/", "tests/e2e/", "tests/fuzz/", "tests/bench/"],
     "gRPC lives in proto/wire, server/rpc, server/etcd and the client's sources"),
    (r"^google/protobuf/|\.pb\.h$",
     ["proto/wire/", "server/rpc/", "server/etcd/", "server/app/app", "client/cpp/src/", "client/cpp/tools/", "tests/unit/proto/",
      "tests/unit/server/rpc/", "tests/unit/client/", "tests/loopback/", "tests/golden/", "tests/support/",
      "tests/e2e/", "tests/fuzz/", "tests/bench/"],
     "protobuf lives in proto/wire, server/rpc, server/etcd and the client's sources"),
    (r"^yaml-cpp/", ["server/app/config"], "only server/app/config reads YAML"),
    (r"^(cblas|lapacke|openblas|dnnl|oneapi/dnnl)",
     ["kernels/cpu/", "tests/bench/", "tests/e2e/trainer/", "tests/support/cuda_host/"],
     "BLAS and oneDNN live in kernels/cpu"),
    (r"^hwy/", ["kernels/cpu/", "tests/unit/kernels/cpu/"], "vector code lives in kernels/cpu"),
    (r"^(pybind11/|Python\.h)", ["client/python/"], "only client/python knows Python"),
    (r"^openssl/", ["proto/wire/certificates", "server/rpc/", "tests/"], "certificates and tokens are checked in proto/wire/certificates and server/rpc"),
    (r"^isa-l", ["server/store/"], "checksums of stored bytes live in server/store"),
    (r"^absl/synchronization/", ["server/main", "server/app/app", "client/cpp/"],
     "use kernels/base/mutex.h (docs/develop/gotchas.md)"),
]

# Words in C++ code -> where they are welcome.
WORDS = [
    (r"\b(?:std::|secure_)?getenv\s*\(", ["server/app/config", "kernels/base/process_setup", "tests/"], "getenv only in server/app/config"),
    (r"\babsl::Mutex(Lock)?\b", [], "use precondor::Mutex (docs/develop/gotchas.md)"),
    (r"\bstd::(recursive_|shared_)?mutex\b", ["kernels/base/mutex.h"], "use precondor::Mutex"),
    # operator new must throw bad_alloc: the language says so.
    # pybind11's way to raise a Python exception.
    (r"\bthrow\b(?! std::bad_alloc\(\))", ["client/python/src/python_call.cc"], "we throw nothing: return a Status"),
    (r"\b(sleep_for|sleep_until|usleep|SleepFor)\b", ["client/cpp/", "server/", "tests/support/",
      "tests/bench/service_bench"],  # the job itself pauses between its steps
     "tests wait for a condition, not for time"),
]
CORE_WORDS = [
    (r"\bstd::chrono::(system|steady|high_resolution)_clock\b|\babsl::Now\b", "core and policy take a Clock"),
    (r"\bstd::(random_device|rand)\b", "core and policy take a Random"),
]

# Link rule: library -> what its DEPS and PRIVATE_DEPS may name. Others are not restricted.
SEAM_TARGETS = ["precondor::base", "precondor::backend"]
CORE_TARGETS = SEAM_TARGETS + ["precondor::methods", "precondor::policy"]
LINKS = {
    "base": ["absl::*", "Threads::Threads"],
    "backend": ["absl::*", "precondor::base"],
    "methods": ["absl::*"] + SEAM_TARGETS,
    "cpu": ["absl::*", "Threads::Threads", "OpenBLAS::*", "DNNL::*", "*"],
    "policy": ["absl::*", "precondor::base"],
    "core": ["absl::*", "Threads::Threads"] + CORE_TARGETS,
    "store": ["absl::*", "precondor::base", "ISAL::isal"],
    "etcd": ["absl::*", "gRPC::*", "protobuf::*", "precondor::base", "precondor::recovery", "precondor::etcd_proto",
             "precondor::wire"],
    "http": ["absl::*", "CURL::*", "PkgConfig::MICROHTTPD", "nlohmann_json::*", "precondor::core"] + CORE_TARGETS,
    "metrics": ["absl::*", "prometheus-cpp::*", "precondor::core", "precondor::http"] + CORE_TARGETS,
    "net": ["absl::*", "gRPC::*", "precondor::base", "precondor::wire"],
    "wire": ["absl::*", "precondor::base", "precondor::proto", "gRPC::*", "OpenSSL::Crypto", "protobuf::*"],
    "convert": ["absl::*", "precondor::core", "precondor::wire"] + CORE_TARGETS,
    "rpc": ["absl::*", "gRPC::*", "OpenSSL::Crypto", "protobuf::*", "precondor::convert", "precondor::core",
            "precondor::store", "precondor::trace", "precondor::wire", "precondor::proto"] + CORE_TARGETS,
    "trace": ["absl::*", "nlohmann_json::*", "precondor::base"],
    "client_state": ["absl::*", "precondor::client_math", "precondor::proto", "precondor::wire"],
    "recovery": ["absl::*", "precondor::convert", "precondor::core", "precondor::store"] + CORE_TARGETS,
}
# These never go together, even if a list above lets them through.
NEVER = {
    "cpu": ["precondor::cuda", "precondor::methods", "precondor::core", "gRPC::", "protobuf::", "prometheus-cpp::"],
    "cuda": ["precondor::cpu", "precondor::methods", "precondor::core", "gRPC::", "protobuf::", "prometheus-cpp::"],
    "client": ["precondor::core", "precondor::policy", "precondor::rpc", "precondor::app", "precondor::metrics",
               "prometheus-cpp::"],
}

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^">]+)[">]', re.MULTILINE)
LIBRARY = re.compile(r"precondor_library\(\s*(\w+)([^)]*)\)")


def _allowed(path, prefixes):
    return any(path.startswith(p) for p in prefixes)


def _rule(path):
    for prefix, allowed in OURS:
        if path.startswith(prefix):
            return prefix, allowed
    return None, []


def _check_include(path, line, header):
    for pattern, homes, reason in THIRD_PARTY:
        if re.search(pattern, header) and not _allowed(path, homes):
            yield f"{path}:{line}: includes {header}: {reason}"
            return
    if not header.startswith(OUR_ROOTS):
        return
    prefix, allowed = _rule(path)
    if prefix is None:
        yield f"{path}:{line}: {path} is in no layer; name its folder in tests/lint/check_layers.py"
    elif not _allowed(header, allowed + [prefix]):
        yield f"{path}:{line}: includes {header}: {prefix} may include only {', '.join(allowed) or 'itself'}"


def _check_source(path, text):
    for match in INCLUDE.finditer(text):
        yield from _check_include(path, line_of(text, match.start()), match.group(2))
    code = without_comments(text)
    words = [(w, r) for w, homes, r in WORDS if not _allowed(path, homes)]
    if path.startswith(("server/core/", "server/policy/")):
        words += CORE_WORDS
    for word, reason in words:
        for match in re.finditer(word, code):
            yield f"{path}:{line_of(code, match.start())}: {match.group(0).strip('( ')}: {reason}"


def _matches(target, patterns):
    return any(target == p or (p.endswith("*") and target.startswith(p[:-1])) for p in patterns)


def _check_links(path, text):
    text = re.sub(r"#[^\n]*", "", text)
    for match in LIBRARY.finditer(text):
        name, body = match.groups()
        targets = [t for t in body.split() if "::" in t]
        for target in targets:
            refused = name in LINKS and not _matches(target, LINKS[name])
            refused = refused or any(target.startswith(p) for p in NEVER.get(name, []))
            if refused:
                yield f"{path}: precondor_library({name}) must not link {target}"


def _cycles(includes, what):
    """Folders, or pairs of a header and its source, that include each other, directly or through others. `includes`:
    (including, included) -> the first file and line that does it, and the header."""
    further = {}
    for a, b in includes:
        further.setdefault(a, set()).add(b)

    def reach(folder, seen):
        for other in further.get(folder, set()) - seen:
            seen.add(other)
            reach(other, seen)
        return seen

    for (a, b), (path, line, header) in sorted(includes.items()):
        if a in reach(b, set()):
            yield f"{path}:{line}: includes {header}: {b} includes {a}, itself or through others; {what} must have no circle"


def check(tree):
    findings = []
    includes, files = {}, {}
    for path in tree.paths(".h", ".cc", ".cu", ".cuh"):
        findings += _check_source(path, tree.read(path))
        folder = posixpath.dirname(path)
        for match in INCLUDE.finditer(tree.read(path)) if not path.startswith("tests/") else ():
            other = posixpath.dirname(match.group(2))
            if match.group(2).startswith(("kernels/", "server/", "client/", "proto/")) and other != folder:
                includes.setdefault((folder, other), (path, line_of(tree.read(path), match.start()), match.group(2)))
            pair = posixpath.splitext(path)[0], posixpath.splitext(match.group(2))[0]
            if match.group(2).startswith(("kernels/", "server/", "client/", "proto/")) and pair[0] != pair[1]:
                files.setdefault(pair, (path, line_of(tree.read(path), match.start()), match.group(2)))
    findings += [*_cycles(includes, "folders"), *_cycles(files, "files")]
    for path in tree.paths("CMakeLists.txt"):
        findings += _check_links(path, tree.read(path))
    return findings


CASES = [
    Case("allowed", {
        "server/core/shard/shard.cc": '#include <vector>\n#include "server/policy/fallback.h"\n#include "kernels/backend.h"\n',
        "server/metrics/registry.cc": "#include <prometheus/registry.h>\n",
        "kernels/cuda/gemm.cu": "#include <cuda_runtime.h>\n",
        "server/app/config.cc": "const char* v = std::getenv(name);\n",
        "kernels/base/mutex.h": "std::mutex mu_;  // not absl::Mutex\n",
        "server/core/CMakeLists.txt": "precondor_library(core SRCS a.cc DEPS precondor::policy absl::status)\n",
    }, []),
    Case("core includes gRPC", {"server/core/api/a.cc": "#include <grpcpp/grpcpp.h>\n"}, ["a.cc:1: .*gRPC lives in"]),
    Case("core includes protobuf", {"server/core/a.h": "\n#include <google/protobuf/message.h>\n"}, ["a.h:2: .*protobuf"]),
    Case("core includes rpc", {"server/core/shard/a.h": '#include "server/rpc/handler.h"\n'}, ["server/core/shard/ may include only"]),
    Case("policy includes core", {"server/policy/a.h": '#include "server/core/shard/shard.h"\n'}, ["may include only"]),
    Case("store includes core", {"server/store/a.h": '#include "server/core/shard/shard.h"\n'}, ["server/store/ may include only"]),
    Case("store includes etcd", {"server/store/a.h": '#include "server/etcd/etcd_client.h"\n'}, ["server/store/ may include only"]),
    Case("OpenSSL outside rpc", {"server/core/a.cc": "#include <openssl/sha.h>\n"}, ["checked in proto/wire"]),
    Case("ISA-L outside store", {"server/core/a.cc": "#include <isa-l/crc.h>\n"}, ["live in server/store"]),
    Case("base includes backend", {"kernels/base/a.h": '#include "kernels/backend.h"\n'}, ["only itself"]),
    Case("cpu includes cuda", {"kernels/cpu/a.cc": '#include "kernels/cuda/a.h"\n'}, ["kernels/cpu/ may"]),
    Case("cuda includes cpu", {"kernels/cuda/a.cu": '#include "kernels/cpu/a.h"\n'}, ["kernels/cuda/ may"]),
    Case("methods include a backend", {"kernels/methods/a.cc": '#include "kernels/cpu/cpu_backend.h"\n'}, ["may include"]),
    Case("CUDA outside its folder", {"kernels/methods/a.cc": "#include <cublas_v2.h>\n"}, ["knows CUDA"]),
    Case("prometheus outside metrics", {"server/rpc/a.cc": "#include <prometheus/counter.h>\n"}, ["knows prometheus"]),
    Case("generated code in a public header", {"client/cpp/include/precondor/a.h": '#include "precondor/v1/a.pb.h"\n'},
         ["protobuf lives"]),
    Case("Python outside its folder", {"client/cpp/src/a.cc": "#include <pybind11/numpy.h>\n"}, ["knows Python"]),
    Case("the binding behind the client's back", {"client/python/src/a.cc": '#include "client/cpp/src/worker.h"\n'},
         ["client/python/ may include only"]),
    Case("reference uses the code under test", {"tests/reference/a.cc": '#include "kernels/cpu/gemm.h"\n'},
         ["may include only kernels/base/"]),
    Case("getenv in core", {"server/core/a.cc": "auto v = getenv(name);\n"}, ["getenv only"]),
    Case("resources include a layer", {"server/core/resources/a.h": '#include "server/core/layer/b.h"\n'}, ["server/core/resources/ may include only"]),
    Case("a circle of folders", {
        "server/app/a.h": '#include "server/net/b.h"\n',
        "server/app/d.h": '#include "server/rpc/c.h"\n',
        "server/rpc/c.h": '#include "server/core/shard/d.h"\n',
        "kernels/cpu/a.h": '#include "kernels/backend.h"\n',
        "kernels/backend.h": '\n#include "kernels/cpu/a.h"\n'},
         ["kernels/backend.h:2: includes kernels/cpu/a.h: kernels/backend may", "kernels/backend.h:2: .*kernels/cpu includes kernels,", "kernels/cpu/a.h:1: .*kernels includes kernels/cpu,",
          "kernels/backend.h:2: .*files must", "kernels/cpu/a.h:1: .*files must"]),
    Case("a circle of files", {
        "server/core/layer/a.h": '#include "server/core/layer/b.h"\n',
        "server/core/layer/b.cc": '#include "server/core/layer/b.h"\n#include "server/core/layer/a.h"\n',
        "server/core/layer/c.cc": '#include "server/core/layer/a.h"\n'},
         ["a.h:1: .*layer/b includes server/core/layer/a,.*files must", "b.cc:2: .*layer/a includes server/core/layer/b,"]),
    Case("words in comments and strings are fine", {"server/core/a.cc": '// throw getenv(x)\nauto s = "throw";\n'}, []),
    Case("throw", {"kernels/cpu/a.cc": "void F() { throw 1; }\n"}, ["we throw nothing"]),
    Case("an operator new throws bad_alloc", {"tests/unit/a_test.cc": "throw std::bad_alloc();\n"}, []),
    Case("std::mutex", {"server/core/a.h": "std::mutex mu_;\n"}, ["use precondor::Mutex"]),
    Case("wall clock in core", {"server/core/a.cc": "auto t = std::chrono::steady_clock::now();\n"}, ["take a Clock"]),
    Case("sleep in a test", {"tests/unit/a_test.cc": "std::this_thread::sleep_for(x);\n"}, ["wait for a condition"]),
    Case("folder without a layer", {"extra/a.cc": '#include "kernels/backend.h"\n'}, ["is in no layer"]),
    Case("core links gRPC", {"server/core/CMakeLists.txt": "precondor_library(core SRCS a.cc\n  DEPS gRPC::grpc++)\n"},
         ["core\\) must not link gRPC::grpc"]),
    Case("cpu links methods", {"kernels/cpu/CMakeLists.txt": "precondor_library(cpu DEPS precondor::methods)"},
         ["must not link precondor::methods"]),
]

if __name__ == "__main__":
    main(check, CASES)
