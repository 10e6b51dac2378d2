#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares what two build trees train: the hashes of the final weights, by method, ranks and exchange.

A change that should change no result is tried so: write the hashes of the tree before it, and compare the tree after it
on the same machine. restart_table_test.py holds runs with faults to the same hashes.

Examples:
  weights_hashes.py --binaries OLD/build/dev --write hashes.json
  weights_hashes.py --binaries build/dev --compare hashes.json
"""

import argparse
import itertools
import json
import pathlib
import sys
import tempfile

from cluster import Cluster, Training, say
from restart_table_test import GRADIENTS, STATISTICS

STEPS = 100


def hashes(binaries, steps):
    """Yields the name of a job and the hash of its weights."""
    for (method, row), world_size, exchange in itertools.product({**STATISTICS, **GRADIENTS}.items(), (1, 2, 4), ("direct", "delegate")):
        with tempfile.TemporaryDirectory() as folder, Cluster(binaries, folder, durable=False) as cluster, \
                Training(binaries, cluster, folder, [f"--steps={steps}", f"--exchange={exchange}"], world_size=world_size, row=row) as job:
            yield f"{method}, {world_size} ranks, {exchange.upper()}", job.finish()["weights_hash"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binaries", type=pathlib.Path, required=True, help="a build tree with precondor-server and the digits trainer")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each job (%(default)s)")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--write", type=pathlib.Path, metavar="FILE", help="write the hashes here")
    where.add_argument("--compare", type=pathlib.Path, metavar="FILE", help="end with status 1 unless each hash is as in this file")
    options = parser.parse_args()
    expected = json.loads(options.compare.read_text(encoding="utf-8")) if options.compare else {}
    found = {}
    for name, value in hashes(options.binaries.resolve(), options.steps):
        found[name] = value
        say(f"{name}: {value}" + (f"; expected {expected.get(name)}" if options.compare and expected.get(name) != value else ""))
    if options.write:
        options.write.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    elif found != expected:
        sys.exit(f"{sum(expected.get(name) != value for name, value in found.items())} of {len(found)} hashes differ")


if __name__ == "__main__":
    main()
