// SPDX-License-Identifier: Apache-2.0
// Method kron in f64 with square matrices throughout, one formula after the other (docs/use/methods/kron.md), for
// tensors of any number of dimensions, index by index. Slow and plain. Nothing here is shared with the code under test;
// random numbers come from the caller.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "tests/reference/naive_linear_algebra.h"
#include "tests/reference/tensor.h"

namespace precondor::reference {

struct KronOptions {
  double momentum = 0.9;
  double lr = 0.1;
  double init_scale = 1.0;
  double max_probability = 1.0;
  double min_probability = 0.03;
  double decay = 0.001;
  double flat_steps = 500;
  double clip = 1.1;
  std::vector<std::vector<int64_t>> sides;  // of each dimension the lengths of its blocks
  std::vector<bool> diagonal;               // of each dimension
};

class Kron {
 public:
  // V of an update (from 0) for a block (row-major) of those dimensions, and whether the update balances before.
  using Probe = std::function<Vector(uint64_t update, uint64_t block, int64_t elements)>;
  using Draw = std::function<bool(uint64_t update)>;

  Kron(KronOptions options, Probe probe, Draw balances);

  // The answer to the next gradient, both row-major.
  Vector Step(const Vector& d);

  uint64_t updates() const { return updates_; }
  // Q of a block and a dimension.
  const Dense& factor(size_t block, size_t mode) const { return blocks_[block].factors[mode]; }

 private:
  struct Block {
    std::vector<int64_t> first;  // place of its first element
    std::vector<int64_t> dims;
    std::vector<Dense> factors;
  };
  Block MakeBlock(size_t number) const;
  void Update(const Tensor& g, double mean);
  void Triangular(Block& block, const Tensor& g, const Tensor& v);

  const KronOptions options_;
  const Probe probe_;
  const Draw balances_;
  std::vector<Block> blocks_;
  Tensor momentum_;
  uint64_t steps_ = 0, since_ = 0, updates_ = 0;
};

// |x A'| for the unit vector x along A_i A, A_i the longest row.
double NormLowerBound(const Dense& a);

}  // namespace precondor::reference
