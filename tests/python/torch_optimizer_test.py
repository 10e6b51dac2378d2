#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Optimizers that precondor.torch makes, and those that call its step by themselves."""

import copy
from unittest import mock

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import precondor
import torch_case
from precondor.torch import BaseOptimizer, _optimizer


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.table = nn.Embedding(5, 6)
        self.body, self.norm, self.head = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.norm(torch.tanh(self.body(self.table(x)))))


class Wrapper(torch.optim.Optimizer):
    """As accelerate's: it has no state, hooks or groups of its own."""

    def __init__(self, optimizer, name="optimizer", scaler=None):  # pylint: disable=super-init-not-called
        self._inner = optimizer
        setattr(self, name, optimizer)
        self.scaler = scaler

    @property
    def param_groups(self):
        return self._inner.param_groups

    def step(self, closure=None):
        return self._inner.step(closure)

    def zero_grad(self, set_to_none=True):
        self._inner.zero_grad(set_to_none)


def loss_of(model, step):
    x = torch.randint(5, (7,), generator=torch.Generator().manual_seed(step))
    return (model(x) - x[:, None] / 5).square().mean()


class OptimizerTest(torch_case.ServerCase):
    def expect_equal(self, got, wanted, tolerance=0.0):
        for one, other in zip(got.parameters(), wanted.parameters()):
            torch.testing.assert_close(one, other, rtol=0, atol=tolerance)

    def test_base_optimizer_is_adamw_and_plain_descent(self):
        model, wanted = Net(), Net()
        optimizer = BaseOptimizer([{"params": [*model.body.parameters(), *model.table.parameters()], "plain": True},
                                   {"params": [*model.norm.parameters(), *model.head.parameters()], "weight_decay": 0.2,
                                    "lr_scale": 0.5}], lr=0.02)
        plain = torch.optim.SGD([*wanted.body.parameters(), *wanted.table.parameters()], lr=0.02, weight_decay=0.01)
        adam = torch.optim.AdamW([*wanted.norm.parameters(), *wanted.head.parameters()], lr=0.01, weight_decay=0.2)
        for step in range(12):
            for one, optimizers in ((model, [optimizer]), (wanted, [plain, adam])):
                one.zero_grad()
                loss_of(one, step).backward()
                for each in optimizers:
                    each.step()
            if step == 5:
                saved = optimizer.state_dict()
                optimizer = BaseOptimizer(optimizer.param_groups, lr=1.0)
                optimizer.load_state_dict(saved)
        self.expect_equal(model, wanted, 1e-6)

    def test_states_of_others(self):
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 3, bias=False))
        optimizer = self.preconditioner(model, method="soap").make_optimizer(lr=0.1)
        other = torch.optim.AdamW(model.parameters(), lr=0.3)
        model(torch.ones(2, 4)).sum().backward()
        other.step()
        optimizer.load_state_dict(other.state_dict())
        self.assertEqual([(group["plain"], group["lr_scale"], group["lr"]) for group in optimizer.param_groups], [(True, 1.0, 0.3)])
        optimizer.step()
        saved = self.preconditioner(model, f"{self.name}-mkor").make_optimizer(lr=0.1).state_dict()
        self.expect(precondor.InvalidArgumentError, "group 0: expected plain=True, got False: the state is of other methods",
                    optimizer.load_state_dict, saved)

    def test_fused_kernels_as_on_a_gpu(self):
        with mock.patch.object(_optimizer, "_FUSED_ON", ("cpu",)):
            self.test_base_optimizer_is_adamw_and_plain_descent()

    def test_groups(self):
        model = Net()
        model.table.weight.requires_grad_(False)
        pre = self.preconditioner(model, layer_methods={"head": "soap"})
        groups = pre.param_groups(weight_decay=0.3)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.assertEqual({(group["plain"], group["weight_decay"]): [names[id(one)] for one in group["params"]]
                          for group in groups},
                         {(False, 0.3): ["body.weight"], (False, 0): ["body.bias", "norm.weight", "norm.bias"],
                          (True, 0.3): ["head.weight"], (True, 0): ["head.bias"]})
        optimizer = pre.make_optimizer(0.1, weight_decay=0.0, betas=(0.8, 0.9))
        self.assertEqual({(group["lr"], group["weight_decay"], group["betas"]) for group in optimizer.param_groups},
                         {(0.1, 0.0, (0.8, 0.9))})

    def test_muon_moves_weights_as_torchs_does(self):
        model = nn.ModuleDict({"tall": nn.Linear(6, 9, bias=False), "wide": nn.Linear(9, 4, bias=False)})
        wanted = copy.deepcopy(model)
        pre = self.preconditioner(model, method="muon")
        optimizer = pre.make_optimizer(0.1, weight_decay=0.0)
        published = torch.optim.Muon(wanted.parameters(), lr=0.1, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        for _ in range(8):
            before = [parameter.detach().clone() for parameter in model.parameters()]
            others = [parameter.detach().clone() for parameter in wanted.parameters()]
            for one, other in zip(model.parameters(), wanted.parameters()):
                one.grad = torch.randn_like(one)
                other.grad = one.grad.clone()
            self.assertEqual(set(pre.step(1.0).decisions.values()), {"PRECONDITIONED"})
            optimizer.step()
            published.step()
            for one, start, other, other_start in zip(model.parameters(), before, wanted.parameters(), others):
                moved, expected = (one - start).detach(), (other - other_start).detach()
                # torch rounds every product to bf16, by 2^-9, in five iterations of three products: 0.022 seen.
                self.assertLess((moved - expected).norm() / expected.norm(), 0.05)

    def test_a_clipped_answer_gives_one_warning(self):
        model = Net()
        pre = self.preconditioner(model, method="muon")
        optimizer = pre.make_optimizer(0.01)

        def one_step(clips_before, clips_after):
            optimizer.zero_grad()
            loss_of(model, 1).backward()
            if clips_before:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            pre.step()
            if clips_after:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        self.expect_warning("", one_step, True, False)
        self.expect_warning("Clip before", one_step, False, True)

    def train(self, name, how, **options):
        """The model after some steps, and what was reported as losses. how: of the loop."""
        model, losses = Net(), []
        pre = self.preconditioner(model, f"{self.name}-{name}", method="eva", **options)
        optimizer = pre.make_optimizer(0.01)  # eva scales by its rate
        step = pre.step
        pre.step = lambda loss=None, **options: losses.append(loss if loss is None else loss.item()) or step(loss, **options)
        if how != "by hand":
            pre.attach(optimizer)
        for number in range(6):
            optimizer.zero_grad()

            def closure():
                loss = loss_of(model, number)
                loss.backward()
                return loss

            if how in ("closure", "closure by name"):
                optimizer.step(closure) if how == "closure" else optimizer.step(closure=closure)
                continue
            loss = closure()
            if how != "attached":
                pre.step(loss)
            optimizer.step()
        self.assertEqual(pre.step_number, 6)
        pre.close(end_session=True)
        optimizer.step()  # the hook is out
        return model, losses

    def test_an_attached_optimizer_makes_the_steps(self):
        torch.optim.AdamW([nn.Parameter(torch.ones(2))])  # torch puts its wrapper round step once a class
        wanted, losses = self.train("hand", "by hand")
        for how, reported in (("attached", [None] * 6), ("attached with the loss", losses), ("closure", losses),
                              ("closure by name", losses)):
            with self.subTest(how=how):
                got, told = self.train(how.replace(" ", "-"), how)
                self.assertEqual(told, reported)
                self.expect_equal(got, wanted)

    def test_a_skipped_step_of_a_scaler(self):
        model = Net()
        pre = self.preconditioner(model)
        optimizer = pre.make_optimizer(0.01)
        pre.attach(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            if step == 1:
                model.body.weight.grad[0, 0] = float("inf")
            self.assertEqual(pre.step(1.0, scaler=scaler).skipped, step == 1)
            scaler.step(optimizer)  # not the optimizer's step, of which nothing warns
            scaler.update()
        self.assertEqual(pre.step_number, 4)

    def test_the_optimizer_in_a_wrapper_is_attached(self):
        wanted, _ = self.train("hand", "by hand")
        for number, wrap in enumerate((Wrapper, lambda one: Wrapper(Wrapper(one, "optim"), "base_optimizer"))):
            model = Net()
            pre = self.preconditioner(model, f"{self.name}-{number}", method="eva")
            wrapped = wrap(pre.make_optimizer(0.01))
            pre.attach(wrapped)
            for step in range(6):
                wrapped.zero_grad()
                loss_of(model, step).backward()
                wrapped.step()
            self.assertEqual(pre.step_number, 6)
            pre.close(end_session=True)
            wrapped.step()
            self.expect_equal(model, wanted)
        adamw = torch.optim.AdamW(model.parameters())
        self.expect(precondor.InvalidArgumentError, r"attach: .*wrapper has a GradScaler.*step\(loss, scaler", pre.attach,
                    Wrapper(adamw, scaler=torch.amp.GradScaler("cpu")))
        self.expect(precondor.InvalidArgumentError, "attach: .*got a Wrapper without its step hooks", pre.attach, Wrapper(adamw, "hidden"))

    def test_a_step_that_only_makes_an_optimizers_state_is_none(self):
        """torch.distributed.checkpoint makes one, with gradients of zeros and a rate of 0, for an optimizer without state."""
        def run(name, method, steps, saved=None):
            model = Net()
            pre = self.preconditioner(model, f"{self.name}-{name}-{method}", method=method)
            optimizer = pre.make_optimizer(0.01)
            pre.attach(optimizer)
            if saved is None:
                get_optimizer_state_dict(model, optimizer)
            else:
                model.load_state_dict(saved["model"])
                set_optimizer_state_dict(model, optimizer, saved["optimizer"])
                pre.load_state_dict(saved["pre"])
            for step in range(pre.step_number, steps):
                loss_of(model, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            self.assertEqual(pre.step_number, steps)
            return model, {"model": copy.deepcopy(model.state_dict()), "pre": pre.state_dict(factors=True),
                           "optimizer": copy.deepcopy(get_optimizer_state_dict(model, optimizer))}

        for method in ("mkor", None):
            with self.subTest(method=method):
                saved = run("first", method, 3)[1]
                self.expect_equal(run("resumed", method, 6, saved)[0], run("whole", method, 6)[0])

    def test_what_is_unfrozen_later_is_told_if_no_group_has_it(self):
        for own in (True, False):
            with self.subTest(own=own):
                model = Net()
                for one in (model.table.weight, model.body.bias, *model.norm.parameters()):
                    one.requires_grad_(False)
                pre = self.preconditioner(model, f"{self.name}-{own}", method=None)
                optimizer = pre.make_optimizer(0.01) if own else BaseOptimizer(model.parameters(), 0.01)

                def step(model=model, pre=pre, optimizer=optimizer):
                    loss_of(model, 0).backward()
                    pre.step(1.0)
                    optimizer.step()

                step()
                model.norm.requires_grad_(True)
                pattern = "frozen when its optimizer was made have gradients, and are in no group: norm.weight, norm.bias. Make the optimizer"
                self.expect_warning(pattern if own else "", step)

    def test_a_bias_whose_weight_is_frozen_later_is_told(self):
        model = Net()
        pre = self.preconditioner(model, method=None)
        pre.make_optimizer(0.01)
        model.head.requires_grad_(False)  # as a whole
        model.body.weight.requires_grad_(False)

        def step():
            loss_of(model, 0).backward()
            pre.step(1.0)

        self.expect_warning("layer body: its weight has no gradient, so that its bias, which has one, is not trained either", step)

    def test_a_scaler_that_the_step_does_not_know_is_told(self):
        for given in (True, False):
            with self.subTest(given=given):
                model, scaler = Net(), torch.amp.GradScaler("cpu")
                pre = self.preconditioner(model, f"{self.name}-{given}", method=None)
                optimizer = pre.make_optimizer(0.01)

                def steps(model=model, scaler=scaler, pre=pre, optimizer=optimizer, given=given):
                    for number in range(2):  # that there is one is seen in the first
                        optimizer.zero_grad()
                        scaler.scale(loss_of(model, number)).backward()
                        pre.step(1.0, scaler=scaler if given else None)
                        scaler.step(optimizer)
                        scaler.update()

                self.expect_warning("" if given else "GradScaler.step.*Call step.loss, scaler=scaler", steps)

    def test_without_a_preconditioner_its_layers_are_told(self):
        model = Net()
        optimizer = precondor.torch.make_optimizer(model, 0.01)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.expect_warning("", optimizer.step)
        loss_of(model, 0).backward()
        self.expect_warning("no Preconditioner was given this optimizer of make_optimizer", optimizer.step)
        made = precondor.torch.make_optimizer(model, 0.01)
        pre = self.preconditioner(model, method=None, optimizer=made)

        def step():
            pre.step(1.0)
            made.step()

        self.expect_warning("", step)

    def test_sparse_gradients_are_refused(self):
        model = nn.Sequential(nn.Embedding(5, 6, sparse=True), nn.Linear(6, 6), nn.Linear(6, 5))
        pre = self.preconditioner(model, method=None)
        optimizer = pre.make_optimizer(0.01)
        model(torch.arange(3)).sum().backward()
        pre.step(1.0)
        self.expect(precondor.InvalidArgumentError, r"expected dense gradients, got a torch.sparse_coo one of a parameter \[5, 6\].*SparseAdam",
                    optimizer.step)

    def test_torch_distributed_that_begins_later_is_told(self):
        model = Net()
        pre = self.preconditioner(model)

        def step():
            loss_of(model, 0).backward()
            pre.step(1.0)

        with mock.patch("torch.distributed.is_initialized", return_value=True), \
                mock.patch("torch.distributed.get_world_size", return_value=2):
            self.expect_warning("torch.distributed was initialized after it was made", step)

    def test_a_rate_of_zero_is_a_step_of_a_warm_up(self):
        model = Net()
        pre = self.preconditioner(model)
        optimizer = pre.make_optimizer(0.0)
        pre.attach(optimizer)
        loss_of(model, 0).backward()
        optimizer.step()
        self.assertEqual(pre.step_number, 1)

    def test_each_wrong_order_of_a_step_warns_once(self):
        for order, warning in (("bpo", ""), ("pbo", "finds no layer with a gradient"),
                               ("bop", "no Preconditioner.step"), ("bo", "no Preconditioner.step")):
            for first_order in (False, True):
                with self.subTest(order=order, first_order=first_order):
                    model = Net()
                    pre = self.preconditioner(model, f"{self.name}-{order}-{first_order}",
                                              fallback=precondor.Fallback("AT_STEP", at_step=1) if first_order else precondor.Fallback())
                    optimizer = pre.make_optimizer(0.01)
                    optimizer.step()  # without gradients: for its state

                    def steps():
                        for step in range(3):
                            optimizer.zero_grad(set_to_none=True)
                            for one in order:
                                {"b": lambda: loss_of(model, step).backward(), "p": lambda: pre.step(1.0), "o": optimizer.step}[one]()

                    self.expect_warning(warning, steps)
                    pre.close(end_session=True)
                    self.expect_warning("", steps) if "p" not in order else self.expect(
                        precondor.FailedPreconditionError, "this Preconditioner has been closed", pre.step)

    def test_a_step_in_each_micro_batch_warns_once(self):
        """With each way by which the optimizer is known."""
        for how in ("made", "given", "attached"):
            with self.subTest(how=how):
                model = Net()
                given = torch.optim.SGD(model.parameters(), 0.1)
                pre = self.preconditioner(model, f"{self.name}-{how}", optimizer=given if how == "given" else None)
                optimizer = pre.make_optimizer(0.01) if how == "made" else given
                if how == "attached":
                    pre.attach(optimizer)

                def steps(batches):
                    for step in range(2):
                        optimizer.zero_grad()
                        for batch in range(batches):
                            (loss_of(model, 2 * step + batch) / batches).backward()
                            pre.step(1.0)
                        optimizer.step()

                self.expect_warning("", steps, 1)
                self.expect_warning("without an optimizer.step.* micro-batches", steps, 2)
                pre.close(end_session=True)
                self.assertEqual([len(optimizer._optimizer_step_post_hooks), len(optimizer._optimizer_step_pre_hooks)], [0, 0])

    def test_orders_that_warn_of_nothing(self):
        model = Net()
        pre = self.preconditioner(model)
        optimizer = pre.make_optimizer(0.01)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.expect_warning("", optimizer.step)  # torch.distributed.checkpoint makes an optimizer's state like this

        def accumulate():
            optimizer.zero_grad()
            for part in range(2):
                loss_of(model, part).backward()
            pre.step(1.0)
            optimizer.step()

        self.expect_warning("", accumulate)
        model.body.requires_grad_(False)
        model.head.requires_grad_(False)
        self.expect_warning("", accumulate)  # all layers are frozen
        copied = copy.deepcopy(optimizer)
        self.expect_warning("", copied.step)

    def test_wrong_options_are_named(self):
        pre = self.preconditioner(Net())
        for options, pattern in (({"lr": -1}, "lr: expected a finite number of at least 0, got -1"), ({"lr": float("nan")}, "lr: .*nan"),
                                 ({"lr": float("inf")}, "lr: .*inf"), ({"lr": "x"}, "lr: .*'x'"), ({"lr": None}, "lr: .*None"),
                                 ({"weight_decay": -1}, "weight_decay: .*-1"), ({"betas": 3}, "betas: expected two numbers, got 3"),
                                 ({"betas": (0.9, 1.0)}, r"betas\[1\]: .*below 1, got 1.0"), ({"eps": -1}, "eps: .*-1")):
            with self.subTest(options=options):
                self.expect(precondor.InvalidArgumentError, pattern, pre.make_optimizer, **{"lr": 0.1, **options})
        self.expect(precondor.InvalidArgumentError, "optimizer: expected a torch.optim.Optimizer, got 'adamw'", self.preconditioner, Net(),
                    optimizer="adamw")

    def test_what_cannot_be_attached(self):
        model = Net()
        pre = self.preconditioner(model)
        self.expect(precondor.InvalidArgumentError, "attach: expected a torch.optim.Optimizer, got 5", pre.attach, 5)
        self.expect(precondor.InvalidArgumentError, "LBFGS", pre.attach, torch.optim.LBFGS(model.parameters()))
        self.expect(precondor.InvalidArgumentError, "trains every layer", pre.attach,
                    torch.optim.SGD(model.body.parameters(), lr=0.1))


if __name__ == "__main__":
    torch_case.main()
