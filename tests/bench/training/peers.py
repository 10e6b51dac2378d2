# SPDX-License-Identifier: Apache-2.0
"""Optimizers to compare with, as their authors publish them: Muon, SOAP and LAMB, in as few lines as the formulas allow."""

import torch


def _matrix(tensor):
    return tensor.flatten(1) if tensor.dim() > 2 else tensor


class _Peer(torch.optim.Optimizer):
    """Moves weights by _update() of their gradient as a matrix, with AdamW's weight decay."""

    def __init__(self, params, lr, weight_decay=0.01):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                update = self._update(self.state[p], _matrix(p.grad))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(update.reshape(p.shape), alpha=group["lr"])


class Muon(_Peer):
    """Jordan et al. 2024: Nesterov momentum .95, five Newton-Schulz iterations, in f32; scaled to the root mean square of AdamW's
    updates (arXiv:2502.16982). torch.optim.Muon takes no convolutions."""

    def _update(self, state, grad):
        momentum = state.setdefault("momentum", torch.zeros_like(grad))
        momentum.mul_(0.95).add_(grad)
        x = grad + 0.95 * momentum
        x = x.T if x.shape[0] > x.shape[1] else x
        x = x / (x.norm() + 1e-7)
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        return 0.2 * max(grad.shape)**0.5 * (x.T if grad.shape[0] > grad.shape[1] else x)


class Soap(_Peer):
    """Vyas et al. (arXiv:2409.11321): betas .95, an orthogonal iteration of the bases every 10 steps, all parameters; Adam where a
    parameter is a vector."""

    def _update(self, state, grad):
        if not state:
            state.update(step=0, m=torch.zeros_like(grad), v=torch.zeros_like(grad))
            if grad.dim() == 2:
                covariances = [0.05 * grad @ grad.T, 0.05 * grad.T @ grad]
                # The covariances of one gradient have its singular vectors as eigenvectors, for any rank.
                left, _, right = torch.linalg.svd(grad, full_matrices=True)
                state.update(l=covariances, q=[left, right.T])
                return torch.zeros_like(grad)
        state["step"] += 1
        turned = self._turn(state, grad, False)
        state["m"].lerp_(turned, 0.05)
        state["v"].lerp_(turned.square(), 0.05)
        bias = 1 - 0.95**state["step"]
        update = self._turn(state, state["m"] / bias / ((state["v"] / bias).sqrt() + 1e-8), True)
        if grad.dim() == 2:
            for one, outer in zip(state["l"], (grad @ grad.T, grad.T @ grad)):
                one.lerp_(outer, 0.05)
            if state["step"] % 10 == 0:
                self._refresh(state)
        return update

    @staticmethod
    def _turn(state, x, back):
        if "q" not in state:
            return x
        left, right = state["q"]
        return left @ x @ right.T if back else left.T @ x @ right

    def _refresh(self, state):
        m = self._turn(state, state["m"], True)
        for side, one in enumerate(state["l"]):
            q = state["q"][side]
            order = torch.einsum("ij,ij->j", q, one @ q).argsort(descending=True)
            state["q"][side] = torch.linalg.qr(one @ q[:, order])[0]
            state["v"] = state["v"].index_select(side, order)
        state["m"] = self._turn(state, m, False)


class Lamb(torch.optim.Optimizer):
    """You et al. (arXiv:1904.00962), algorithm 2, with betas .9 and .999: Adam's updates, with weight decay, as long as their weights."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:  # of a step that Preconditioner has skipped
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["step"] += 1
                state["m"].lerp_(p.grad, 0.1)
                state["v"].lerp_(p.grad.square(), 0.001)
                m, v = (state[name] / (1 - beta**state["step"]) for name, beta in (("m", 0.9), ("v", 0.999)))
                update = m / (v.sqrt() + 1e-6) + group["weight_decay"] * p
                length, update_length = p.norm(), update.norm()
                ratio = length / update_length if length > 0 and update_length > 0 else 1.0
                p.sub_(update, alpha=float(group["lr"] * ratio))
