#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains an autoencoder of 8 x 8 handwritten digits in JAX, preconditioned by Precondor. Wants jax and optax, not torch.

examples:
  jax_digits.py                               starts a server of its own
  jax_digits.py --server 127.0.0.1:7070
  jax_digits.py --precondition none
"""

import argparse
import contextlib
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

import precondor
from precondor.server import LocalServer
from optax_precondor import gradients_and_rows, mlp, scale_by_precondor

FILE = pathlib.Path(__file__).parent / "data" / "digits.csv"
WIDTHS = (64, 48, 24, 8, 24, 48, 64)
BATCH = 128
RATES = {"server": 0.032, "none": 0.016}
FULL_PIXEL = 16
HELD_OUT = 359


def load():
    """Pixels 0 ... 1 for training and held out, the same split for every run, and the first weights."""
    pixels = np.loadtxt(FILE, delimiter=",", dtype=np.float32)[:, :-1] / FULL_PIXEL
    pixels = pixels[np.random.default_rng(1998).permutation(len(pixels))]
    random = np.random.default_rng(1)
    weights = []
    for d_in, d_out in zip(WIDTHS, WIDTHS[1:]):
        bound = (6 / (d_in + d_out))**0.5
        drawn = random.uniform(-bound, bound, (d_out, d_in)).astype(np.float32)
        weights.append(jnp.asarray(np.hstack([drawn, np.zeros((d_out, 1), np.float32)])))
    return pixels[HELD_OUT:], pixels[:HELD_OUT], weights


def join(stack, address):
    """A worker of a session on the server there, or without an address on one of its own."""
    layers = [precondor.Layer(f"fc{i}", d_out, d_in + 1, True) for i, (d_in, d_out) in enumerate(zip(WIDTHS, WIDTHS[1:]))]
    method = precondor.Method("mkor", {"representation": "LOW_RANK", "rank": 16})
    client = stack.enter_context(precondor.Client(address or stack.enter_context(LocalServer()).address))
    session = client.open_session(precondor.SessionSpec("jax-digits", layers, method))
    if session.created:
        stack.callback(session.close)
    return stack.enter_context(session.join())


def squared_error(output, y):
    return jnp.mean((output - y)**2)


def train(worker, rate, steps):
    rows, held_out, weights = load()
    adamw = optax.adamw(optax.linear_schedule(rate, 0.0, steps), weight_decay=0.01)
    optimizer = optax.chain(scale_by_precondor(worker, rate), adamw) if worker else optax.with_extra_args_support(adamw)
    state = optimizer.init(weights)

    @jax.jit
    def step(weights, state, x):
        loss, gradients, inputs, output_gradients = gradients_and_rows(mlp, squared_error, weights, x, x)
        updates, state = optimizer.update(gradients, state, weights, loss=loss, inputs=inputs, output_gradients=output_gradients)
        return optax.apply_updates(weights, updates), state, loss

    random = np.random.default_rng(1)
    for number in range(1, steps + 1):
        weights, state, loss = step(weights, state, rows[random.choice(len(rows), BATCH, replace=False)])
        if number % 50 == 0 or number == steps:
            look = squared_error(mlp(weights, [0.0] * len(weights), held_out)[0], held_out)
            print(f"step {number}: training loss {loss:.4f}, held-out loss {look:.4f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precondition", choices=tuple(RATES), default="server", help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=600, help="(%(default)s)")
    parser.add_argument("--server", metavar="ADDRESS", help="of a running server")
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        worker = join(stack, arguments.server) if arguments.precondition == "server" else None
        train(worker, RATES[arguments.precondition], arguments.steps)


if __name__ == "__main__":
    main()
