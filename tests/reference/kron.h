// SPDX-License-Identifier: Apache-2.0
// Method kron in f64 with square matrices throughout, one formula after the other (docs/methods/kron.md). Slow and
// plain. Nothing here is shared with the code under test; random numbers come from the caller.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "tests/reference/naive_linear_algebra.h"

namespace precondor::reference {

struct KronOptions {
  bool procrustes = false;
  double momentum = 0.9;
  double lr = 0.1;
  double init_scale = 1.0;
  double max_probability = 1.0;
  double min_probability = 0.03;
  double decay = 0.001;
  double flat_steps = 500;
  double clip = 1.1;
  bool diagonal_rows = false;
  bool diagonal_cols = false;
  std::vector<int64_t> rows;  // lengths of the blocks
  std::vector<int64_t> cols;
};

class Kron {
 public:
  // V of an update (from 0) for a block (row after row), and whether the update balances before.
  using Probe = std::function<Dense(uint64_t update, uint64_t block)>;
  using Draw = std::function<bool(uint64_t update)>;

  Kron(KronOptions options, Probe probe, Draw balances);

  // The answer to the next gradient.
  Dense Step(const Dense& d);

  uint64_t updates() const { return updates_; }
  // Q_L and Q_R of a block.
  const Dense& left(size_t block) const { return blocks_[block].left; }
  const Dense& right(size_t block) const { return blocks_[block].right; }

 private:
  struct Block {
    Dense left, right;
    double left_bound = 0, right_bound = 0;
  };
  void Update(const Dense& g, double mean);
  void Triangular(Block& block, const Dense& g, const Dense& v);
  void Procrustes(Block& block, const Dense& g);
  Dense Tile(const Dense& x, size_t block) const;

  const KronOptions options_;
  const Probe probe_;
  const Draw balances_;
  std::vector<Block> blocks_;
  Dense momentum_;
  uint64_t steps_ = 0, since_ = 0, updates_ = 0;
};

// |x A'| for the unit vector x along A_i A, A_i the longest row.
double NormLowerBound(const Dense& a);

}  // namespace precondor::reference
