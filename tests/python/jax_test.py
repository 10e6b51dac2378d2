#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The JAX example: its optax transformation trains as the formulas in f64 do, and the program learns."""

import pathlib
import subprocess
import sys
import unittest

import test_program

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "client" / "python" / "examples"
TIMEOUT_S = 120


class JaxTest(unittest.TestCase):
    def test_trajectory_is_that_of_the_formula(self):
        """The problem of client_training.py, which is f64 from the formulas, with optax.sgd."""
        import jax
        import jax.numpy as jnp
        import numpy as np
        import optax
        import client_training
        import precondor
        from optax_precondor import gradients_and_rows, mlp, scale_by_precondor
        from precondor.server import LocalServer

        x, y, first = client_training.problem()
        x, y = x.astype(np.float32), y.astype(np.float32)
        weights = [jnp.asarray(w, jnp.float32) for w in first]
        losses = []
        with LocalServer() as server, precondor.Client(server.address) as client:
            with client.open_session(client_training.session("jax", 1, "DIRECT")).join() as worker:
                optimizer = optax.chain(scale_by_precondor(worker), optax.sgd(client_training.RATE))
                state = optimizer.init(weights)

                @jax.jit
                def step(weights, state):
                    loss, gradients, inputs, output_gradients = gradients_and_rows(
                        mlp, lambda output, y: 0.5 * jnp.mean(jnp.sum((output - y)**2, axis=1)), weights, x, y)
                    updates, state = optimizer.update(gradients, state, weights, loss=loss, inputs=inputs,
                                                      output_gradients=output_gradients)
                    return optax.apply_updates(weights, updates), state, loss

                for _ in range(client_training.STEPS):
                    weights, state, loss = step(weights, state)
                    losses.append(float(loss))
                traffic = worker.status().traffic
        expected_losses, expected = client_training.reference(1)
        # As in client_test.py: some ten of f32's 6e-8 a step, for 30 steps.
        np.testing.assert_allclose(losses, expected_losses, rtol=0, atol=2e-5)
        test_program.expect_close(weights, expected, 2e-5)
        self.assertGreater(traffic["statistics_bytes"], 0)

    def test_a_gradient_that_is_not_finite_becomes_zero(self):
        import jax.numpy as jnp
        import numpy as np
        import precondor
        from optax_precondor import scale_by_precondor
        from precondor.server import LocalServer

        spec = precondor.SessionSpec("skip", [precondor.Layer("fc", 2, 3)], "identity")
        with LocalServer() as server, precondor.Client(server.address) as client:
            with client.open_session(spec).join() as worker:
                transformation = scale_by_precondor(worker)
                state = transformation.init(None)
                rows = {"loss": jnp.float32(1), "inputs": [jnp.ones((4, 3))], "output_gradients": [jnp.ones((4, 2))]}
                answers, state = transformation.update([jnp.full((2, 3), jnp.nan)], state, **rows)
                np.testing.assert_array_equal(answers[0], np.zeros((2, 3)))
                answers, state = transformation.update([jnp.ones((2, 3))], state, **rows)
                np.testing.assert_array_equal(answers[0], np.ones((2, 3)))
                self.assertEqual(int(state.step), 2)

    @staticmethod
    def run_program(*arguments):
        return subprocess.run([sys.executable, "-B", str(EXAMPLES / "jax_digits.py"), *arguments], capture_output=True, text=True,
                              timeout=TIMEOUT_S, check=False, stdin=subprocess.DEVNULL)

    def test_a_refusal_names_the_session(self):
        import precondor
        from precondor.server import LocalServer

        with LocalServer() as server, precondor.Client(server.address) as client:
            client.open_session(precondor.SessionSpec("jax-digits", [precondor.Layer("fc", 2, 3)], "identity"))
            done = self.run_program("--server", server.address)
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stderr, r"\"jax-digits\" exists with another description: .*\n$")

    def test_the_program_learns(self):
        ends = {}
        for how in ("server", "none"):
            done = self.run_program("--precondition", how, "--steps", "80")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(len(done.stdout.splitlines()), 2)
            ends[how] = float(done.stdout.split()[-1])
        self.assertLess(ends["server"], ends["none"])


if __name__ == "__main__":
    sys.path.insert(0, str(EXAMPLES))
    test_program.run()
