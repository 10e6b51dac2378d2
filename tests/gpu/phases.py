# SPDX-License-Identifier: Apache-2.0
"""The phases of tests/gpu.sh as a table: what each checks, in which order, and how long each part can take.

A phase ends at its own limit, whatever its checks would still take: a borrowed machine has a quarter of an hour in all, and
a command there can be given 480 s. A call therefore takes at most CALL_SECONDS, with the time until the first phase.
"""

import dataclasses

IMITATED = "imitation: there is no device to look into"


@dataclasses.dataclass(frozen=True)
class Check:
    """A GoogleTest program, with the tests that it runs on a device and on the host's imitation of one."""
    name: str
    program: str  # without the suffix of the backend, _cuda or _cuda_on_host
    seconds: float
    tests: str = "*"
    host_tests: str | None = "*"  # None: the imitation has no such program
    tool: str = ""  # of compute-sanitizer


@dataclasses.dataclass(frozen=True)
class Script:
    """A Python program of the tree that writes rows."""
    name: str
    path: str  # in tests/
    seconds: float
    words: tuple = ()


@dataclasses.dataclass(frozen=True)
class Phase:
    name: str
    seconds: float
    checks: tuple = ()
    jobs: int = 1  # checks at a time
    cases: bool = False  # whether the cases of cuda_bench are checks, before the scripts
    scripts: tuple = ()


def _suite(program, seconds, **more):
    return Check(program.removesuffix("_test").removesuffix("_conformance"), program, seconds, **more)


def _under(tool, program, tests, seconds=100):
    return Check(f"{tool}/{program.removesuffix('_test').removesuffix('_conformance')}", program, seconds, tests=tests,
                 host_tests=None, tool=tool)


# Every kernel of ours at least once, and the libraries' kernels for a short time only.
_OPERATIONS = "*Element*:*Reductions*:*Packed*:*Gather*:*FillNormal*:*InPlace*"
_TILES = "*ByTheDefinition*:*FusedIs*:*ExpandsToTheBit*:*ShermanMorrison*"

SMOKE = Phase("smoke", 60, (
    _suite("backend_conformance_test", 60, tests=_OPERATIONS, host_tests=_OPERATIONS),
    _suite("symmetric_conformance_test", 60, tests=_TILES, host_tests=_TILES),
    _suite("rounded_products_conformance_test", 60),
    _suite("scaled_precondition_conformance_test", 60),
    _suite("grouped_conformance_test", 60, tests="Kinds/*:MethodsInCompany.*"),
), jobs=5)
# The peers of our steps, by the words that the names of our steps begin with; the first that fits counts.
PEERS = {"muon_llama_1b": "muon_llama_1b", "muon": "muon", "low_rank": "mkor", "dense": "mkor", "soap": "soap"}
STEPS = Phase("steps", 150, cases=True, scripts=tuple(
    Script(f"step/torch/{kind}", "bench/step_peers.py", 60, (kind,)) for kind in dict.fromkeys(PEERS.values())))
SERVER = Phase("server", 150, scripts=(Script("muon", "gpu/server_step.py", 120, ("muon",)),
                                       Script("statistics", "gpu/server_step.py", 60, ("statistics",))))
PROFILE = Phase("profile", 60)
TRAIN = Phase("train", 240, scripts=(Script("gpt2", "gpu/train.py", 235, ("--seconds=180",)),))
CONFORMANCE = Phase("conformance", 200, (
    _suite("device_memory_test", 120),
    _suite("backend_conformance_test", 200, host_tests=_OPERATIONS),
    _suite("symmetric_conformance_test", 200, host_tests=_TILES),
    _suite("grouped_conformance_test", 200, host_tests="MethodsInCompany.*"),
    _suite("low_rank_conformance_test", 200, host_tests="FullRank/*/3"),
    _suite("orthogonal_iteration_conformance_test", 200),
    _suite("method_conformance_test", 200, host_tests="*.IsTheIdentity*:*.KeepsItsScaling*:*.RefusesBadInput*"),
    _suite("gradient_method_conformance_test", 200, host_tests="*.CountsTheGradients*"),
), jobs=3)  # more processes would wait for each other's turns on the device
SANITIZE = Phase("sanitize", 200, (
    _under("memcheck", "symmetric_conformance_test", "*", 200),
    _under("memcheck", "rounded_products_conformance_test", "*", 200),
    _under("memcheck", "backend_conformance_test", "-*GivesTheSameBits*:*ConditionOneE*", 200),
    _under("racecheck", "symmetric_conformance_test", _TILES, 200),
    _under("racecheck", "backend_conformance_test", _OPERATIONS, 200),
    _under("synccheck", "symmetric_conformance_test", _TILES),
    _under("synccheck", "backend_conformance_test", _OPERATIONS),
    _under("initcheck", "symmetric_conformance_test", _TILES),
    _under("initcheck", "device_memory_test", "DeviceCopiesTest.*-*ThePoolServes*"),
), jobs=4)

# In the order in which a call runs them: what is worth most comes first.
PHASES = {phase.name: phase for phase in (SMOKE, STEPS, SERVER, PROFILE, TRAIN, CONFORMANCE, SANITIZE)}
LEASE = ("smoke", "steps", "server", "profile")  # one call; training, the suites and the sanitizers need another
CALL_SECONDS = 450
START_SECONDS = 30  # until the first phase: the archive is unpacked, and each program starts once
# Shares of a phase's limit: from the first on no check begins or goes on; at the second its process is told to end, and at
# the limit it is killed, as where it waits for a program that the driver holds.
OWN_SHARE, TERM_SHARE = 0.95, 0.97


def choose(text, limit=None):
    """The phases of a list such as "smoke,steps", or of "lease", with the seconds of each: `limit`, or its own. Raises ValueError,
    which says what was expected, for an unknown name, and for more than a call can take."""
    names = [name for word in text.split(",") for name in (LEASE if word == "lease" else (word,))]
    unknown = [name for name in names if name not in PHASES]
    if unknown:
        raise ValueError(f"expected {', '.join(PHASES)}, lease or report, got {unknown[0]!r}")
    found = [(PHASES[name], PHASES[name].seconds if limit is None else limit) for name in dict.fromkeys(names)]
    total = START_SECONDS + sum(seconds for _, seconds in found)
    if limit is None and total > CALL_SECONDS:
        raise ValueError(f"expected phases of at most {CALL_SECONDS} s together, with {START_SECONDS} s before the first, got {total} s: "
                         "make several calls, or give --limit")
    return found


# Seconds that a case of cuda_bench can take, by the beginning of its name; the longest beginning counts.
BENCH_SECONDS = {"": 40, "step/": 60}
BENCH_START_SECONDS = 30  # before the first case begins: the libraries' start, and the limits
# A profiler runs these, one process each; together they have the kernels that a step's time goes to.
PROFILED = ("step/cuda/muon", "step/cuda/soap", "step/cuda/low_rank_128_tf32")
PROFILE_SECONDS = 19
HEAVIEST = 5  # kernels that the report shows


def bench_seconds(case):
    return BENCH_SECONDS[max((start for start in BENCH_SECONDS if case.startswith(start)), key=len)]


def programs(imitation):
    """Every program that the phases start."""
    suffix = "_cuda_on_host" if imitation else "_cuda"
    names = {"cuda_bench_on_host" if imitation else "cuda_bench"}
    for phase in PHASES.values():
        for check in phase.checks:
            if not imitation or check.host_tests is not None:
                names.add(program_name(check, suffix))
    return sorted(names)


def program_name(check, suffix):
    return check.program + suffix
