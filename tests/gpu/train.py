#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a model of GPT-2 small's size (124 M parameters, random start) on the sources of the installed torch, three times in
turns: by AdamW, by torch.optim.Muon with AdamW for the rest, and by Preconditioner(model, "local").

bf16 autocast and torch.compile; a rate for each that suits it, risen for a tenth of the steps and then lowered along a
line. Tokens are the text's most frequent words, and single characters for the rest. After each turn it writes rows of
tests/bench/rows.py: held-out loss, milliseconds a step, and the number of steps, which --seconds can end before the last. At the
end come device memory of the trainer and of the server, and for one step the trainer's heaviest kernels. Kernels of the server,
another process, are not among them: precondor/answers is the time from the end of the backward pass to the answers, which is
the server's and that of the transfers. One line "no ..." says what is missing.

Example: train.py --device cuda --steps 300
"""

import argparse
import collections
import json
import math
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[1] / folder) for folder in (".", "bench")]

# pylint: disable=wrong-import-position
import rows
from gpu import profiler
from gpu.server_step import timed  # ends the program without torch or the client
import torch
from precondor.torch import Preconditioner
from torch import nn
from torch.nn import functional

TOKEN = re.compile(r"[A-Za-z_]+|\d| +|\n|[^\sA-Za-z_\d]|\s")
VOCABULARY = 50304  # GPT-2's, rounded up
STEPS_A_TURN = 25
WEIGHT_DECAY = 0.01
KERNELS = 8  # that the report shows
KERNEL_CHARACTERS = 60  # of a fused kernel's name


def tokens(vocabulary, characters):
    """Numbers of the tokens of the .py files of torch's package, and how many there are of them."""
    text = []
    for path in sorted(pathlib.Path(torch.__file__).parent.rglob("*.py")):
        text.append(path.read_text(encoding="utf-8", errors="replace"))
        characters -= len(text[-1])
        if characters < 0:
            break
    words = TOKEN.findall("\n".join(text))
    letters = {letter: number for number, letter in enumerate(sorted({letter for word in set(words) for letter in word}))}
    known = dict(letters)
    for word, _ in collections.Counter(words).most_common():
        if len(known) == vocabulary:
            break
        known.setdefault(word, len(known))
    numbers = (known[word] if word in known else None for word in words)
    flat = [one for word, number in zip(words, numbers) for one in ([number] if number is not None else [letters[x] for x in word])]
    return torch.tensor(flat), len(known)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, dim=-1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Gpt(nn.Module):
    """GPT-2 with tied embeddings."""

    def __init__(self, vocabulary, length, width, heads, blocks):
        super().__init__()
        self.words, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * blocks) if name.endswith(("out.weight", "down.weight")) else 1))
        self.head.weight = self.words.weight

    def forward(self, tokens_in, tokens_out):
        x = self.words(tokens_in) + self.positions.weight[:tokens_in.shape[1]]
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), tokens_out.flatten())


class Alone:
    """Optimizers without a server."""

    def __init__(self, model, rate, muon_rate=None):
        matrices = [p for name, p in model.named_parameters() if muon_rate and p.dim() == 2 and name.startswith("blocks.")]
        taken = set(map(id, matrices))
        rest = [p for p in model.parameters() if id(p) not in taken]
        self.optimizers = [torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY)]
        if matrices:
            self.optimizers.append(torch.optim.Muon(matrices, lr=muon_rate, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"))

    def precondition(self, loss):
        pass

    def close(self):
        pass


class Ours(Alone):
    def __init__(self, model, rate):  # pylint: disable=super-init-not-called
        self.pre = Preconditioner(model, "local")
        self.optimizers = [self.pre.make_optimizer(rate, weight_decay=WEIGHT_DECAY)]

    def precondition(self, loss):
        self.pre.step(loss)

    def close(self):
        self.pre.close(end_session=True)


KINDS = {"adamw": lambda model: Alone(model, 6e-4), "muon": lambda model: Alone(model, 6e-4, muon_rate=2e-3),
         "precondor": lambda model: Ours(model, 2e-3)}


class Run:
    """One model and what trains it."""

    def __init__(self, kind, sizes, vocabulary, device, steps):
        self.kind, self.device, self.steps = kind, device, steps
        torch.manual_seed(1)
        before = allocated(device)
        self.model = Gpt(vocabulary, **sizes).to(device)
        self.trainer = KINDS[kind](self.model)
        self.compiled = torch.compile(self.model)  # the kinds share what is compiled
        self.rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.trainer.optimizers]
        self.done, self.times, self.bytes = 0, [], allocated(device) - before

    def loss(self, model, batch):
        with torch.autocast(self.device, torch.bfloat16):
            return model(batch[:, :-1], batch[:, 1:])

    def backward(self, batch):
        loss = self.loss(self.compiled, batch)
        loss.backward()
        return loss

    def step(self, batch):
        share = min((self.done + 1) / max(self.steps // 10, 1), (self.steps - self.done) / self.steps)
        for optimizer, rates in zip(self.trainer.optimizers, self.rates):
            for group, rate in zip(optimizer.param_groups, rates):
                group["lr"] = rate * share
        self.trainer.precondition(self.backward(batch))
        self.update()

    def update(self):
        for optimizer in self.trainer.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.done += 1

    def turn(self, batches):
        first, before = self.done == 0, allocated(self.device)
        for place, batch in enumerate(batches):
            taken = timed(lambda batch=batch: self.step(batch), self.device)
            if self.done > 2 and place:  # the first steps compile; the first of a turn follows other kernels
                self.times.append(taken)
        if first:
            self.bytes += allocated(self.device) - before  # the optimizer's state; gradients are gone

    @torch.no_grad()
    def held_out(self, batches):
        """By the model as it is: without gradients it would be compiled once more."""
        return statistics.fmean(float(self.loss(self.model, batch)) for batch in batches)


def allocated(device):
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def server_bytes():
    """Device memory of other processes than this one by nvidia-smi, or None."""
    try:
        said = subprocess.run(["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"], check=True,
                              capture_output=True, text=True, timeout=30).stdout
        return sum(int(used) << 20 for pid, used in (line.split(", ") for line in said.splitlines()) if int(pid) != os.getpid())
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def heaviest(run, batch):
    """[(kernel, milliseconds)] of one step, the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run.step(batch)
        torch.cuda.synchronize()
    spent = collections.Counter()
    for event in profile.key_averages():
        spent[profiler.short_name(event.key)[:KERNEL_CHARACTERS]] += event.self_device_time_total / 1e3
    return spent.most_common(KERNELS)


def answers(run, batches):
    """Milliseconds from the end of each backward pass on the device to the answers."""
    times = []
    for batch in batches:
        loss = run.backward(batch)
        times.append(timed(lambda loss=loss: run.trainer.precondition(loss), run.device))
        run.update()
    return times


def write(name, value, unit, quartiles=None):
    print(json.dumps(rows.row(f"train/{name}", value, unit, quartiles=quartiles)), flush=True)


def write_times(name, times):
    write(name, statistics.median(times), "ms", rows.spread(times))


def train(runs, new_batches, tests, steps, turn, end):
    """All kinds by equal batches in turns of so many steps. After `end` no turn begins."""
    while runs[0].done < steps and time.monotonic() < end:
        shared = new_batches(min(turn, steps - runs[0].done))
        for run in runs:
            run.turn(shared)
            write(f"{run.kind}/loss", run.held_out(tests), "nats")
            write_times(f"{run.kind}/step", run.times)
        write("steps", runs[0].done, "")


def measure(runs, batches, device):
    """Measures what belongs to no turn: the answers, memory and kernels."""
    write_times("precondor/answers", answers(runs[-1], batches))
    if device != "cuda":
        return
    other = server_bytes()
    if other is not None:
        write("precondor/server_memory", other / 2**20, "MiB")
    for run in runs:
        write(f"{run.kind}/memory", run.bytes / 2**20, "MiB")
        for name, spent in heaviest(run, batches[0]):
            write(f"{run.kind}/kernel/{name}", spent, "ms")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=math.inf, help="after so many from the start no turn begins")
    parser.add_argument("--short", action="store_true", help="a small model and 6 steps")
    arguments = parser.parse_args()
    began, device, short = time.monotonic(), arguments.device, arguments.short
    rows.require(torch, device, "Muon")
    sizes = {"length": 32, "width": 64, "heads": 2, "blocks": 2} if short else {"length": 1024, "width": 768, "heads": 12, "blocks": 12}
    steps, turn, count = (6, 3, 2) if short else (arguments.steps, STEPS_A_TURN, 16)
    text, vocabulary = tokens(300 if short else VOCABULARY, 100_000 if short else 30_000_000)
    held = text[-len(text) // 20:]
    generator = torch.Generator().manual_seed(1)

    def batches(source, number):
        """[count, length + 1] each, equal for all kinds."""
        starts = torch.randint(len(source) - sizes["length"] - 1, (number, count), generator=generator)
        return [torch.stack([source[at:at + sizes["length"] + 1] for at in one]).to(device) for one in starts.tolist()]

    tests = batches(held, 2 if short else 4)
    runs = [Run(kind, sizes, vocabulary, device, steps) for kind in KINDS]
    parameters = sum(p.numel() for p in runs[0].model.parameters())
    print(f"{parameters / 1e6:.1f} M parameters, {len(text)} tokens, vocabulary {vocabulary}", flush=True)
    train(runs, lambda number: batches(text[:-len(held)], number), tests, steps, turn, began + arguments.seconds)
    measure(runs, tests, device)
    for run in runs:
        run.trainer.close()


if __name__ == "__main__":
    main()
