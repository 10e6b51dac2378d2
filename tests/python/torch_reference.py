# SPDX-License-Identifier: Apache-2.0
"""Training in f64 with mkor and kfac inside the process, from the formulas of docs/use/methods and docs/develop/math/statistics.md.

Small nets alone: patches and factors are made one by one, as they are defined.
"""

import dataclasses
import itertools
import math

import torch
from torch import nn

GAMMA, LAMBDA = 0.9, 1.0
INV_FREQ, WARMUP = 3, 4
FACTOR_DECAY, KFAC_DAMPING, KL_CLIP = 0.95, 0.05, 1e-3


@dataclasses.dataclass
class Case:
    """A net of modules in a row, its inputs and targets, and how it is trained: SGD with momentum, half the mean squared
    error over samples."""

    make: callable
    input_shape: tuple
    outputs: int
    method: str = "mkor"
    steps: int = 10
    batch: int = 8
    rate: float = 0.05
    momentum: float = 0.5

    def model(self):
        torch.manual_seed(3)
        return self.make()

    def batch_of(self, step):
        random = torch.Generator().manual_seed(100 + step)
        x = torch.randn(self.batch, *self.input_shape, generator=random, dtype=torch.float64)
        y = torch.stack([x.flatten(1).sum(1), x.flatten(1)[:, 0]] + [torch.ones(self.batch, dtype=x.dtype)] *
                        (self.outputs - 2), dim=1)
        return x, torch.tanh(y)


def loss_of(output, y):
    """Half the squared error of a sample, meaned over samples; the output may have rows of its own (tokens)."""
    output = output.flatten(1)
    return 0.5 * ((output[:, :y.shape[1]] - y.to(output.dtype))**2).sum(1).mean()


CASES = {
    "mlp": Case(lambda: nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 6, bias=False), nn.Tanh(),
                                      nn.Linear(6, 3)), (5,), 3),
    "tokens": Case(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), (5, 4), 3),
    "conv": Case(lambda: nn.Sequential(nn.Conv2d(2, 4, (3, 2), padding=1, groups=2), nn.ReLU(inplace=True),
                                       nn.Conv2d(4, 3, 2, stride=2, dilation=2, bias=False), nn.Tanh(), nn.Flatten(),
                                       nn.Linear(12, 3)), (2, 6, 5), 3),
    "conv1d": Case(lambda: nn.Sequential(nn.Conv1d(3, 4, 3, padding=1, padding_mode="circular"), nn.Tanh(),
                                         nn.Conv1d(4, 3, 2, stride=2), nn.Flatten(), nn.Linear(12, 2)), (3, 8), 2),
    "kfac": Case(lambda: nn.Sequential(nn.Conv2d(1, 3, 3, padding="same"), nn.Tanh(), nn.Flatten(), nn.Linear(48, 4),
                                       nn.Tanh(), nn.Linear(4, 2)), (1, 4, 4), 2, method="kfac", rate=0.3),
}


def padded(module, x):
    """The input as the kernel sees it."""
    if module.padding == "same":
        total = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size)]
        sides = [(t // 2, t - t // 2) for t in total]
    else:
        sides = [(p, p) for p in module.padding]
    flat = [amount for side in reversed(sides) for amount in side]
    return nn.functional.pad(x, flat, mode="constant" if module.padding_mode == "zeros" else module.padding_mode)


def rows_of(module, x, dz, group):
    """(input rows, output gradient rows, samples that the loss is a mean over) of one group, by the definition."""
    if isinstance(module, nn.Linear):
        a, g = x.reshape(-1, x.shape[-1]), dz.reshape(-1, dz.shape[-1])
        return a, g, len(a)
    x = padded(module, x)
    per_in, per_out = x.shape[1] // module.groups, dz.shape[1] // module.groups
    a, g = [], []
    for sample in range(len(x)):
        for place in itertools.product(*map(range, dz.shape[2:])):
            patch = []
            for channel in range(group * per_in, (group + 1) * per_in):
                for offset in itertools.product(*map(range, module.kernel_size)):
                    at = [p * s + o * d for p, s, o, d in zip(place, module.stride, offset, module.dilation)]
                    patch.append(x[(sample, channel, *at)])
            a.append(torch.stack(patch))
            g.append(dz[(sample, slice(group * per_out, (group + 1) * per_out), *place)])
    return torch.stack(a), torch.stack(g), len(x)


@dataclasses.dataclass
class Factors:
    """The factors of one layer."""

    a: torch.Tensor
    g: torch.Tensor
    updates: int = 0

    def preconditioned(self, method, d):
        if method == "mkor":
            if self.updates == 0:
                return d
            u = self.inverse(self.g) @ d @ self.inverse(self.a)
            return u * d.norm() / u.norm()
        damp = KFAC_DAMPING
        eye = lambda m: damp * torch.eye(len(m), dtype=m.dtype)  # noqa: E731
        return torch.linalg.inv(self.g + eye(self.g)) @ d @ torch.linalg.inv(self.a + eye(self.a))

    def inverse(self, moment):
        corrected = moment / (1 - GAMMA**self.updates)
        mean = corrected.trace() / len(corrected)
        return torch.linalg.inv(corrected + LAMBDA * mean * torch.eye(len(corrected), dtype=moment.dtype))

    def update(self, method, parts):
        """parts: each rank's (a rows with the bias' 1, g rows scaled)."""
        self.updates += 1
        decay = GAMMA if method == "mkor" else FACTOR_DECAY
        for side, place in (("a", 0), ("g", 1)):
            new = 0
            for part in parts:
                rows = part[place]
                if method == "mkor":  # PER_WORKER_MEAN
                    rows = rows.mean(0, keepdim=True)
                new = new + rows.T @ rows / len(rows) / len(parts)
            setattr(self, side, decay * getattr(self, side) + (1 - decay) * new)


def forward(model, x):
    """The output, and (module, input, output) of every layer; operations in place do not reach what is kept."""
    taps = []
    for module in model:
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d)):
            z = module(x)
            z.retain_grad()
            taps.append((module, x.detach(), z))
            x = z.clone()
        else:
            x = module(x)
    return x, taps


def matrix(module, weight, bias, group):
    per = module.weight.shape[0] // getattr(module, "groups", 1)
    part = slice(group * per, (group + 1) * per)
    w = weight[part].reshape(per, -1)
    return w if bias is None else torch.cat([w, bias[part, None]], 1)


def train(case, world_size=1, skipped=()):
    """The losses (the ranks' mean) and last weights. Rank r has every world_size-th sample. In the steps of `skipped`
    nothing changes."""
    model = case.model().double()
    optimizer = torch.optim.SGD(model.parameters(), case.rate, momentum=case.momentum)
    factors, losses = {}, []
    for step in range(case.steps):
        x, y = case.batch_of(step)
        optimizer.zero_grad()
        loss, ranks = 0.0, []
        for rank in range(world_size):
            output, taps = forward(model, x[rank::world_size])
            own = loss_of(output, y[rank::world_size])
            (own / world_size).backward()
            loss += own.item() / world_size
            ranks.append(taps)
        losses.append(loss)
        if step in skipped:
            continue
        answers = []
        for taps in zip(*ranks):
            module = taps[0][0]
            for group in range(getattr(module, "groups", 1)):
                bias = module.bias
                parts = []
                for _, inputs, z in taps:
                    a, g, samples = rows_of(module, inputs, z.grad * world_size, group)
                    if bias is not None:
                        a = torch.cat([a, torch.ones(len(a), 1, dtype=a.dtype)], 1)
                    parts.append((a, samples * g))
                key = (module, group)
                if key not in factors:
                    eye = case.method == "kfac"
                    factors[key] = Factors(*((torch.eye if eye else lambda d, dtype: torch.zeros(d, d, dtype=dtype))(
                        part.shape[1], dtype=torch.float64) for part in parts[0]))
                if step < WARMUP or step % INV_FREQ == 0:
                    factors[key].update(case.method, parts)
                d = matrix(module, module.weight.grad, None if bias is None else bias.grad, group)
                answers.append((module, group, d, factors[key].preconditioned(case.method, d)))
        scale = 1.0
        if case.method == "kfac":
            product = abs(sum((d * u).sum().item() for _, _, d, u in answers))
            scale = min(1.0, math.sqrt(KL_CLIP / (case.rate**2 * product)))
        for module, group, d, u in answers:
            part = slice(group * len(d), (group + 1) * len(d))
            columns = d.shape[1] - (module.bias is not None)
            module.weight.grad[part] = scale * u[:, :columns].reshape(module.weight.grad[part].shape)
            if module.bias is not None:
                module.bias.grad[part] = scale * u[:, -1]
        optimizer.step()
    return losses, [parameter.detach() for parameter in model.parameters()]
