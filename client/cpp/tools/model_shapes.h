// SPDX-License-Identifier: Apache-2.0
// Layer tables of known models and of files, for precondorctl plan and precondor-perf.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "kernels/base/session_spec.h"

namespace precondor {

// One entry of a table: `count` layers of one shape. A convolution is [channels out, channels in * kernel area].
struct LayerShape {
  std::string name;  // "*" stands for the number of the copy
  int64_t d_out = 0;
  int64_t d_in = 0;  // without the column of the bias
  bool bias = false;
  int64_t count = 1;
};

struct ModelShapes {
  std::string name;
  std::vector<LayerShape> layers = {};
  // Describes the parameters that are left to the optimizer; empty if the table does not say.
  std::string left_out = {};
};

// Returns "resnet50", "bert-large", "gpt2-xl" and "llama2-7b".
const std::vector<std::string>& PresetNames();
// Returns the table of a preset, or NotFound, which names the presets.
absl::StatusOr<ModelShapes> PresetShapes(absl::string_view name);

// Parses a table in JSON: a list of {"name": "fc*", "d_out": 4096, "d_in": 1024, "bias": true, "count": 24}. bias
// (false) and count (1) are optional. Returns InvalidArgument, which names `source`, the entry by its index and name,
// the key, and the expected and actual values.
absl::StatusOr<ModelShapes> ParseLayerTable(absl::string_view text, absl::string_view source);
// Reads a table from a file. Returns NotFound if it cannot be read, or InvalidArgument; both name the file.
absl::StatusOr<ModelShapes> ReadLayerTable(const std::string& path);

struct ExpandOptions {
  int64_t scale = 1;        // divides both dimensions, rounded up
  bool fold_biases = true;  // false leaves biases to the optimizer
};
// Returns the layers of a session, each copy with a name of its own. Consecutive entries with equal counts above 1
// repeat together, like the layers of a block. Returns InvalidArgument if there are more layers than a session may
// have. Two entries may give equal names, which ValidateSessionSpec refuses.
absl::StatusOr<std::vector<LayerSpec>> ExpandLayers(const ModelShapes& model, const ExpandOptions& options);

}  // namespace precondor
