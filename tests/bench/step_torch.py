#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A step of method mkor in torch operations: what a package without kernels of its own does.

Per layer and side J is a dense f32 matrix: J <- .95 J + .05 I, u = J v, J <- J - u u' / (1 + v'u) (docs/use/methods/mkor.md,
REFERENCE), then a look at max |J|; the gradient becomes J_out D J_in, rescaled to |D|. All of it works in place where
torch can. tests/bench/step_rows.py runs it by lines on the standard input:

    make BLOCKS   factors and gradients of that many of BERT-Large's 24 blocks; answered by the factors' bytes
    step THREADS  answered by the seconds of one step: of processor time for one thread, else by the clock

The first line of output is "ready", after the recursion was compared with one in doubles.
"""

import sys
import time

import numpy
import torch

GAMMA = 0.95
BLOCK = [(1024, 1024)] * 4 + [(4096, 1024), (1024, 4096)]  # d_out, d_in
VECTORS = 512


def update(inverse, vector):
    """One rank-1 update of J in place."""
    inverse.mul_(GAMMA)
    inverse.diagonal().add_(1 - GAMMA)
    product = inverse.mv(vector)
    inverse.addr_(product, product, alpha=-1 / (1 + float(vector.dot(product))))
    return float(torch.linalg.vector_norm(inverse, float("inf")))


def precondition(out_inverse, gradient, in_inverse):
    answer = out_inverse.mm(gradient).mm(in_inverse)
    return answer.mul_(float(gradient.norm()) / float(answer.norm()))


def check():
    """The same in doubles, from the definition, by numpy."""
    side_out, side_in = 48, 80
    random = numpy.random.default_rng(1)
    expected = [numpy.eye(side_out), numpy.eye(side_in)]
    factors = [torch.eye(side_out), torch.eye(side_in)]
    for _ in range(20):
        for side, inverse in enumerate(factors):
            vector = random.standard_normal(len(inverse))
            update(inverse, torch.tensor(vector, dtype=torch.float32))
            blended = GAMMA * expected[side] + (1 - GAMMA) * numpy.eye(len(inverse))
            product = blended @ vector
            expected[side] = blended - numpy.outer(product, product) / (1 + vector @ product)
    gradient = random.standard_normal((side_out, side_in))
    tensor = torch.tensor(gradient, dtype=torch.float32)
    got = precondition(factors[0], tensor, factors[1]).double().numpy()
    want = expected[0] @ gradient @ expected[1]
    want *= numpy.linalg.norm(gradient) / numpy.linalg.norm(want)
    error = numpy.linalg.norm(got - want) / numpy.linalg.norm(want)
    if not error < 1e-4:
        raise AssertionError(f"torch's step is off by {error}, expected at most 1e-4")


class Model:
    def __init__(self, blocks):
        torch.manual_seed(1)
        self.vectors = torch.randn(VECTORS, 4096)
        self.layers = []
        for d_out, d_in in BLOCK * blocks:
            self.layers.append((torch.eye(d_out), torch.randn(d_out, d_in), torch.eye(d_in)))
        self.steps = 0

    def factor_bytes(self):
        return sum(4 * (out_inverse.numel() + in_inverse.numel()) for out_inverse, _, in_inverse in self.layers)

    def step(self, threads):
        torch.set_num_threads(threads)
        clock = time.thread_time if threads == 1 else time.monotonic
        start = clock()
        self.all_layers()
        return clock() - start

    def all_layers(self):
        for i, (out_inverse, gradient, in_inverse) in enumerate(self.layers):
            row = self.steps + 7 * i
            update(in_inverse, self.vectors[row % VECTORS, :len(in_inverse)])
            update(out_inverse, self.vectors[(row + 3) % VECTORS, :len(out_inverse)])
            precondition(out_inverse, gradient, in_inverse)
        self.steps += 1


def main():
    model = None
    print("ready", flush=True)
    for line in sys.stdin:
        command, argument = line.split()
        if command == "make":
            model = Model(int(argument))
            print(model.factor_bytes(), flush=True)
        else:
            print(model.step(int(argument)), flush=True)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    check()
    main()
