#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a GPU allows the rows of cuda_bench, and the target of each, computed from shapes and published figures.

ROWS has one entry for each claim. The limits here are for planning: a run compares with what it measures itself, a copy
and products by cuBLAS. docs/performance.md shows the table that --markdown prints; --check compares the two.

Limits of a row: every pipe of the device takes FLOP / (FLOP a second), memory takes bytes / (bytes a second), launches
take their time one after the other, and the longest of these times is the limit. It assumes that they overlap without
loss, and that each operand is read once and each result written once.
"""

import argparse
import pathlib
import sys

import step_rows

# FLOP and bytes a second, of dense matrices without sparsity, at boost clock. Sources: the datasheets of NVIDIA's H100
# and H200 Tensor Core GPUs, column SXM of each. Both give TF32 and BF16 with sparsity, which is twice these. A device
# below boost clock, or at its power limit, has less: hence the limits that a run measures.
H100, H200 = "H100 SXM", "H200 SXM"
_ARITHMETIC = {"FP32": 67e12, "TF32": 494e12, "BF16": 989e12}
DEVICES = {H100: {**_ARITHMETIC, "HBM": 3.35e12}, H200: {**_ARITHMETIC, "HBM": 4.8e12}}

# Assumptions: none of these figures is published, and a run replaces each by what it measures.
OVERHEAD = 1.2  # a step of many layers reaches its limit but for a fifth: launches, tails of grids, reductions
LAUNCH_SECONDS = 2e-6  # from the begin of a kernel to the begin of the next on its stream, however short it is
COPY_SHARE = 0.8  # an update of tiles reaches this share of the memory's speed
TORCH_TIMES = 10  # a step in torch takes so many times ours, where limits allow it

LAYERS = step_rows.BLOCK * step_rows.BLOCKS  # d_out, d_in of BERT-Large's 144 linear layers
LAUNCHES = 10  # of a dense step, whatever the layers of a shape
# Of a step in low rank: norms, columns, cores, copies, answers, scale, and the calls of cuBLAS by fixed_batches.h; at
# r = 64 a recompression besides.
LOW_RANK_LAUNCHES = {64: 6 + 25 + 18, 128: 6 + 40}
TERMS = 8  # rows that an update of a dense factor takes in at once (cuda_bench's kTerms)
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


def tile_bytes(n, element_bytes):
    """64 x 64 tiles of one triangle, the diagonal's included."""
    tiles = -(-n // step_rows.TILE)
    return tiles * (tiles + 1) // 2 * step_rows.TILE**2 * element_bytes


def _updates():
    for element, size in (("f32", 4), ("f16", 2)):
        for n in (1024, 2048, 4096, 8192):
            num_bytes = 2 * tile_bytes(n, size) + F32_BYTES * (TERMS + 2) * n
            flop = {"FP32": (2 * TERMS + 4) * n * n}
            claim = f"update of a dense {element} factor of {n} rows by {TERMS} terms"
            yield _timed(f"update/cuda/{element}/d:{n}", claim, "us", flop, num_bytes, 1, 1 / COPY_SHARE)


def _products():
    # Launches: two products, and for bf16 what rounds their operands and what widens the answer.
    for precision, pipe, launches in (("f32", "FP32", 2), ("tf32", "TF32", 2), ("bf16", "BF16", 4)):
        for n in (1024, 2048, 4096):
            name, claim = f"precondition/cuda/dense_{precision}/d:{n}", f"dense precondition in {precision} of {n} rows"
            num_bytes = 4 * F32_BYTES * n * n  # two factors and d read, u written
            yield _timed(name, claim, "us", {pipe: 4 * n**3}, num_bytes, launches, OVERHEAD)


def _low_rank_step(rank, pipe):
    """Four products of 2 r m n FLOP for each layer; d read once, u written once, and both windows read."""
    flop = {pipe: 8 * rank * GRADIENTS}
    return flop, F32_BYTES * (2 * GRADIENTS + rank * SIDES)


def _steps():
    """Name of the kind of step, what it is, its FLOP and bytes, and its launches."""
    for rank in step_rows.RANKS:
        yield f"low_rank_{rank}", f"low rank, r = {rank}, F32", *_low_rank_step(rank, "FP32"), LOW_RANK_LAUNCHES[rank]
        yield f"low_rank_{rank}_tf32", f"low rank, r = {rank}, TF32", *_low_rank_step(rank, "TF32"), LOW_RANK_LAUNCHES[rank]
    # A triangle of each factor is read; it is written once in 16 steps, which this leaves out.
    dense_bytes = F32_BYTES * (2 * GRADIENTS + FACTORS / 2)
    dense_flop = sum(2 * m * n * (m + n) for m, n in LAYERS)
    yield "dense_bf16", "dense factors, BF16", {"BF16": dense_flop}, dense_bytes, LAUNCHES


def torch_seconds(device):
    """What step_torch.py's operations need at least, one after the other: none of them overlaps with another."""
    products = sum(2 * m * n * (m + n) for m, n in LAYERS) / DEVICES[device]["FP32"]
    # Of each factor: mul_ and addr_ read and write it, mv and the maximum read it. Of each gradient: mm reads it,
    # writes and reads the product in between, and writes the answer; two norms and mul_ read or write a matrix four
    # times.
    num_bytes = F32_BYTES * (6 * FACTORS + 8 * GRADIENTS)
    return products + num_bytes / DEVICES[device]["HBM"]


def _step_rows():
    kinds = list(_steps())
    for kind, what, flop, num_bytes, launches in kinds:
        claim = f"step of BERT-Large's 144 layers, {what}"
        yield _timed(f"step/cuda/{kind}", claim, "ms", flop, num_bytes, launches, OVERHEAD)
    for kind, what, flop, num_bytes, _ in kinds:
        target = {device: min(TORCH_TIMES, torch_seconds(device) / (OVERHEAD * seconds(device, flop, num_bytes)[0]))
                  for device in DEVICES}
        yield _counted(f"step/cuda/torch_to_{kind}", f"time of the step in torch's operations over ours, {what}", "x",
                       target, at_most=False)
    for kind, what, _, _, launches in kinds:
        yield _counted(f"step/cuda/{kind}/launches", f"launches of a steady step, {what}", "", launches, at_most=True)
    for kind, what, _, _, _ in kinds:
        claim = f"device memory that steady steps take beyond the pool, {what}"
        yield _counted(f"step/cuda/{kind}/growth", claim, "MiB", 1, at_most=True)


ROWS = [*_updates(), *_products(), *_step_rows()]


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
    head = ("claim", "row", "unit", "bound by", "limit, H100; H200", "target", "measured")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in ROWS:
        pipes = [row["pipe"][device] for device in DEVICES] if row["pipe"] else []
        bound = "; ".join(dict.fromkeys(pipes)) or "-"
        target = ("at most " if row["at_most"] else "at least ") + pair(row["target"])
        value = number(measured[row["name"]]) if row["name"] in measured else "not measured"
        limit = pair(row["limit"]) if row["limit"] else "-"
        cells = (row["claim"], f"`{row['name']}`", row["unit"] or "-", bound, limit, target, value)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


BEGIN, END = "<!-- begin of tests/bench/gpu_targets.py --markdown -->\n", "<!-- end -->"


def findings(text):
    """What is wrong with a page that should show the table; measured values may stand in their column."""
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
        ("f32 tiles of 1024 rows", tile_bytes(1024, 4) == 136 * 4096 * 4),
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
