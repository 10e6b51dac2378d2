#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains an autoencoder of 8 x 8 handwritten digits in JAX, preconditioned by Precondor. Wants jax and optax, not torch.

examples:
  jax_digits.py                               starts a server of its own
  jax_digits.py --precondition none --json losses.json
  jax_digits.py --server 127.0.0.1:7070 --steps 300
"""

import argparse
import contextlib
import os
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import precondor
import program
from optax_precondor import gradients_and_rows, mlp, scale_by_precondor

FILE = program.ROOT / "client" / "python" / "examples" / "data" / "digits.csv"
WIDTHS = (64, 48, 24, 8, 24, 48, 64)
BATCH = 128
RATES = {"server": 0.032, "none": 0.016}
FULL_PIXEL = 16
HELD_OUT = 359


def load(seed):
    """Pixels 0 ... 1 for training and held out, the same split for every run, and the first weights."""
    pixels = np.loadtxt(FILE, delimiter=",", dtype=np.float32)[:, :-1] / FULL_PIXEL
    pixels = pixels[np.random.default_rng(1998).permutation(len(pixels))]
    random = np.random.default_rng(seed)
    weights = []
    for d_in, d_out in zip(WIDTHS, WIDTHS[1:]):
        bound = (6 / (d_in + d_out))**0.5
        drawn = random.uniform(-bound, bound, (d_out, d_in)).astype(np.float32)
        weights.append(jnp.asarray(np.hstack([drawn, np.zeros((d_out, 1), np.float32)])))
    return pixels[HELD_OUT:], pixels[:HELD_OUT], weights


def session(arguments):
    layers = [precondor.Layer(f"fc{i}", d_out, d_in + 1, True) for i, (d_in, d_out) in enumerate(zip(WIDTHS, WIDTHS[1:]))]
    method = precondor.Method("mkor", {"representation": "LOW_RANK", "rank": 16})
    return precondor.SessionSpec(f"jax-digits-{os.getpid()}-{time.time_ns()}", layers, method, seed=arguments.seed)


def open_worker(stack, arguments):
    address = arguments.server
    if not address:
        binary = arguments.server_binary or program.find_server_binary()
        address = stack.enter_context(program.OwnServer(binary)).address
    client = stack.enter_context(precondor.Client(address))
    opened = client.open_session(session(arguments))
    stack.callback(opened.close)
    return stack.enter_context(opened.join())


def squared_error(output, y):
    return jnp.mean((output - y)**2)


def train(arguments, worker, rate):
    """Losses of steps, held-out losses, seconds of steps."""
    rows, held_out_rows, weights = load(arguments.seed)
    adamw = optax.adamw(optax.linear_schedule(rate, 0.0, arguments.steps), weight_decay=0.01)
    optimizer = optax.chain(scale_by_precondor(worker, rate), adamw) if worker else optax.with_extra_args_support(adamw)
    state = optimizer.init(weights)

    @jax.jit
    def step(weights, state, x):
        loss, gradients, inputs, output_gradients = gradients_and_rows(mlp, squared_error, weights, x, x)
        updates, state = optimizer.update(gradients, state, weights, loss=loss, inputs=inputs, output_gradients=output_gradients)
        return optax.apply_updates(weights, updates), state, loss

    @jax.jit
    def look(weights):
        return squared_error(mlp(weights, [0.0] * len(weights), held_out_rows)[0], held_out_rows)

    random = np.random.default_rng(arguments.seed)
    losses, held_out, seconds = [], [], []
    for number in range(arguments.steps):
        begin = time.monotonic()
        weights, state, loss = step(weights, state, rows[random.choice(len(rows), BATCH, replace=False)])
        losses.append(float(loss))
        seconds.append(time.monotonic() - begin)
        if (number + 1) % arguments.eval_every == 0 or number + 1 == arguments.steps:
            held_out.append({"step": number + 1, "loss": float(look(weights))})
            if not arguments.quiet:
                print(f"jax-digits: step {number + 1} of {arguments.steps}, training loss {losses[-1]:.4f}, "
                      f"held-out loss {held_out[-1]['loss']:.4f}", file=sys.stderr)
    return losses, held_out, seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precondition", choices=tuple(RATES), default="server", help="(%(default)s)")
    parser.add_argument("--steps", type=program.positive, default=600, help="(%(default)s)")
    parser.add_argument("--learning-rate", type=program.positive_number, metavar="RATE", help="at first; it falls to 0 along a line")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--eval-every", type=program.positive, default=50, help="(%(default)s)")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.add_argument("--json", metavar="FILE", help="write settings, losses and times; - is standard output")
    program.add_server_arguments(parser)
    arguments = parser.parse_args()
    program.check_server_arguments(parser, arguments)
    program.open_json(arguments.json)
    rate = arguments.learning_rate or RATES[arguments.precondition]
    with contextlib.ExitStack() as stack:
        worker = open_worker(stack, arguments) if arguments.precondition == "server" else None
        losses, held_out, seconds = train(arguments, worker, rate)
    report = {"example": "jax-digits", "precondition": arguments.precondition, "learning_rate": rate,
              "steps": arguments.steps, "batch": BATCH, "seed": arguments.seed, "losses": losses, "held_out": held_out,
              "median_step_seconds": statistics.median(seconds)}
    if arguments.json:
        program.write_json(arguments.json, report)
    if arguments.json != "-":
        print(f"jax-digits: {arguments.precondition}, adamw at {rate:g}: training loss {losses[-1]:.4f}, held-out loss "
              f"{held_out[-1]['loss']:.4f} after {arguments.steps} steps of {1e3 * report['median_step_seconds']:.1f} ms")


if __name__ == "__main__":
    program.run(main)
