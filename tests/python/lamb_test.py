#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""precondor.torch.Lamb against LAMB in f64, scalar by scalar, from Algorithm 2 of You et al. 2019 (arXiv:1904.00962).

Exits with 77 where torch is missing, and says so. Tolerance: an update in f32 is off by some ten roundings of 6e-8 of
its length; each of the 40 steps may add that much.
"""

import copy
import io
import math
import unittest

import test_program
test_program.import_torch()
import torch

from precondor.torch import Lamb

STEPS = 40
RATE = 0.05
SHAPES = ((4, 3), (5,), (2, 3, 2))
TOLERANCE = STEPS * RATE * 10 * 2**-24


def norm(x):
    return math.sqrt(sum(value * value for value in x))


class Reference:
    """One tensor as a list of doubles."""

    def __init__(self, w):
        self.w, self.m, self.v, self.steps = list(w), [0.0] * len(w), [0.0] * len(w), 0

    def step(self, g, decay, adapt, rate=RATE, betas=(0.9, 0.999), eps=1e-6):
        self.steps += 1
        update = []
        for i, gradient in enumerate(g):
            self.m[i] = betas[0] * self.m[i] + (1 - betas[0]) * gradient
            self.v[i] = betas[1] * self.v[i] + (1 - betas[1]) * gradient**2
            m_hat = self.m[i] / (1 - betas[0]**self.steps)
            v_hat = self.v[i] / (1 - betas[1]**self.steps)
            update.append(m_hat / (math.sqrt(v_hat) + eps) + decay * self.w[i])
        above, below = norm(self.w), norm(update)
        ratio = above / below if adapt and above > 0 and below > 0 else 1.0
        self.w = [w - rate * ratio * u for w, u in zip(self.w, update)]


def parameters(seed=3, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def set_gradients(params, step, scale=1.0):
    generator = torch.Generator().manual_seed(1000 + step)
    for p in params:
        p.grad = (scale * torch.randn(p.shape, generator=generator)).to(p.dtype)


class LambTest(unittest.TestCase):
    def follow(self, params, optimizer, decays, adapts, max_grad_norm, scale=1.0):
        """Steps of the optimizer beside the reference."""
        expected = [Reference(p.detach().flatten().tolist()) for p in params]
        first = [list(one.w) for one in expected]
        for step in range(STEPS):
            set_gradients(params, step, scale)
            gradients = [p.grad.flatten().tolist() for p in params]
            total = norm([value for g in gradients for value in g])
            divisor = max(1.0, total / max_grad_norm) if max_grad_norm else 1.0
            optimizer.step()
            for one, g, decay, adapt in zip(expected, gradients, decays, adapts):
                one.step([value / divisor for value in g], decay, adapt)
        for p, one, before in zip(params, expected, first):
            size = max(map(abs, one.w + before))
            for got, wanted in zip(p.detach().flatten().tolist(), one.w):
                self.assertAlmostEqual(got, wanted, delta=TOLERANCE * max(1, size))
            self.assertGreater(norm([a - b for a, b in zip(one.w, before)]), 0.1, "it moved, so a wrong answer shows")

    def test_is_the_papers_formula(self):
        params = parameters()
        optimizer = Lamb(params, lr=RATE, weight_decay=0.1, max_grad_norm=0, nvlamb=True)
        self.follow(params, optimizer, [0.1] * 3, [True] * 3, 0)

    def test_without_decay_the_ratio_is_one_unless_nvlamb(self):
        for nvlamb in (False, True):
            params = parameters()
            groups = [{"params": params[:1], "weight_decay": 0.2}, {"params": params[1:]}]
            optimizer = Lamb(groups, lr=RATE, weight_decay=0, max_grad_norm=0, nvlamb=nvlamb)
            with self.subTest(nvlamb=nvlamb):
                self.follow(params, optimizer, [0.2, 0, 0], [True, nvlamb, nvlamb], 0)

    def test_clips_by_the_norm_of_all_groups(self):
        for scale in (0.01, 1.0, 100.0):
            params = parameters()
            optimizer = Lamb([{"params": params[:2]}, {"params": params[2:]}], lr=RATE, max_grad_norm=0.5)
            with self.subTest(scale=scale):
                self.follow(params, optimizer, [0.01] * 3, [True] * 3, 0.5, scale)

    def test_zero_weights_and_zero_gradients_make_no_nan(self):
        p = torch.nn.Parameter(torch.zeros(3))
        optimizer = Lamb([p], lr=RATE)
        p.grad = torch.zeros(3)
        optimizer.step()
        self.assertEqual(p.tolist(), [0, 0, 0])
        p.grad = torch.tensor([1.0, 0.0, -1.0])
        optimizer.step()  # |w| = 0: a plain step
        self.assertTrue(torch.isfinite(p).all())
        self.assertLess(p[0].item(), 0)
        self.assertEqual(p[1].item(), 0)

    def test_a_parameter_without_a_gradient_is_left_alone(self):
        params = parameters()
        before = params[1].detach().clone()
        optimizer = Lamb(params, lr=RATE)
        set_gradients(params, 0)
        params[1].grad = None
        optimizer.step()
        self.assertTrue(torch.equal(params[1], before))
        self.assertNotIn(params[1], optimizer.state)

    def test_a_loaded_state_goes_on_bitwise(self):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            with self.subTest(dtype=dtype):
                params = parameters(dtype=dtype)
                optimizer = Lamb(params, lr=RATE)
                for step in range(5):
                    set_gradients(params, step)
                    optimizer.step()
                file = io.BytesIO()
                torch.save(optimizer.state_dict(), file)
                file.seek(0)
                others = [torch.nn.Parameter(p.detach().clone()) for p in params]
                loaded = Lamb(others, lr=1, max_grad_norm=0)
                loaded.load_state_dict(torch.load(file))
                for step in range(5, 10):
                    for each, one in ((params, optimizer), (others, loaded)):
                        set_gradients(each, step)
                        one.step()
                for p, other in zip(params, others):
                    self.assertTrue(torch.equal(p, other))

    def test_loading_copies(self):
        params = parameters()
        optimizer = Lamb(params, lr=RATE)
        set_gradients(params, 0)
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        kept = copy.deepcopy(saved)
        loaded = Lamb(params, lr=RATE)
        loaded.load_state_dict(saved)
        loaded.step()
        for name, moment in ((0, "exp_avg"), (2, "exp_avg_sq")):
            self.assertTrue(torch.equal(saved["state"][name][moment], kept["state"][name][moment]))

    def test_a_copied_optimizer_goes_on_bitwise(self):
        params = parameters()
        optimizer = Lamb(params, lr=RATE, max_grad_norm=0.5)
        set_gradients(params, 0)
        optimizer.step()
        others, copied = copy.deepcopy((params, optimizer))
        for each, one in ((params, optimizer), (others, copied)):
            set_gradients(each, 1)
            one.step()
        for p, other in zip(params, others):
            self.assertTrue(torch.equal(p, other))

    def test_half_precision_parameters_have_moments_of_f32(self):
        """A second moment of 1e-10 is nothing in f16."""
        p = torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
        optimizer = Lamb([p], lr=RATE, weight_decay=0)
        p.grad = torch.full((4,), 1e-5, dtype=torch.float16)
        optimizer.step()
        self.assertEqual(optimizer.state[p]["exp_avg_sq"].dtype, torch.float32)
        self.assertGreater(optimizer.state[p]["exp_avg_sq"].min().item(), 0)
        self.assertTrue(torch.isfinite(p).all())
        self.assertTrue((p < 1).all())

    def test_takes_a_closure_and_a_schedule(self):
        params = parameters()
        optimizer = Lamb(params, lr=RATE)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step else 1.0)

        def closure():
            optimizer.zero_grad()
            loss = sum((p**2).sum() for p in params)
            loss.backward()
            return loss

        before = optimizer.step(closure).item()
        schedule.step()
        after = optimizer.step(closure).item()  # at a rate of 0
        self.assertLess(after, before)
        self.assertEqual(optimizer.step(closure).item(), after)

    def test_refuses_by_name_and_changes_nothing(self):
        for options, name in (({"lr": -1}, "lr"), ({"betas": (1.0, 0.9)}, r"betas\[0\]"), ({"betas": (0.9, -0.1)}, r"betas\[1\]"),
                              ({"eps": 0}, "eps"), ({"weight_decay": float("nan")}, "weight_decay"),
                              ({"max_grad_norm": -1}, "max_grad_norm")):
            with self.subTest(name), self.assertRaisesRegex(ValueError, f"Lamb: {name}: expected .* got"):
                Lamb(parameters(), **options)
        with self.assertRaisesRegex(ValueError, "lr"):
            Lamb([{"params": parameters(), "lr": -1}])
        with self.assertRaisesRegex(ValueError, "max_grad_norm: expected 1.0 as in the first group"):
            Lamb([{"params": parameters()}, {"params": parameters(), "max_grad_norm": 2}])
        table = torch.nn.Embedding(3, 2, sparse=True)
        dense = torch.nn.Parameter(torch.ones(2))
        dense.grad = torch.ones(2)
        table(torch.tensor([1])).sum().backward()
        with self.assertRaisesRegex(RuntimeError, r"sparse one of shape \[3, 2\]"):
            Lamb([dense, table.weight]).step()
        self.assertEqual(dense.tolist(), [1, 1])


if __name__ == "__main__":
    test_program.run()
