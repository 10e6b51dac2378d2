#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Steps of Preconditioner(model, ...) with the server on this host, by BERT-Large's 144 linear layers.

  muon        gradients and answers by a ring in the device's memory and, on another server, by a socket, in turns
  statistics  method mkor in low rank: what a step with statistics takes beyond one without, in turns

Writes rows of tests/bench/rows.py, or one line "no ..." where something is missing. A step's time is the clock's, from
step() until the device has done all. The limit of a step by the ring is a copy of all gradients and one of all answers.

Example: server_step.py muon --device cuda
"""

import argparse
import json
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "bench"))

# pylint: disable=wrong-import-position
import models
import rows

try:
    import torch
    from precondor import Method, Statistics
    from precondor.server import LocalServer
    from precondor.torch import Preconditioner
except ImportError as missing:
    rows.end_without(missing)

START_S = 120  # of a server on a machine that has not read CUDA's libraries before
RING_BYTES = 3 << 30  # above BERT-Large's gradients, so that a step's all fit
STEPS, SHORT_STEPS = 11, 2


def new_model(short, device):
    shapes, divisor = (models.BERT_LARGE.block, 32) if short else (models.BERT_LARGE.layers, 1)
    return torch.nn.ModuleList(torch.nn.Linear(d_in // divisor, d_out // divisor, bias=False, device=device)
                               for d_out, d_in in shapes)


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def timed(work, device):
    """Milliseconds."""
    synchronize(device)
    began = time.monotonic()
    work()
    synchronize(device)
    return (time.monotonic() - began) * 1e3


class Job:
    """A model and its server."""

    def __init__(self, short, device, method, *arguments, **options):
        self.device, self.model = device, new_model(short, device)
        memory = "1GiB" if short else "24GiB"
        self.server = LocalServer((f"--backend={device}", f"--memory-limit={memory}", *arguments), timeout=START_S)
        self.pre = Preconditioner(self.model, self.server.address, session="step", method=method, **options)
        self.pre.make_optimizer(1e-3)  # which Preconditioner asks for; no step uses it

    def new_gradients(self):
        for layer in self.model:
            layer.weight.grad = torch.randn_like(layer.weight)

    def backward(self):
        """Gradients by a backward pass, for statistics."""
        self.model.zero_grad()
        inputs = {}
        for layer in self.model:
            side = layer.weight.shape[1]
            inputs.setdefault(side, torch.randn(64, side, device=self.device))
            layer(inputs[side]).square().mean().backward()

    def step(self):
        return timed(self.pre.step, self.device)

    def close(self):
        self.pre.close(end_session=True)
        self.server.close()


def write(name, times, limit=None):
    median = statistics.median(times)
    ratio = limit and limit / median
    print(json.dumps(rows.row(f"server/{name}", median, "ms", limit, ratio, rows.spread(times))), flush=True)
    return median


def muon(short, device):
    jobs = {"ring": Job(short, device, "muon", f"--device-plane-bytes={RING_BYTES}" if device == "cuda" else "--device-plane-bytes=0"),
            "socket": Job(short, device, "muon", "--device-plane-bytes=0")}
    gradients = torch.cat([layer.weight.detach().flatten() for layer in jobs["ring"].model])
    answers, copies = torch.empty_like(gradients), []
    times = {name: [] for name in jobs}
    for step in range(1 + (SHORT_STEPS if short else STEPS)):
        for name, job in jobs.items():
            job.new_gradients()
            taken = job.step()
            if step > 0:  # the first one opens streams and rings
                times[name].append(taken)
        copies.append(timed(lambda: answers.copy_(gradients), device))
    for name in jobs:
        write(f"muon/{name}", times[name], 2 * statistics.median(copies))
    use = jobs["ring"].pre.device_plane()
    if device == "cuda" and use["over_socket"]:
        sys.exit(f"expected all gradients in the ring, got {use}")
    for job in jobs.values():
        job.close()


def mkor_statistics(short, device):
    method = Method("mkor", {"representation": "LOW_RANK", "rank": 8 if short else 128, "damping": 1.0})
    job = Job(short, device, method, statistics=Statistics(inv_freq=2, warmup_steps=0))
    times = {True: [], False: []}
    for step in range(2 * (1 + (SHORT_STEPS if short else STEPS))):
        job.backward()
        taken = job.step()
        if step >= 2:
            times[step % 2 == 0].append(taken)
    write("mkor/statistics", times[True])
    write("mkor/without", times[False])
    beyond = [with_them - without for with_them, without in zip(times[True], times[False])]
    write("mkor/beyond", beyond)
    job.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("muon", "statistics"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--short", action="store_true", help="one block, of layers a part as long")
    arguments = parser.parse_args()
    rows.require(torch, arguments.device)
    torch.manual_seed(1)
    {"muon": muon, "statistics": mkor_statistics}[arguments.kind](arguments.short, arguments.device)


if __name__ == "__main__":
    main()
