#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Method kron beside the published package: PyPI's distributed-kron on the same gradients and the same random numbers.

Our program gives gradients, answers, and the random numbers that docs/use/methods/kron.md says are drawn; the package's own
are replaced by them. The package runs on JAX's CPU backend in a virtual environment in the build folder, into which it
is installed once. Where that fails the test exits with 77, which CTest shows as skipped, and prints why.

Tolerance: both work in f32 and add in another order. The largest relative difference of an answer seen in 80 is 1e-6;
20 times that is allowed, for machines that round otherwise.
"""

import argparse
import importlib.util
import inspect
import json
import math
import pathlib
import subprocess
import sys
import unittest
import unittest.mock

from migrate_signatures import DISTRIBUTED_KRON
from pip_environment import run_inside, skip

# The package subscripts a class of JAX that later versions do not let it.
PACKAGES = ["distributed-kron==2.0.0", "jax==0.4.38", "jaxlib==0.4.38", "optax==0.2.4", "chex==0.1.88", "numpy==2.2.6"]
TOLERANCE = 2e-5

cases = []
package = None  # distributed_kron.kron


def load_package():
    """The module by its file: the package's __init__ wants flax, which it does not name as a dependency."""
    found = importlib.util.find_spec("distributed_kron")
    if found is None:
        skip("distributed-kron is not installed")
    path = pathlib.Path(found.submodule_search_locations[0]) / "kron.py"
    spec = importlib.util.spec_from_file_location("distributed_kron_kron", path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (ImportError, TypeError, AttributeError) as error:
        skip(f"the package does not load: {error}")
    return module


def package_answers(case):
    """Returns distributed-kron's answers to the case's gradients."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    options = case.get("options", {})
    shape = tuple(case["shape"])
    probability = options.get("max_update_probability")
    transform = package.scale_by_kron(
        b1=options.get("momentum", 0.9),
        preconditioner_update_probability=probability or package.precond_update_prob_schedule(),
        max_size_triangular=int(options.get("max_size_triangular", 8192)),
        min_ndim_triangular=int(options.get("min_ndim_triangular", 2)),
        memory_save_mode={"ONE_DIAG": "one_diag", "ALL_DIAG": "all_diag"}.get(options.get("memory_save_mode")),
        preconditioner_lr=options.get("precondition_lr", 0.1),
        preconditioner_init_scale=options.get("init_scale", 1.0),
        precond_update_precision="float32", precond_grads_precision="float32",
        # Ours merges dimensions where there are more than two.
        merge_small_dims=len(shape) > 2 and options.get("merge_small_dims", True),
        target_merged_dim_size=int(options.get("target_merged_dim_size", 256)), partition_grads_into_blocks=False)
    arrays = [np.array(g, dtype=np.float32).reshape(shape) for g in case["gradients"]]
    state = transform.init({"w": jnp.zeros(shape, jnp.float32)})

    def shaped_like(tree, probe):
        """The dimensions are merged by then."""
        return {"w": probe.reshape(tree["w"].shape)}

    @jax.jit
    def step(gradient, state, probe, draw):
        with unittest.mock.patch.object(package, "_tree_random_like", lambda key, tree: shaped_like(tree, probe)), \
                unittest.mock.patch.object(jax.random, "uniform", lambda key: draw):
            return transform.update({"w": gradient}, state)

    answers = []
    updates = since = 0
    for gradient in arrays:
        probe = np.array(case["probes"][updates], np.float32)
        answer, state = step(gradient, state, probe, np.float32(case["draws"][updates]))
        answers.append(np.array(answer["w"]))
        since += 1
        if since >= 1 / (probability or 1.0):
            since = 0
            updates += 1
    return answers


class KronBesideThePackage(unittest.TestCase):
    def test_answers_agree(self):
        import numpy as np
        self.assertGreater(len(cases), 5)
        for case in cases:
            with self.subTest(case["name"]):
                ours = [np.array(a).reshape(case["shape"]) for a in case["answers"]]
                theirs = package_answers(case)
                differences = [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(ours, theirs)]
                print(f"{case['name']}: largest relative difference {max(differences):.1e}")
                self.assertLessEqual(max(differences), TOLERANCE)

    def test_migrate_knows_its_arguments(self):
        self.assertEqual(list(inspect.signature(package.kron).parameters), DISTRIBUTED_KRON)

    def test_the_schedule_agrees(self):
        """Ours is a closed form in docs/use/methods/kron.md; the package's is a function."""
        schedule = package.precond_update_prob_schedule()
        for n in (1, 499, 500, 501, 1000, 2500, 4000, 4006, 5000, 100000):
            ours = min(max(math.exp(-0.001 * (n - 500)), 0.03), 1.0)
            self.assertAlmostEqual(float(schedule(n)), ours, delta=1e-5)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", required=True, help="the program that gives gradients and answers")
    parser.add_argument("--venv", type=pathlib.Path, required=True, help="where the packages are, or go")
    parser.add_argument("--inside", action="store_true", help="this is the environment's interpreter")
    arguments = parser.parse_args()
    if not arguments.inside:
        run_inside(arguments.venv, PACKAGES)
    global package
    package = load_package()
    cases.extend(json.loads(subprocess.run([arguments.answers], capture_output=True, check=True).stdout))
    unittest.main(argv=[sys.argv[0], "-v"])


if __name__ == "__main__":
    main()
