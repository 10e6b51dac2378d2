// SPDX-License-Identifier: Apache-2.0
// Options of method kfac; docs/use/methods/kfac.md has the formulas.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

#include "kernels/base/schedule.h"
#include "kernels/base/session_spec.h"
#include "kernels/methods/method.h"
#include "kernels/methods/options.h"
#include "kernels/methods/scaling.h"

namespace precondor {

inline constexpr MethodTraits kKfacTraits = {
    .name = "kfac",
    .statistics = StatisticsForm::kCovariances,
    .default_scaling = Scaling::kKlClip,
    .worker_factors = WorkerFactors::kPulled,
};

enum class KfacForm : uint8_t { kEigen, kInverse };

// Schedules count statistic updates of the layer, from 0.
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

}  // namespace precondor
