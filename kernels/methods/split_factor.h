// SPDX-License-Identifier: Apache-2.0
// A dense factor under REFERENCE or BLEND whose J is split by rows, in f32, over all devices of a group.
//
// It has two phases without a second J: Prepare computes, on every device, the few terms by which J changes, and Commit
// adds them to J. If a device fails in a Commit, the factor has no valid J: it is lost, and every later call returns
// the cause. Statistics, gradients and answers are on the primary device. docs/collective.md says what travels.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

#include "kernels/device_group.h"
#include "kernels/methods/factor.h"
#include "kernels/methods/method.h"
#include "kernels/methods/row_split_factor.h"
#include "kernels/methods/sherman_morrison.h"

namespace precondor {

class SplitFactor final : public Factor {
 public:
  // `group` must outlive the factor.
  static absl::StatusOr<std::unique_ptr<Factor>> Make(const MkorConfig& config, int64_t d, DeviceGroup& group,
                                                      int primary);
  // Upper bounds for any device. The scratch is that of a Prepare with k vectors, until Commit, or of a PrepareLoad.
  static int64_t StateBytes(int64_t d, int ranks) { return RowSplitFactor::StateBytes(d, ranks); }
  static int64_t ScratchBytes(const MkorConfig& config, int64_t d, int64_t k, int ranks);
  // Upper bound for any device of the scratch of Precondition for d [m, n].
  static int64_t PreconditionScratchBytes(int64_t m, int64_t n, int ranks);

  // u = J_out d J_in for factors of one group and primary. A null side stands for I; at most one is null. d and u are
  // on the primary device. u must not alias d.
  static absl::Status Precondition(const SplitFactor* out_side, const SplitFactor* in_side, ConstMatrixView d,
                                   MatrixView u);

  using Factor::Prepare;
  absl::Status Prepare(ConstMatrixView vectors, absl::Span<const double> squares) override;
  void Commit() override;
  void Abandon() override;
  // Writes the full J, which DeferredFactor can load too.
  absl::Status Save(StateWriter& out) const override;
  // Loads what a SplitFactor or a DeferredFactor has saved. The bytes must stay valid until Commit, which reads them
  // again.
  absl::Status PrepareLoad(StateReader& in) override;
  absl::StatusOr<FactorInverse> Inverse() const override;
  bool low_rank() const override { return false; }
  int64_t rank() const override { return 0; }
  double damping() const override { return 0.0; }
  int64_t bytes() const override;  // sum over all devices

 private:
  // J <- decay J + shift I - left' right. An empty `right` stands for `left`. If `full` or `tiles`, f32 elements of a
  // saved state, is set, J is first replaced by it times `scale`.
  struct Change {
    double decay = 1;
    double shift = 0;
    std::vector<DeviceMatrix> left, right;  // one for each rank
    absl::string_view full, tiles;
    double scale = 1;
  };
  SplitFactor(const MkorConfig& config, int64_t d, DeviceGroup& group, int primary);
  absl::Status LoadFull(StateReader& in);
  absl::Status LoadTiles(StateReader& in);
  absl::Status Apply(const Change& change);
  absl::Status Apply(const Change& change, RowSplitFactor& factor, size_t rank) const;
  // Copies rows [begin, begin + host.rows) of the saved J to `host`.
  void SavedRows(const Change& change, int64_t begin, MatrixView host) const;
  bool has_change() const { return !change_.left.empty() || !change_.full.empty(); }

  const MkorConfig config_;
  const int64_t d_;
  DeviceGroup& group_;
  const int primary_;
  std::vector<std::unique_ptr<RowSplitFactor>> factors_;  // one for each rank
  RuleScalars scalars_;
  // Made by Prepare, adopted by Commit.
  RuleScalars next_;
  Change change_;
  absl::Status lost_;
};

}  // namespace precondor
