// SPDX-License-Identifier: Apache-2.0
// Base optimizers in f64, one scalar formula after the other, for one tensor at a time.
// Sources: torch.optim.SGD and AdamW (documentation of PyTorch 2), apex FusedLAMB (csrc/multi_tensor_lamb.cu, gradient
// averaging, bias correction, use_nvlamb). Without weight decay.
#pragma once

#include <cmath>
#include <cstddef>
#include <vector>

namespace precondor::reference {

using Vec = std::vector<double>;

inline double Norm(const Vec& x) {
  double sum = 0;
  for (double value : x) sum += value * value;
  return std::sqrt(sum);
}

struct SgdState {
  Vec buffer;
};

inline void SgdStep(double lr, double momentum, const Vec& g, Vec& w, SgdState& state) {
  if (state.buffer.empty()) state.buffer = Vec(g.size(), 0.0);
  for (size_t i = 0; i < g.size(); ++i) {
    state.buffer[i] = momentum * state.buffer[i] + g[i];
    w[i] -= lr * state.buffer[i];
  }
}

struct AdamState {
  Vec m, v;
  int step = 0;
};

// m^ / (sqrt(v^) + epsilon) after taking in g.
inline Vec AdamDirection(double beta1, double beta2, double epsilon, const Vec& g, AdamState& state) {
  if (state.m.empty()) state.m = state.v = Vec(g.size(), 0.0);
  ++state.step;
  Vec u(g.size());
  for (size_t i = 0; i < g.size(); ++i) {
    state.m[i] = beta1 * state.m[i] + (1 - beta1) * g[i];
    state.v[i] = beta2 * state.v[i] + (1 - beta2) * g[i] * g[i];
    const double m_hat = state.m[i] / (1 - std::pow(beta1, state.step));
    const double v_hat = state.v[i] / (1 - std::pow(beta2, state.step));
    u[i] = m_hat / (std::sqrt(v_hat) + epsilon);
  }
  return u;
}

inline void AdamWStep(double lr, double beta1, double beta2, double epsilon, const Vec& g, Vec& w, AdamState& state) {
  const Vec u = AdamDirection(beta1, beta2, epsilon, g, state);
  for (size_t i = 0; i < w.size(); ++i) w[i] -= lr * u[i];
}

// `global_norm` is that of all tensors' gradients together.
inline void LambStep(double lr, double beta1, double beta2, double epsilon, double max_norm, double global_norm,
                     const Vec& g, Vec& w, AdamState& state) {
  const double divisor = global_norm > max_norm ? global_norm / max_norm : 1.0;
  Vec scaled(g.size());
  for (size_t i = 0; i < g.size(); ++i) scaled[i] = g[i] / divisor;
  const Vec u = AdamDirection(beta1, beta2, epsilon, scaled, state);
  double ratio = lr;
  if (Norm(w) != 0 && Norm(u) != 0) ratio = lr * Norm(w) / Norm(u);
  for (size_t i = 0; i < w.size(); ++i) w[i] -= ratio * u[i];
}

}  // namespace precondor::reference
