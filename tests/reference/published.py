# SPDX-License-Identifier: Apache-2.0
"""The recursions of kfac-pytorch, of the MKOR and SOAP authors' packages and of Distributed Shampoo, in f64, from their formulas.

D [m, n] is a layer's gradient, with the bias' as the last column. Rows a [rows, n] (with a last 1 for the bias) and g [rows, m] are
of a step; g is what automatic differentiation shows for the mean loss. A row of a convolution belongs to a position of a
sample. Sources: github.com/gpauloski/kfac-pytorch, kfac/layers/modules.py and eigen.py, kfac/base_preconditioner.py; docs/use/methods/mkor.md;
arXiv:2409.11321 and github.com/nikhilvyas/SOAP, soap.py; arXiv:2309.06497.
"""

import numpy as np


def patches(x, kernel, stride, padding):
    """Rows [samples * positions, channels * kernel * kernel] of x [samples, channels, height, width]."""
    x = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    sides = [(size - kernel) // stride + 1 for size in x.shape[2:]]
    return np.array([x[n, :, i * stride:i * stride + kernel, j * stride:j * stride + kernel].ravel()
                     for n in range(len(x)) for i in range(sides[0]) for j in range(sides[1])])


class KfacLayer:
    """A <- decay A + (1 - decay) S_A from I, with S_A = 1/rows sum a a' / positions^2; G likewise. U = (G (x) A + damping I)^-1 D."""

    def __init__(self, m, n, decay, damping):
        self.factors = [np.eye(m), np.eye(n)]
        self.decay, self.damping = decay, damping

    def update(self, a, g, positions=1):
        for side, rows in enumerate((g, a)):
            moment = rows.T @ rows / len(rows) / positions**2
            self.factors[side] = self.decay * self.factors[side] + (1 - self.decay) * moment

    def answer(self, d):
        (of_g, q_g), (of_a, q_a) = (np.linalg.eigh(factor) for factor in self.factors)
        return q_g @ ((q_g.T @ d @ q_a) / (np.outer(of_g, of_a) + self.damping)) @ q_a.T


def kl_scale(pairs, rate, clip):
    """Returns the factor of all answers of a step; pairs of D and U."""
    total = abs(sum(np.vdot(d, u) for d, u in pairs)) * rate**2
    return 1.0 if total == 0 else min(1.0, (clip / total)**0.5)


class MkorLayer:
    """J <- gamma J + (1 - gamma) I, u = J v, J <- J - u u' / (1 + v'u) with the mean v of the rows, after the first; U = J_g D J_a |D| / |U|."""

    def __init__(self, m, n, gamma=0.95, clip=100.0):
        self.inverses, self.gamma, self.clip, self.begun = [np.eye(m), np.eye(n)], gamma, clip, False

    def update(self, a, g):
        begun, self.begun = self.begun, True
        for side, v in enumerate((g, a) if begun else ()):
            v = np.clip(v, -self.clip, self.clip)
            j = self.gamma * self.inverses[side] + (1 - self.gamma) * np.eye(len(v))
            u = j @ v
            self.inverses[side] = j - np.outer(u, u) / (1 + v @ u)

    def answer(self, d):
        u = self.inverses[0] @ d @ self.inverses[1]
        return u * np.linalg.norm(d) / np.linalg.norm(u)


class SoapLayer:
    """Adam in the eigenbases of L <- c L + (1 - c) D D' and R <- c R + (1 - c) D'D. The first gradient makes the bases alone."""

    def __init__(self, betas, decay, epsilon, every):
        self.betas, self.decay, self.epsilon, self.every, self.count = betas, decay, epsilon, every, 0

    def answer(self, d):
        outer = d @ d.T, d.T @ d
        if self.count == 0:
            self.count, self.factors = 1, [(1 - self.decay) * one for one in outer]
            self.bases = [np.linalg.eigh(factor)[1][:, ::-1] for factor in self.factors]
            self.m, self.v = np.zeros(d.shape), np.zeros(d.shape)
            return np.zeros(d.shape)
        n, self.count, (b1, b2) = self.count, self.count + 1, self.betas
        left, right = self.bases
        x = left.T @ d @ right
        self.m, self.v = b1 * self.m + (1 - b1) * x, b2 * self.v + (1 - b2) * x**2
        u = left @ (self.m / (1 - b1**n) / (np.sqrt(self.v) + self.epsilon) * np.sqrt(1 - b2**n)) @ right.T
        self.factors = [self.decay * factor + (1 - self.decay) * one for factor, one in zip(self.factors, outer)]
        if n % self.every == 0:
            whole = left @ self.m @ right.T
            for side, (factor, basis) in enumerate(zip(self.factors, self.bases)):
                order = np.argsort(-np.diag(basis.T @ factor @ basis))
                self.v = np.take(self.v, order, side)
                self.bases[side] = np.linalg.qr(factor @ basis[:, order])[0]
            self.m = self.bases[0].T @ whole @ self.bases[1]
        return u


class ShampooLayer:
    """U = (L^ + epsilon I)^-1/4 M^ (R^ + epsilon I)^-1/4 of the means of D D', D and D'D, each divided by 1 - its decay^n."""

    def __init__(self, betas, epsilon):
        self.betas, self.epsilon, self.count, self.means = betas, epsilon, 0, [0.0, 0.0, 0.0]

    def answer(self, d):
        self.count += 1
        decays = self.betas[1], self.betas[0], self.betas[1]
        self.means = [c * mean + (1 - c) * new for c, mean, new in zip(decays, self.means, (d @ d.T, d, d.T @ d))]
        left, m, right = (mean / (1 - c**self.count) for c, mean in zip(decays, self.means))
        return self._root(left) @ m @ self._root(right)

    def _root(self, factor):
        values, vectors = np.linalg.eigh(factor)
        return vectors @ np.diag((np.maximum(values, 0) + self.epsilon)**-0.25) @ vectors.T
