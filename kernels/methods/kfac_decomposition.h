// SPDX-License-Identifier: Apache-2.0
// The decomposition of a layer's factors in method kfac: eigenvectors or inverses, made at intervals.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/backend.h"
#include "kernels/base/session_spec.h"
#include "kernels/methods/kfac_config.h"

namespace precondor {

// Shares of the damping for each side. INVERSE without the pi split adds all of it to each side, EIGEN adds all of it
// to the product of the eigenvalues.
struct KfacDamping {
  double in = 0;
  double out = 0;
};
KfacDamping SplitDamping(const KfacConfig& config, double damping, double split);

// The decomposition of both sides of a layer. One thread at a time.
struct KfacDecomposition {
  struct Side {
    DeviceMatrix basis;  // EIGEN: eigenvectors as rows, by ascending eigenvalue. INVERSE: scale (F + damping I)^-1
    std::vector<double> values;  // EIGEN: eigenvalues, negative ones set to 0
    double scale = 1;
  };
  Side in;
  Side out;
  double split = 1;          // pi
  DeviceMatrix reciprocals;  // prediv: reciprocal_scale divided by the divisors
  double reciprocal_scale = 1;

  // Allocates zeroed memory for a decomposition. `backend` must outlive it.
  static absl::StatusOr<KfacDecomposition> Allocate(const KfacConfig& config, const LayerSpec& layer, Backend& backend);
  // Exact bytes of a decomposition, and an upper bound of what Decompose allocates in addition.
  static int64_t Bytes(const KfacConfig& config, const LayerSpec& layer);
  static int64_t ScratchBytes(const LayerSpec& layer);

  // Decomposes the packed factors. EIGEN: computes their eigenvectors. INVERSE: computes (F + damping I)^-1 by
  // Cholesky. If Cholesky finds that F + damping I is not positive definite, an eigendecomposition is used, with
  // negative eigenvalues set to 0. Returns FailedPrecondition if no decomposition exists. After any error, the contents
  // are unusable.
  absl::Status Decompose(const KfacConfig& config, double damping, ConstMatrixView in_factor,
                         ConstMatrixView out_factor, Backend& backend);
};

// EIGEN's divisors of the gradient's elements in the eigenbasis: rows[i] columns[j] + shift. The divisor at (0, 0) is
// the smallest.
struct KfacDivisors {
  std::vector<double> rows;
  std::vector<double> columns;
  double shift = 0;
  double smallest() const { return rows.front() * columns.front() + shift; }

  // Computes the divisors from a decomposition and a damping.
  void Assign(const KfacConfig& config, const KfacDecomposition& decomposition, double damping);
};

}  // namespace precondor
