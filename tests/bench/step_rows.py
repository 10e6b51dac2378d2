#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Rows of a whole step over BERT-Large's 144 linear layers: low rank, dense, and the same in torch, in turns.

A ratio is the median of its turns' ratios: what else runs on the machine slows both sides of one, or neither. torch is
that of tests/torch2.sh; without it its rows are left out, and why is printed. All layers are there at once, 10 GB with
torch; where the machine has less memory to spare fewer blocks are taken, which is printed too.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys

BLOCK = [(1024, 1024)] * 4 + [(4096, 1024), (1024, 4096)]  # d_out, d_in
BLOCKS = 24
TURNS = 3
RANKS = (64, 128)
DENSE = "dense_f32"
# The memory of one block, and of a process before it has any.
BLOCK_BYTES = 2 * 50_400_000 + 90_000_000 + 20_000_000  # gradients twice, tiles, low rank
TORCH_BLOCK_BYTES = 176_200_000
SPARE_BYTES = 2_000_000_000
TILE = 64
WAITING = 16  # terms beside tiles
ERRORS = {"low_rank": 2e-3, "dense": 1e-4}


class Child:
    """A program that answers each line with a line."""

    def __init__(self, command):
        # pylint: disable=consider-using-with
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.command = command

    def read(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"step_rows.py: {self.command[0]} ended with {self.process.wait()}")
        return line.strip()

    def ask(self, *words):
        self.process.stdin.write(" ".join(str(word) for word in words) + "\n")
        self.process.stdin.flush()
        return self.read()

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def start_torch():
    """A Child, or None if there is no torch, which is printed."""
    here = pathlib.Path(__file__).resolve().parent
    child = Child([sys.executable, "-B", str(here.parent / "python/torch2.py"), str(here / "step_torch.py")])
    first = child.read()
    if first == "ready":
        return child
    print(f"step_rows.py: torch is left out: {first}")
    child.close()
    return None


def available_bytes():
    with open("/proc/meminfo", encoding="ascii") as meminfo:
        for line in meminfo:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0


def state_bytes(kind, blocks):
    """Bytes of all factors by docs/use/methods/mkor.md."""
    total = 0
    for side in (d for layer in BLOCK for d in layer):
        if kind == DENSE:
            tiles = side // TILE
            total += 4 * (tiles * (tiles + 1) // 2 * TILE * TILE + WAITING * side)
        else:
            rank = int(kind.rsplit("_", 1)[1])
            squares = 2 if side <= 8 * rank else 1  # S as well
            total += 4 * (rank * side + squares * rank * (rank + 1) // 2)
    return blocks * total


class Rows:
    def __init__(self):
        self.rows = []

    def add(self, name, value, unit, target=None, at_most=False):
        passed = target is None or (value <= target if at_most else value >= target)
        self.rows.append({"name": name, "value": value, "unit": unit, "limit": None, "ratio": None, "target": target,
                          "pass": passed})


def check_and_make(bench, kinds, blocks, rows):
    for kind in kinds:
        rows.add(f"step/{kind}_error", float(bench.ask("check", kind)), "",
                 ERRORS["dense" if kind == DENSE else "low_rank"], at_most=True)
        computed = state_bytes(kind, blocks)
        said, allocated, grown = (int(word) for word in bench.ask("make", kind).split())
        if not computed == said == allocated:
            sys.exit(f"step_rows.py: {kind}: expected {computed} bytes of factors, the library computes {said} and "
                     f"allocates {allocated}")
        rows.add(f"step/{kind}_memory", computed / 1e6, "MB")
        rows.add(f"step/{kind}_resident", grown / computed, "of computed", 1.05, at_most=True)
        # Until every column is in use.
        bench.ask("feed", kind, 20 if kind == DENSE else 2 * int(kind.rsplit("_", 1)[1]))


def measure(bench, torch, kinds, turns, rows):
    for threads in (1, 2):
        seconds = {kind: [] for kind in [*kinds, "torch"]}
        for turn in range(turns):
            for kind in kinds:
                # Low rank is short: its median of three is of the length of a turn's other parts.
                repeats = 1 if kind == DENSE else 3
                seconds[kind].append(statistics.median(float(bench.ask("step", kind, threads)) for _ in range(repeats)))
            if torch:
                if turn == 0:
                    torch.ask("step", threads)  # warms up
                seconds["torch"].append(float(torch.ask("step", threads)))
        for kind, times in seconds.items():
            if times:
                rows.add(f"step/{kind}/threads:{threads}", statistics.median(times) * 1e3, "ms")

        def ratio(above, below, seconds=seconds):
            return statistics.median(a / b for a, b in zip(seconds[above], seconds[below]))

        for rank in RANKS:
            target = 8 if rank == min(RANKS) else None
            rows.add(f"step/{DENSE}_to_low_rank_{rank}/threads:{threads}", ratio(DENSE, f"low_rank_{rank}"), "x", target)
            if torch:
                rows.add(f"step/torch_to_low_rank_{rank}/threads:{threads}", ratio("torch", f"low_rank_{rank}"), "x", 3)
        if torch:
            rows.add(f"step/torch_to_{DENSE}/threads:{threads}", ratio("torch", DENSE), "x")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bench", required=True, help="step_bench")
    parser.add_argument("--json", required=True)
    parser.add_argument("--short", action="store_true", help="one block, one turn")
    arguments = parser.parse_args()

    torch = start_torch()
    block_bytes = BLOCK_BYTES + (TORCH_BLOCK_BYTES if torch else 0)
    blocks = 1 if arguments.short else min(BLOCKS, max(1, (available_bytes() - SPARE_BYTES) // block_bytes))
    if not arguments.short and blocks < BLOCKS:
        print(f"step_rows.py: {blocks} blocks of {BLOCKS}: more need {BLOCKS * block_bytes + SPARE_BYTES} bytes")
    rows = Rows()
    bench = Child([arguments.bench, f"--blocks={blocks}"])
    kinds = [*(f"low_rank_{rank}" for rank in RANKS), DENSE]
    check_and_make(bench, kinds, blocks, rows)
    if torch:
        rows.add("step/torch_memory", int(torch.ask("make", blocks)) / 1e6, "MB")
    measure(bench, torch, kinds, 1 if arguments.short else TURNS, rows)
    rows.add("step/layers", blocks * len(BLOCK), "layers")
    for child in (bench, torch):
        if child:
            child.close()
    with open(arguments.json, "w", encoding="utf-8") as file:
        json.dump({"rows": rows.rows}, file)


if __name__ == "__main__":
    main()
