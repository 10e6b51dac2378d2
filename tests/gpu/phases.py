# SPDX-License-Identifier: Apache-2.0
"""The phases of tests/gpu.sh as a table: what each checks, in which order, and how long each part can take.

A phase ends when its own limit is over, whatever its checks would still take: a command on a borrowed machine is short.
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
class Phase:
    name: str
    seconds: float
    checks: tuple = ()
    jobs: int = 1  # checks at a time


def _suite(program, seconds, **more):
    return Check(program.removesuffix("_test").removesuffix("_conformance"), program, seconds, **more)


def _under(tool, program, tests, seconds=100):
    return Check(f"{tool}/{program.removesuffix('_test').removesuffix('_conformance')}", program, seconds, tests=tests,
                 host_tests=None, tool=tool)


# Every kernel of ours at least once, and the libraries' kernels for a short time only.
_OPERATIONS = "*Element*:*Reductions*:*Packed*:*Gather*:*FillNormal*:*InPlace*"
_TILES = "*ByTheDefinition*:*FusedIs*:*ExpandsToTheBit*:*ShermanMorrison*"

SMOKE = Phase("smoke", 300, (
    _suite("backend_conformance_test", 200),
    _suite("symmetric_conformance_test", 200),
    _suite("rounded_products_conformance_test", 200),
    _suite("scaled_precondition_conformance_test", 200),
    _suite("grouped_conformance_test", 250),
), jobs=5)
# Its checks are the cases of cuda_bench, as that program lists them, and the step in torch.
BENCH = Phase("bench", 470)
PROFILE = Phase("profile", 300)
CONFORMANCE = Phase("conformance", 470, (
    _suite("device_memory_test", 120),
    _suite("low_rank_conformance_test", 300, host_tests="FullRank/*/3"),
    _suite("method_conformance_test", 460, host_tests="*.IsTheIdentity*:*.KeepsItsScaling*:*.RefusesBadInput*"),
    _suite("gradient_method_conformance_test", 460, host_tests="*.CountsTheGradients*"),
    _suite("split_conformance_test", 300, host_tests="Split*.*:*REFERENCE2*:*BLEND4*"),
    _suite("nccl_conformance_test", 200, host_tests=None),
), jobs=3)  # more processes would wait for each other's turns on the device
SANITIZE = Phase("sanitize", 470, (
    _under("memcheck", "symmetric_conformance_test", "*", 200),
    _under("memcheck", "rounded_products_conformance_test", "*", 200),
    _under("memcheck", "backend_conformance_test", "-*GivesTheSameBits*:*ConditionOneE*", 300),
    _under("racecheck", "symmetric_conformance_test", _TILES, 200),
    _under("racecheck", "backend_conformance_test", _OPERATIONS, 200),
    _under("synccheck", "symmetric_conformance_test", _TILES),
    _under("synccheck", "backend_conformance_test", _OPERATIONS),
    _under("initcheck", "symmetric_conformance_test", _TILES),
    _under("initcheck", "device_memory_test", "DeviceCopiesTest.*-*ThePoolServes*"),
), jobs=4)

# In the order in which --phase all runs them: what is worth most comes first.
PHASES = {phase.name: phase for phase in (SMOKE, BENCH, PROFILE, CONFORMANCE, SANITIZE)}

# Seconds that a case of cuda_bench can take, by the beginning of its name; the longest beginning counts.
BENCH_SECONDS = {"": 40, "step/": 90}
BENCH_START_SECONDS = 60  # before the first case begins: the libraries' start, and the limits
TORCH, TORCH_SECONDS = "step/cuda/torch", 120
# What a profiler runs, one process each; together they have the kernels that a step's time goes to.
PROFILED = ("step/cuda/low_rank_64", "step/cuda/low_rank_64_bf16x3", "step/cuda/low_rank_128_bf16x3", "step/cuda/dense_bf16",
            "update/cuda/f16/d:4096")
PROFILE_SECONDS = 100
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
    # NCCL's own suite has no imitation and no suffix.
    return check.program if check.program.startswith("nccl") else check.program + suffix
