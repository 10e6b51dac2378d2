// SPDX-License-Identifier: Apache-2.0
// What method kfac keeps of a layer's sides, by its options: running second moments, and decompositions of them, which
// a background thread may make.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/backend.h"
#include "kernels/base/mutex.h"
#include "kernels/base/schedule.h"
#include "kernels/base/session_spec.h"
#include "kernels/methods/method.h"
#include "kernels/methods/options.h"
#include "kernels/methods/scaling.h"
#include "kernels/methods/state_codec.h"

namespace precondor {

inline constexpr MethodTraits kKfacTraits = {
    .name = "kfac",
    .statistics = StatisticsForm::kCovariances,
    .default_scaling = Scaling::kKlClip,
    .worker_factors = WorkerFactors::kPulled,
};

enum class KfacForm : uint8_t { kEigen, kInverse };

// docs/use/methods/kfac.md has the formulas. Schedules count statistic updates of the layer, from 0.
struct KfacConfig {
  KfacForm form = KfacForm::kEigen;
  bool prediv = false;
  bool pi_split = false;
  bool stagger = true;
  Schedule damping;
  Schedule factor_decay;
  Schedule factor_update_steps;
  Schedule inv_update_steps;
  int64_t accumulation_steps = 1;
  uint64_t refresh_lag = 0;
  double row_scale = 1.0;
  Scaling scaling = kKfacTraits.default_scaling;
  Schedule scaling_clip;
  // Text of the options that the state depends on.
  std::string state_text;

  // Returns the interval at t: the schedule's value rounded down, at least 1.
  static uint64_t Interval(const Schedule& schedule, uint64_t t);
};

// Reads every option. The reader keeps the first error; the caller calls its Finish.
inline KfacConfig ReadKfacConfig(OptionReader& reader) {
  constexpr double kHuge = 1e9;
  KfacConfig out;
  out.form = static_cast<KfacForm>(reader.Choice("form", 0, {"EIGEN", "INVERSE"}));
  out.prediv = reader.Flag("prediv", out.prediv);
  out.pi_split = reader.Flag("pi_split", out.pi_split);
  out.stagger = reader.Flag("stagger", out.stagger);
  out.damping = reader.ReadSchedule("damping", "0.001", 1e-12, kHuge);
  out.factor_decay = reader.ReadSchedule("factor_decay", "0.95", 0, 1);
  out.factor_update_steps = reader.ReadSchedule("factor_update_steps", "1", 1, kHuge);
  out.inv_update_steps = reader.ReadSchedule("inv_update_steps", "1", 1, kHuge);
  out.accumulation_steps = reader.Integer("accumulation_steps", out.accumulation_steps, 1, 1 << 20);
  out.refresh_lag = static_cast<uint64_t>(reader.Integer("refresh_lag", 0, 0, 1 << 20));
  out.row_scale = reader.OpenNumber("row_scale", out.row_scale, 0, kHuge);
  out.scaling = ReadScalingKind(reader, out.scaling);
  out.scaling_clip =
      reader.ReadSchedule("scaling_clip", out.scaling == Scaling::kKlClip ? "0.001" : "1.1", 1e-12, kHuge);
  return out;
}
// Returns InvalidArgument with the option, the expected values and the actual value.
absl::StatusOr<KfacConfig> ParseKfacConfig(const MethodConfig& config);

// Shares of the damping for each side. INVERSE without the pi split adds all of it to each side, EIGEN adds all of it
// to the product of the eigenvalues.
struct KfacDamping {
  double in = 0;
  double out = 0;
};
KfacDamping SplitDamping(const KfacConfig& config, double damping, double split);

// The decomposition of both sides of a layer, eigenvectors or inverses, made at intervals. One thread at a time.
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

// The running second moment of one side. A change is first prepared and then committed or abandoned, so that both sides
// of a layer change together. One thread at a time.
class KfacSide {
 public:
  // Makes a side whose second moment is I. `backend` must outlive the side.
  static absl::StatusOr<KfacSide> Make(int64_t d, Backend& backend);
  static int64_t PackedElements(int64_t d) { return d * (d + 1) / 2; }
  // Exact. A prepared change takes as much again, and a work matrix [d, d] while it is computed.
  static int64_t StateBytes(int64_t d) { return PackedElements(d) * static_cast<int64_t>(sizeof(float)); }

  // Prepares F = keep F + add S. S is the second moment of `vectors` [k, d] or, if there are none, the packed
  // `covariance`. Returns InvalidArgument if F would not fit f32.
  absl::Status PrepareFactor(ConstMatrixView vectors, ConstMatrixView covariance, double keep, double add);
  // Prepares F = I.
  absl::Status PrepareReset();
  void Commit();
  void Abandon() { next_factor_ = DeviceMatrix(); }

  // Writes F.
  absl::Status Save(StateWriter& out) const { return out.Matrix(*backend_, factor_.view()); }
  absl::Status PrepareLoad(StateReader& in);

  // Returns the packed prepared F, or the packed F if none is prepared.
  ConstMatrixView factor() const { return next_factor_.empty() ? factor_.view() : next_factor_.view(); }

 private:
  KfacSide(int64_t d, Backend& backend) : d_(d), backend_(&backend) {}

  int64_t d_;
  Backend* backend_;
  DeviceMatrix factor_;  // F, packed
  DeviceMatrix next_factor_;
};

// A deferred decomposition: the factors of one statistic step, and the decomposition that a background thread makes of
// them. Owns both. Thread-safe. Make allocates all memory except scratch, so that none of it
// can be lacking later.
class KfacRefresh {
 public:
  // Allocates a refresh. The caller must then write the factors to in_factor() and out_factor(). `damping` is that of
  // their step. `backend` must outlive the refresh.
  static absl::StatusOr<std::shared_ptr<KfacRefresh>> Make(const KfacConfig& config, const LayerSpec& layer,
                                                           double damping, Backend& backend);
  static int64_t Bytes(const KfacConfig& config, const LayerSpec& layer);

  // Packed factors. Do not write to them once Run may have been called.
  MatrixView in_factor() { return in_.view(); }
  MatrixView out_factor() { return out_.view(); }

  // Decomposes the factors unless that is done; waits if another thread is decomposing. Returns the errors of
  // KfacDecomposition::Decompose. After an error of the device, the next call tries again.
  absl::Status Run();
  // Precondition: Run has returned OK.
  KfacDecomposition& made() { return made_; }

 private:
  KfacRefresh(const KfacConfig& config, double damping, Backend& backend)
      : config_(config), damping_(damping), backend_(backend) {}
  bool Runs();
  void AwaitOther();

  const KfacConfig config_;
  const double damping_;
  Backend& backend_;
  DeviceMatrix in_;
  DeviceMatrix out_;
  KfacDecomposition made_;  // used by the thread in Run, then by the owner

  Mutex mu_;
  CondVar ran_;
  bool runs_ ABSL_GUARDED_BY(mu_) = false;
  std::optional<absl::Status> outcome_ ABSL_GUARDED_BY(mu_);
};

}  // namespace precondor
