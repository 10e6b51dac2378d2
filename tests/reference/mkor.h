// SPDX-License-Identifier: Apache-2.0
// Method mkor in f64 with dense factors, one formula after the other (docs/use/methods/mkor.md). Slow and plain: the
// oracle of kernels/methods and of training runs. Nothing here is shared with the code under test.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "tests/reference/naive_linear_algebra.h"

namespace precondor::reference {

using Vectors = std::vector<Vector>;  // statistic vectors of one step

enum class Rule { kExactDamped, kReference, kBlend, kPublished };
enum class Policy { kNormRescale, kKlClip, kRmsClip, kNone };

struct MkorOptions {
  Rule rule = Rule::kExactDamped;
  double gamma = 0.95;
  double damping = 1.0;
  double clip = 100;
  double zeta = 0.95;
  double norm_threshold = 10;
  Policy policy = Policy::kNormRescale;
  double policy_clip = 1.1;
  int64_t max_factor_dim = 8192;
};

// One side of a layer: J of dimension d, or of the blocks that d is split into.
class MkorFactor {
 public:
  MkorFactor(const MkorOptions& options, int64_t d);
  void Update(const Vectors& v);
  Dense Inverse() const;  // [d, d]
  // EXACT_DAMPED adds this to the eigenvalues of the bias-corrected L; first block.
  double Damping() const;

 private:
  struct Block {
    int64_t begin = 0, size = 0;
    Dense l, j;
    double mean_square = 0;
  };
  void UpdateBlock(Block& block, const Vectors& v) const;
  double Mass() const;

  MkorOptions options_;
  int64_t d_;
  int64_t updates_ = 0;
  std::vector<Block> blocks_;
};

// One layer. Before the first Update, U = D.
class Mkor {
 public:
  Mkor(const MkorOptions& options, int64_t d_out, int64_t d_in, bool has_bias);
  void Update(const Vectors& a, const Vectors& g);
  // d and the result row-major [d_out, d_in].
  Vector Precondition(const Vector& d) const;
  const MkorFactor& input() const { return input_; }
  const MkorFactor& output() const { return output_; }

 private:
  MkorOptions options_;
  int64_t d_out_, d_in_;
  bool has_bias_;
  bool ready_ = false;
  MkorFactor input_, output_;
};

// J x of EXACT_DAMPED for dimensions at which d x d is too slow: L is the list of its weighted vectors of the last
// `window` updates (gamma^window must be negligible), J x comes from conjugate gradients.
class ExactDampedOperator {
 public:
  ExactDampedOperator(double gamma, double damping, int64_t d, int64_t window);
  void Update(const Vectors& v);
  // Relative residual 1e-12.
  Vector Solve(const Vector& b) const;
  double damping() const;

 private:
  Vector Multiply(const Vector& x) const;
  double gamma_, damping_;
  int64_t d_, window_, updates_ = 0;
  std::deque<Vectors> steps_;  // oldest first
};

}  // namespace precondor::reference
