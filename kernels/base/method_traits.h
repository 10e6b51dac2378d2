// SPDX-License-Identifier: Apache-2.0
// What a method is like, whatever its options. Each method defines its own traits beside its factory
// (kernels/methods/<name>.h); kernels/methods/registry.h has those of all methods. Plain values.
#pragma once

#include <cstdint>

#include "absl/strings/string_view.h"

#include "kernels/base/session_spec.h"

namespace precondor {

// What a method's updates take.
enum class StatisticsForm : uint8_t {
  kNone,         // nothing: it works from gradients alone, and workers send no statistics
  kVectors,      // vectors only
  kCovariances,  // per side either form, whichever is smaller on the wire; vectors may be samples of rows
};

// How the length of an answer is set; docs/methods/mkor.md has the policies.
enum class Scaling : uint8_t { kNormRescale, kKlClip, kRmsClip, kNone };
// By Scaling's values, the texts of the option `scaling`.
inline constexpr absl::string_view kScalingNames[] = {"NORM_RESCALE", "KL_CLIP", "RMS_CLIP", "NONE"};

struct MethodTraits {
  absl::string_view name;  // in MethodConfig, and of the page docs/methods/<name>.md
  StatisticsForm statistics = StatisticsForm::kNone;
  // What a session sends where its user names no statistics.
  StatisticsKind default_statistics = StatisticsKind::kSigned;
  // Where the option `scaling` is left out; kNone for a method without that option.
  Scaling default_scaling = Scaling::kNone;
  // Workers can hold the factors (REPLAY, PULL_FACTORS): an update is a function of O(d) statistics alone, and an
  // answer one of the factors and the gradient alone.
  bool local_factors = false;
  // An answer is the whole update of a parameter, for an optimizer that keeps no moments of its own.
  bool whole_updates = false;
};

}  // namespace precondor
