# SPDX-License-Identifier: Apache-2.0
"""MKOR as a package without a server does it, for comparison: dense factors in the training process, in torch operations.

The recursion of the MKOR authors' package, rule REFERENCE of docs/use/methods/mkor.md: per Linear layer and side J = I at first;
the first statistic vector is thrown away; then J <- .95 J + .05 I, u = J v, J <- J - u u' / (1 + v'u), with v clamped to
+-100. v is the mean over rows of the layer's inputs, or the sum over rows of the gradients of its outputs. The gradients
of weight and bias become J_out D J_in and J_out b, rescaled to the sum of norms they had. In place where torch can.
"""

import dataclasses
import re
from typing import Optional

import torch
import torch.distributed

GAMMA = 0.95
CLIP = 100.0


class Factor:
    """One side's J [d, d]."""

    def __init__(self, d):
        self.inverse = torch.eye(d)
        self.vectors = 0

    def update(self, v):
        self.vectors += 1
        if self.vectors == 1:
            return
        v = v.clamp(-CLIP, CLIP)
        self.inverse.mul_(GAMMA)
        self.inverse.diagonal().add_(1 - GAMMA)
        u = self.inverse.mv(v)
        self.inverse.addr_(u, u, alpha=-1 / (1 + float(v.dot(u))))


@dataclasses.dataclass
class Layer:
    module: torch.nn.Linear
    a: Factor
    g: Factor
    a_vector: Optional[torch.Tensor] = None  # of this step
    g_vector: Optional[torch.Tensor] = None


class InProcessMkor:
    """Hooks into every Linear layer of `model` but those whose name matches a regular expression in `skip`.

    After each backward pass, in which every layer must have had a part, `step` replaces the layers' gradients. With
    torch.distributed initialised, vectors are averaged over ranks; gradients must have been (DistributedDataParallel).
    """

    def __init__(self, model, inv_freq=10, warmup_steps=10, skip=()):
        self._inv_freq = inv_freq
        self._warmup_steps = warmup_steps
        self._step = 0
        self._layers = []
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and not any(re.fullmatch(pattern, name) for pattern in skip):
                layer = Layer(module, Factor(module.in_features), Factor(module.out_features))
                self._layers.append(layer)
                module.register_forward_hook(lambda _, inputs, output, layer=layer: self._keep_input(layer, inputs[0]))
                module.register_full_backward_hook(lambda _, inputs, grads, layer=layer: self._keep_gradient(layer, grads[0]))

    def needs_statistics(self):
        return self._step < self._warmup_steps or self._step % self._inv_freq == 0

    def _keep_input(self, layer, x):
        if torch.is_grad_enabled() and self.needs_statistics():
            layer.a_vector = x.detach().reshape(-1, x.shape[-1]).mean(0)

    def _keep_gradient(self, layer, dy):
        if self.needs_statistics():
            layer.g_vector = dy.reshape(-1, dy.shape[-1]).sum(0)

    @torch.no_grad()
    def step(self):
        if self.needs_statistics():
            self._update()
        for layer in self._layers:
            if layer.g.vectors > 1 and layer.module.weight.grad is not None:
                self._precondition(layer)
        self._step += 1

    def _update(self):
        vectors = [vector for layer in self._layers for vector in (layer.a_vector, layer.g_vector)]
        if torch.distributed.is_initialized():
            packed = torch.cat(vectors)
            torch.distributed.all_reduce(packed)
            packed /= torch.distributed.get_world_size()
            vectors = packed.split([len(vector) for vector in vectors])
        for layer, a, g in zip(self._layers, vectors[0::2], vectors[1::2]):
            layer.a.update(a)
            layer.g.update(g)

    def _precondition(self, layer):
        gradients = [p.grad for p in (layer.module.weight, layer.module.bias) if p is not None]
        before = sum(float(gradient.norm()) for gradient in gradients)
        answers = [layer.g.inverse.mm(gradients[0]).mm(layer.a.inverse)]
        answers += [layer.g.inverse.mv(bias) for bias in gradients[1:]]
        after = sum(float(answer.norm()) for answer in answers)
        for gradient, answer in zip(gradients, answers):
            torch.mul(answer, before / after if after > 0 else 1.0, out=gradient)
