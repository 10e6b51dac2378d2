// SPDX-License-Identifier: Apache-2.0
// Properties of a method that do not depend on its options. Each method defines its traits beside its factory
// (kernels/methods/<name>.h); kernels/methods/registry.h has those of all methods. Plain values.
#pragma once

#include <cstdint>

#include "absl/strings/string_view.h"

#include "kernels/base/session_spec.h"

namespace precondor {

// The statistics that a method's updates take.
enum class StatisticsForm : uint8_t {
  kNone,         // none: the method works from gradients alone, and workers send no statistics
  kVectors,      // vectors only
  kCovariances,  // either form per side, whichever is smaller on the wire; vectors may be samples of rows
};

// How the norm of an answer is set; docs/methods/mkor.md defines the policies.
enum class Scaling : uint8_t { kNormRescale, kKlClip, kRmsClip, kNone };
// Texts of the option `scaling`, indexed by Scaling.
inline constexpr absl::string_view kScalingNames[] = {"NORM_RESCALE", "KL_CLIP", "RMS_CLIP", "NONE"};

struct MethodTraits {
  absl::string_view name;  // name in MethodConfig and of the page docs/methods/<name>.md
  StatisticsForm statistics = StatisticsForm::kNone;
  // Statistics that a session sends if its user names none.
  StatisticsKind default_statistics = StatisticsKind::kSigned;
  // Value of the option `scaling` if it is left out. kNone for a method without that option.
  Scaling default_scaling = Scaling::kNone;
  // True if workers can hold the factors (REPLAY, PULL_FACTORS): an update is a function of O(d) statistics alone, and
  // an answer is a function of the factors and the gradient alone.
  bool local_factors = false;
  // True if an answer is the whole update of a parameter, for an optimizer that keeps no moments of its own.
  bool whole_updates = false;
};

}  // namespace precondor
