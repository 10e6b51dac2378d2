// SPDX-License-Identifier: Apache-2.0
// Properties of a method that do not depend on its options. Each method defines its traits beside its factory
// (kernels/methods/<name>.h); kernels/methods/registry.h has those of all methods. Plain values.
#pragma once

#include <cstdint>
#include <limits>

#include "absl/strings/string_view.h"

#include "kernels/base/session_spec.h"

namespace precondor {

// The statistics that a method's updates take.
enum class StatisticsForm : uint8_t {
  kNone,         // none: the method works from gradients alone, and workers send no statistics
  kVectors,      // vectors only
  kCovariances,  // either form per side, whichever is smaller on the wire; vectors may be samples of rows
};

// Whether workers can hold the factors themselves. An answer is then a function of the factors and the gradient alone.
enum class WorkerFactors : uint8_t {
  kNone,      // no
  kPulled,    // PULL_FACTORS: they load the factors after each update
  kReplayed,  // REPLAY too: an update is a function of O(d) statistics alone, which they apply as the shard does
};

// How the norm of an answer is set; docs/use/methods/mkor.md defines the policies.
enum class Scaling : uint8_t { kNormRescale, kKlClip, kRmsClip, kNone };
// Texts of the option `scaling`, indexed by Scaling.
inline constexpr absl::string_view kScalingNames[] = {"NORM_RESCALE", "KL_CLIP", "RMS_CLIP", "NONE"};

// A method that works from gradients alone refuses a gradient D with |D| above this. The squares of all elements, and
// the elements of D D' and of its running averages, then stay within f32.
inline constexpr double kMaxLearntGradientNorm = 0x1p60;  // 1.2e18

struct MethodTraits {
  absl::string_view name;  // name in MethodConfig and of the page docs/use/methods/<name>.md
  StatisticsForm statistics = StatisticsForm::kNone;
  // Statistics that a session sends if its user names none.
  StatisticsKind default_statistics = StatisticsKind::kSigned;
  // Value of the option `scaling` if it is left out. kNone for a method without that option.
  Scaling default_scaling = Scaling::kNone;
  WorkerFactors worker_factors = WorkerFactors::kNone;
  // True if the state is a function of the gradients that the method has preconditioned, so that a journal of these
  // restores it. Otherwise it is a function of the statistics of its updates.
  bool learns_from_gradients = false;
  // True if an answer is the whole update of a parameter, for an optimizer that keeps no moments of its own. The
  // gradient itself is then no answer.
  bool whole_updates = false;

  // Returns the largest norm of a gradient that the method takes.
  double max_gradient_norm() const {
    return learns_from_gradients ? kMaxLearntGradientNorm : std::numeric_limits<double>::infinity();
  }
};

}  // namespace precondor
