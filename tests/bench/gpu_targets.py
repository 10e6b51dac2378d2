#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Limits of a GPU for the rows of cuda_bench, and the target of each row, computed from shapes and published figures.

ROWS has one entry for each claim. The limits here are for planning: a run compares with what it measures itself, a copy
and products by cuBLAS. docs/develop/lab/kernels.md shows the table that --markdown prints; --check compares the two.

Limits of a row: every pipe of the device takes FLOP / (FLOP a second), memory takes bytes / (bytes a second), launches
take their time one after the other, and the longest of these times is the limit. It assumes that they overlap without
loss, and that each operand is read once and each result written once.
"""

import argparse
import pathlib
import sys

import models

# FLOP and bytes a second, of dense matrices without sparsity, at boost clock. Sources: the datasheets of NVIDIA's H100
# and H200 Tensor Core GPUs, column SXM of each. Both give TF32 and BF16 with sparsity, which is twice these. A device
# below boost clock, or at its power limit, has less: hence the limits that a run measures.
H100, H200 = "H100 SXM", "H200 SXM"
_ARITHMETIC = {"FP32": 67e12, "TF32": 494e12, "BF16": 989e12}
DEVICES = {H100: {**_ARITHMETIC, "HBM": 3.35e12}, H200: {**_ARITHMETIC, "HBM": 4.8e12}}

# Assumptions: none of these figures is published, and a run replaces each by what it measures.
OVERHEAD = 1.2  # a step of many layers reaches its limit but for a fifth: launches, tails of grids, reductions
LAUNCH_SECONDS = 2e-6  # from the begin of a kernel to the begin of the next on its stream, however short it is
# A step of ours takes at most so many times that in torch (step_peers.py).
MOST_OF_TORCH = {"muon": 1.2, "muon_factor": 1.5, "muon_llama_1b": 1.2, "soap": 1.5, "mkor": 1.0}

LAYERS = models.BERT_LARGE.layers
LAUNCHES = 10  # of a dense step, whatever the layers of a shape
# Launches of a step in low rank: norms, columns, cores, copies, answers, scale, and the calls of cuBLAS by FixedBatches; at
# r = 64 a recompression besides.
LOW_RANK_LAUNCHES = {64: 6 + 25 + 18, 128: 6 + 40}
MOST_FACTOR_SIDE = 2048
F32_BYTES = 4
GRADIENTS = sum(m * n for m, n in LAYERS)
FACTORS = sum(m * m + n * n for m, n in LAYERS)
SIDES = sum(m + n for m, n in LAYERS)


def seconds(device, flop, num_bytes, launches=0):
    """The time that the device needs at least, and the pipe that takes it."""
    speeds = DEVICES[device]
    times = {pipe: amount / speeds[pipe] for pipe, amount in {**flop, "HBM": num_bytes}.items()}
    times["launches"] = launches * LAUNCH_SECONDS
    pipe = max(times, key=times.get)
    return times[pipe], pipe


def _timed(name, claim, unit, flop, num_bytes, launches, factor):
    """A row whose value is a time; factor: how many times the limit it may take."""
    scale = {"us": 1e6, "ms": 1e3}[unit]
    found = {device: seconds(device, flop, num_bytes, launches) for device in DEVICES}
    limit = {device: time * scale for device, (time, _) in found.items()}
    return {"name": name, "claim": claim, "unit": unit, "flop": flop, "bytes": num_bytes,
            "pipe": {device: pipe for device, (_, pipe) in found.items()}, "limit": limit, "factor": factor,
            "target": {device: value * factor for device, value in limit.items()}, "at_most": True}


def _counted(name, claim, unit, target, at_most):
    """A row without a limit of its own; target: a number, or one for each device."""
    targets = target if isinstance(target, dict) else dict.fromkeys(DEVICES, target)
    return {"name": name, "claim": claim, "unit": unit, "flop": {}, "bytes": 0, "pipe": {}, "limit": {}, "factor": None,
            "target": targets, "at_most": at_most}


def _low_rank_step(rank, pipe):
    """Four products of 2 r m n FLOP for each layer; d read once, u written once, and both windows read."""
    flop = {pipe: 8 * rank * GRADIENTS}
    return flop, F32_BYTES * (2 * GRADIENTS + rank * SIDES)


def _steps():
    """Name of the kind of step, what it is, its FLOP and bytes, and its launches."""
    for rank, launches in LOW_RANK_LAUNCHES.items():
        yield f"low_rank_{rank}", f"low rank, r = {rank}, F32", *_low_rank_step(rank, "FP32"), launches
        yield f"low_rank_{rank}_tf32", f"low rank, r = {rank}, TF32", *_low_rank_step(rank, "TF32"), launches
    # A triangle of each factor is read; it is written once in 16 steps, which this leaves out.
    dense_bytes = F32_BYTES * (2 * GRADIENTS + FACTORS / 2)
    dense_flop = sum(2 * m * n * (m + n) for m, n in LAYERS)
    yield "dense_bf16", "dense factors, BF16", {"BF16": dense_flop}, dense_bytes, LAUNCHES
    for kind in ("muon", "muon_llama_1b"):
        layers = models.of_step(kind).layers
        # Five iterations of three products, and the momentum.
        flop = sum(5 * (4 * min(m, n) ** 2 * max(m, n) + 2 * min(m, n) ** 3) for m, n in layers)
        yield kind, "muon, BF16", {"BF16": flop}, 4 * F32_BYTES * sum(m * n for m, n in layers), 0
        if kind == "muon":  # and with the factor of the default: a product with its inverse, and one for the covariance
            tf32 = sum(4 * m * n * n for m, n in layers if n <= MOST_FACTOR_SIDE)  # at half the speed of bf16
            yield "muon_factor", "muon with its factor, no refresh", {"BF16": flop + 2 * tf32}, 10 * F32_BYTES * GRADIENTS, 0
    # To the basis, back, and the covariance, for each side with a factor; two moments.
    flop = sum(6 * m * n * side for m, n in LAYERS for side in (m, n) if side <= MOST_FACTOR_SIDE)
    yield "soap", "soap, no refresh, TF32", {"TF32": flop}, 6 * F32_BYTES * GRADIENTS, 0


def peer_of(kind):
    """Returns the key in MOST_OF_TORCH of a kind of step."""
    return kind if kind in MOST_OF_TORCH else "mkor"


def _step_rows():
    kinds = list(_steps())
    for kind, what, flop, num_bytes, launches in kinds:
        claim = f"step of {models.of_step(kind).title}, {what}"
        yield _timed(f"step/cuda/{kind}", claim, "ms", flop, num_bytes, launches, OVERHEAD)
    for kind, what, _, _, _ in kinds:
        yield _counted(f"step/cuda/{kind}/to_torch", f"time of the step over that in torch, {what}", "x", MOST_OF_TORCH[peer_of(kind)],
                       at_most=True)
    for kind, what, _, _, launches in kinds:
        if launches and not kind.endswith("_tf32"):  # which takes as many as F32
            yield _counted(f"step/cuda/{kind}/launches", f"launches of a steady step, {what}", "", launches, at_most=True)


ROWS = list(_step_rows())


def number(value):
    text = f"{value:.3g}"
    return text if "e" not in text else f"{value:.0f}"


def pair(values):
    """One number where both devices have the same."""
    texts = [number(values[device]) for device in DEVICES]
    return texts[0] if texts[0] == texts[1] else "; ".join(texts)


def markdown(measured=None):
    """The table; measured: values by name, of one device."""
    measured = measured or {}
    head = ("row", "unit", "bound by", "limit, H100; H200", "target", "measured")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in ROWS:
        pipes = [row["pipe"][device] for device in DEVICES] if row["pipe"] else []
        bound = "; ".join(dict.fromkeys(pipes)) or "-"
        target = ("at most " if row["at_most"] else "at least ") + pair(row["target"])
        value = number(measured[row["name"]]) if row["name"] in measured else "not measured"
        limit = pair(row["limit"]) if row["limit"] else "-"
        cells = (f"`{row['name']}`", row["unit"] or "-", bound, limit, target, value)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


BEGIN, END = "<!-- begin of tests/bench/gpu_targets.py --markdown -->\n", "<!-- end -->"


def findings(text):
    """Returns the findings in a page that should show the table; measured values may stand in their column."""
    if text.count(BEGIN) != 1 or END not in text.split(BEGIN)[1]:
        return [f"expected one line {BEGIN.strip()} and a line {END} after it"]
    shown = text.split(BEGIN)[1].split(END)[0].splitlines()
    expected = markdown().splitlines()
    if len(shown) != len(expected):
        return [f"expected {len(expected)} lines of the table, got {len(shown)}"]
    found = []
    for got, want in zip(shown, expected):
        if got != want and got.rsplit("|", 2)[0] != want.rsplit("|", 2)[0]:
            found.append(f"expected {want}\n     got {got}")
    return found


def self_test():
    """The check fails where it should, and known figures come out."""
    by_name = {row["name"]: row for row in ROWS}
    page = f"# Page\n{BEGIN}{markdown()}{END}\n"
    filled = f"# Page\n{BEGIN}{markdown({'step/cuda/low_rank_64': 2.5})}{END}\n"
    cases = [
        ("the page as printed", findings(page) == []),
        ("measured values may be filled in", findings(filled) == [] and "| 2.5 |" in filled),
        ("another limit", len(findings(page.replace("| 2.31 |", "| 2.3 |"))) == 1),
        ("a row less", len(findings(page.replace(markdown().splitlines()[-1] + "\n", ""))) == 1),
        ("no table", len(findings("# Page\n")) == 1),
        ("each name once", len(by_name) == len(ROWS)),
        ("302 M gradients, 144 layers", (GRADIENTS, len(LAYERS)) == (301_989_888, 144)),
        ("r = 64 in F32: 155 GFLOP at 67 TFLOP/s", abs(by_name["step/cuda/low_rank_64"]["limit"][H100] - 2.308) < 1e-3),
        ("r = 64 in TF32: memory", by_name["step/cuda/low_rank_64_tf32"]["pipe"][H100] == "HBM"),
        ("dense in BF16: 2.47 TFLOP at 989 TFLOP/s", abs(by_name["step/cuda/dense_bf16"]["limit"][H200] - 2.50) < .01),
        ("973 M parameters, 112 layers", (sum(m * n for m, n in models.LLAMA_1B.layers), len(models.LLAMA_1B.layers)) == (973_078_528, 112)),
        ("muon: 7.7 TFLOP", abs(by_name["step/cuda/muon"]["flop"]["BF16"] - 7.73e12) < 1e10),
    ]
    failed = [name for name, passed in cases if not passed]
    for name in failed:
        print(f"self-test: {name}")
    return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--markdown", action="store_true", help="print the table")
    mode.add_argument("--check", metavar="PAGE", type=pathlib.Path, help="compare the table in PAGE with --markdown's")
    mode.add_argument("--self-test", action="store_true")
    arguments = parser.parse_args()
    if arguments.markdown:
        print(markdown(), end="")
        return 0
    if arguments.self_test:
        return 1 if self_test() else 0
    found = findings(arguments.check.read_text(encoding="utf-8"))
    for line in found:
        print(f"{arguments.check}: {line}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
