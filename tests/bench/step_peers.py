#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The step of a model's hidden linear layers in torch, as a trainer without a server would make it.

  muon   torch.optim.Muon: five Newton-Schulz iterations a matrix, in bf16
  soap   HeavyBall's SOAP, without torch.compile: bases refreshed every tenth step, for sides up to 2048
  mkor   dense factors, rule REFERENCE, in TF32: all layers of a shape in one batched product, no wait of the host

Writes a row of tests/bench/rows.py, the median of the steps, after half of them and again after all, or one line "no ..." where
something is missing. Times are the device's, between two CUDA events, or on a CPU the clock's. The row of soap leaves out the
steps that refresh, which have a row of their own.

Examples: step_peers.py soap --device cuda; step_peers.py muon_llama_1b
"""

import argparse
import json
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

# pylint: disable=wrong-import-position
import models
import rows

GAMMA = 0.95
REFRESH_STEPS, MOST_SIDE = 10, 2048


def muon(layers):
    """Returns a function that makes a step."""
    optimizer = torch.optim.Muon(layers, lr=1e-3)
    return optimizer.step


def soap(layers):
    try:
        import heavyball  # pylint: disable=import-outside-toplevel
    except ImportError as error:
        rows.end_without(error)
    heavyball.utils.compile_mode = None  # to compile the lists of 144 layers takes longer than a phase has
    optimizer = heavyball.SOAP(layers, lr=1e-3, precondition_frequency=REFRESH_STEPS, max_precond_dim=MOST_SIDE)
    return optimizer.step


class Mkor:
    """Layers of one shape: gradients [n, d_out, d_in], and both sides' factors, [n, d, d]."""

    def __init__(self, gradients):
        self.gradients = gradients
        count, *sides = gradients.shape
        eyes = [torch.eye(side, device=gradients.device).repeat(count, 1, 1) for side in sides]
        self.factors = eyes
        self.vectors = [torch.randn(count, side, 1, device=gradients.device) for side in sides]

    def step(self):
        """J <- g J + (1 - g) I, then J <- J - u u' / (1 + v'u) for u = J v; the answer is J_out D J_in, as long as D."""
        for inverse, vector in zip(self.factors, self.vectors):
            inverse.mul_(GAMMA)
            inverse.diagonal(dim1=1, dim2=2).add_(1 - GAMMA)
            product = inverse.bmm(vector)
            inverse.baddbmm_(product / (-1 - (vector * product).sum(1, keepdim=True)), product.transpose(1, 2))
        answer = self.factors[0].bmm(self.gradients).bmm(self.factors[1])
        lengths = [torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True) for x in (self.gradients, answer)]
        return answer.mul_(lengths[0] / lengths[1])


def mkor(layers):
    torch.set_float32_matmul_precision("high")
    shapes = {}
    for layer in layers:
        shapes.setdefault(layer.shape, []).append(layer.grad)
    groups = [Mkor(torch.stack(gradients)) for gradients in shapes.values()]
    return lambda: [group.step() for group in groups]


KINDS = {"muon": muon, "soap": soap, "mkor": mkor, "muon_llama_1b": muon}


def timed(step, device):
    """Seconds of one step."""
    if device == "cpu":
        began = time.monotonic()
        step()
        return time.monotonic() - began
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3


def check(layers, before, kind):
    """An optimizer that does nothing would be fast."""
    for layer, old in zip(layers, before):
        if not torch.isfinite(layer).all() or torch.equal(layer, old):
            raise AssertionError(f"{kind}: expected steps that change every layer, to finite values")


def write(kind, times):
    refreshes = len(times) // REFRESH_STEPS if kind == "soap" else 0
    steady = len(times) - refreshes
    for name, found in ((kind, sorted(times)[:steady]), (f"{kind}/refresh", sorted(times)[steady:])):
        if found:
            print(json.dumps(rows.row(f"step/torch/{name}", statistics.median(found), "ms", quartiles=rows.spread(found))), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--short", action="store_true", help="one block, of layers a sixteenth as long")
    arguments = parser.parse_args()
    device, kind = arguments.device, arguments.kind
    rows.require(torch, device, "Muon" if KINDS[kind] is muon else "AdamW")
    torch.manual_seed(1)
    model = models.of_step(kind)
    shapes, divisor = (model.block, 16) if arguments.short else (model.layers, 1)
    layers = [torch.nn.Parameter(torch.randn(d_out // divisor, d_in // divisor, device=device)) for d_out, d_in in shapes]
    before = [layer.detach().clone() for layer in layers[:len(model.block)]]

    def new_gradients():
        for layer in layers:
            layer.grad = torch.randn_like(layer) if layer.grad is None else layer.grad.normal_()

    new_gradients()  # the kinds keep them or look at them
    step = KINDS[kind](layers)
    times = []
    for _ in range(3):  # the first ones compile and make the state
        new_gradients()  # an optimizer may take them
        timed(step, device)
    if kind != "mkor":  # which leaves the layers alone
        check(layers, before, kind)
    for _ in range(1 if arguments.short else 2):
        for _ in range(3 if arguments.short else REFRESH_STEPS):
            new_gradients()
            times.append(timed(step, device) * 1e3)
        write(kind, times)


if __name__ == "__main__":
    try:
        import torch
    except ImportError as missing:
        rows.end_without(missing)
    main()
