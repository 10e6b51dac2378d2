// SPDX-License-Identifier: Apache-2.0
// What method kfac makes of a layer's factors now and then: eigenvectors, or inverses.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/backend.h"
#include "kernels/base/session_spec.h"
#include "kernels/methods/kfac_config.h"

namespace precondor {

// A damping's shares. INVERSE without the split damps each side by all of it, EIGEN their product.
struct KfacDamping {
  double in = 0;
  double out = 0;
};
KfacDamping SplitDamping(const KfacConfig& config, double damping, double split);

// One thread at a time.
struct KfacDecomposition {
  struct Side {
    DeviceMatrix basis;          // EIGEN: eigenvectors as rows, ascending. INVERSE: scale (F + damping I)^-1
    std::vector<double> values;  // EIGEN: eigenvalues, those below 0 set to 0
    double scale = 1;
  };
  Side in;
  Side out;
  double split = 1;          // pi
  DeviceMatrix reciprocals;  // prediv: reciprocal_scale over the divisors
  double reciprocal_scale = 1;

  // Memory for one, zero. `backend` outlives it.
  static absl::StatusOr<KfacDecomposition> Allocate(const KfacConfig& config, const LayerSpec& layer, Backend& backend);
  // Exact, and an upper bound of what Decompose allocates beside it.
  static int64_t Bytes(const KfacConfig& config, const LayerSpec& layer);
  static int64_t ScratchBytes(const LayerSpec& layer);

  // Becomes that of the packed factors. EIGEN: their eigenvectors. INVERSE: (F + damping I)^-1 by Cholesky, and where
  // that says that F + damping I is not positive definite by an eigendecomposition with eigenvalues below 0 set to 0.
  // FailedPrecondition when there is none; on any error it is of no use.
  absl::Status Decompose(const KfacConfig& config, double damping, ConstMatrixView in_factor,
                         ConstMatrixView out_factor, Backend& backend);
};

// EIGEN's divisors of the gradient's elements in the eigenbasis: rows[i] columns[j] + shift, the first the smallest.
struct KfacDivisors {
  std::vector<double> rows;
  std::vector<double> columns;
  double shift = 0;
  double smallest() const { return rows.front() * columns.front() + shift; }

  // Becomes those of a decomposition and a damping.
  void Assign(const KfacConfig& config, const KfacDecomposition& decomposition, double damping);
};

}  // namespace precondor
