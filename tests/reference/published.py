# SPDX-License-Identifier: Apache-2.0
"""The recursions of kfac-pytorch and of the MKOR authors' package, in f64, from their formulas.

D [m, n] is a layer's gradient, with the bias' as the last column. Rows a [rows, n] (with a last 1 for the bias) and g [rows, m] are
of a step; g is what automatic differentiation shows for the mean loss. A row of a convolution belongs to a position of a
sample. Sources: github.com/gpauloski/kfac-pytorch, kfac/layers/modules.py and eigen.py, kfac/base_preconditioner.py; docs/use/methods/mkor.md.
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
