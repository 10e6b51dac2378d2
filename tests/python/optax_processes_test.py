#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""precondor.optax in a run of three processes of jax.distributed.

Each process is this program again, with --process. It trains a model whose parameters are divided among the processes, and
prints what came out. The layers' updates are to be those of one process with the same gradients, bit for bit.
"""

import argparse
import json
import pathlib
import socket
import subprocess
import sys
import tempfile
import unittest

import jax
import jax.numpy as jnp
import numpy as np

import precondor
import precondor.optax

PROCESSES = 3
STEPS = 6
SHAPES = {"dense": (6, 8), "head": (8, 3), "bias": (3,)}
TIMEOUT_S = 120


def gradients(step):
    random = np.random.default_rng(step)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def run_steps(place, transformation, state, first, steps):
    update, found = jax.jit(transformation.update), []
    for step in range(first, first + steps):
        updates, state = update({name: place(name, one) for name, one in gradients(step).items()}, state)
        found.append(updates)
    return found, jax.block_until_ready(state)


def train(arguments):
    """One process of a run. Trains from the checkpoint if there is one, and saves one."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(arguments.jax_coordinator, PROCESSES, arguments.process)
    from jax.experimental import multihost_utils
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("fsdp",))

    def place(name, value):
        value = np.asarray(value)
        spec = jax.sharding.PartitionSpec("fsdp") if value.ndim > 1 and len(value) % PROCESSES == 0 else jax.sharding.PartitionSpec()
        return jax.make_array_from_callback(value.shape, jax.sharding.NamedSharding(mesh, spec), lambda index: value[index])

    checkpoint = pathlib.Path(arguments.checkpoint)
    saved = np.load(checkpoint) if checkpoint.exists() else None
    first = int(saved["step"]) if saved else 0
    factors = [saved[f"factors{index}"] for index in range(int(saved["factors"]))] if saved and arguments.process == 0 else []
    transformation = precondor.optax.scale_by_precondor(arguments.address, mesh=mesh, factors=factors,
        client=precondor.ClientOptions(result_timeout=5 if arguments.fail else 60))
    state = transformation.init(gradients(0))
    leaves, structure = jax.tree_util.tree_flatten(state)
    if saved:
        leaves = [saved[f"state{index}"] for index in range(len(leaves))]
    state = jax.tree_util.tree_unflatten(structure, [place("", leaf) for leaf in leaves])
    found, state = run_steps(place, transformation, state, first, STEPS // 2)
    if arguments.fail and arguments.process == 1:
        next(iter(transformation.connection._workers.values())).close()  # pylint: disable=protected-access
    if arguments.fail:
        run_steps(place, transformation, state, first + STEPS // 2, 1)
    whole = [{name: multihost_utils.process_allgather(one, tiled=True).tolist() for name, one in updates.items()} for updates in found]
    factors = transformation.read_factors()
    if arguments.process == 0:
        np.savez(checkpoint, step=first + STEPS // 2, factors=len(factors), **{f"factors{index}": one for index, one in enumerate(factors)},
                 **{f"state{index}": np.asarray(leaf) for index, leaf in enumerate(jax.tree_util.tree_leaves(state))})
    elif factors:
        sys.exit(f"process {arguments.process}: read_factors: expected nothing, got {len(factors)} arrays")
    print(json.dumps(whole))


class OptaxProcessesTest(unittest.TestCase):
    def start(self, folder, address, *more):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        processes = [subprocess.Popen([sys.executable, "-B", __file__, "--process", str(process), "--address", address,
                                  "--jax-coordinator", f"127.0.0.1:{port}", "--checkpoint", f"{folder}/checkpoint.npz", *more],
                                 stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for process in range(PROCESSES)]
        for process in processes:
            self.addCleanup(process.kill)
        return processes

    def test_a_run_and_its_checkpoint(self):
        with precondor.server.LocalServer() as server, tempfile.TemporaryDirectory() as folder:
            transformation = precondor.optax.scale_by_precondor(server.address)
            expected, _ = run_steps(lambda name, value: jnp.asarray(value), transformation, transformation.init(gradients(0)), 0, STEPS)
            transformation.close()
            for first in (0, STEPS // 2):  # the second run goes on from the first one's checkpoint, on servers of its own
                processes = self.start(folder, "local")
                for process in processes:
                    out, error = process.communicate(timeout=TIMEOUT_S)
                    self.assertEqual(process.returncode, 0, error)
                    for step, updates in enumerate(json.loads(out.splitlines()[-1])):
                        for name, one in updates.items():  # Adam's, of the bias, may be rounded otherwise
                            np.testing.assert_allclose(np.asarray(one, np.float32), expected[first + step][name],
                                                       rtol=1e-6 if name == "bias" else 0, err_msg=f"{first + step} {name}")

            for process, expected in zip(self.start(folder, "local", "--fail"), (
                    "DeadlineExceededError", "the worker has been closed", "DeadlineExceededError")):
                _, error = process.communicate(timeout=TIMEOUT_S)  # every process ends: none waits for the one that has failed
                self.assertIn(expected, error)
                self.assertNotEqual(process.returncode, 0)
            saved = dict(np.load(f"{folder}/checkpoint.npz"))
            np.savez(f"{folder}/checkpoint.npz", **{**saved, "factors": 2})
            processes = self.start(folder, "local")
            for process, expected in zip(processes, ("InvalidArgumentError: factors", *["PrecondorError: process 0: InvalidArgumentError: factors"] * 2)):
                _, error = process.communicate(timeout=TIMEOUT_S)
                self.assertIn(expected, error)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--process", type=int, help="the number of this process of a run")
    parser.add_argument("--address", help="of the run's server")
    parser.add_argument("--jax-coordinator", help="address of process 0, for jax.distributed")
    parser.add_argument("--fail", action="store_true", help="close a rank of process 1 before the last step")
    parser.add_argument("--checkpoint", help="a file to go on from, if it is there, and to write")
    arguments = parser.parse_args()
    if arguments.process is not None:
        train(arguments)
        return
    unittest.main(argv=[sys.argv[0], "-v"])


if __name__ == "__main__":
    main()
