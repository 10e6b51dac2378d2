// SPDX-License-Identifier: Apache-2.0
// Layer tables of known models, and of files: the shapes that precondorctl plan and precondor-perf work with.
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
  std::string name;  // a "*" in it becomes the number of the copy
  int64_t d_out = 0;
  int64_t d_in = 0;  // without the column of the bias
  bool bias = false;
  int64_t count = 1;
};

struct ModelShapes {
  std::string name;
  std::vector<LayerShape> layers = {};
  std::string left_out = {};  // parameters that the optimizer keeps for itself, in words; empty: the table does not say
};

// "resnet50", "bert-large", "gpt2-xl", "llama2-7b".
const std::vector<std::string>& PresetNames();
// NotFound names the presets.
absl::StatusOr<ModelShapes> PresetShapes(absl::string_view name);

// A table as JSON: a list of {"name": "fc*", "d_out": 4096, "d_in": 1024, "bias": true, "count": 24}, of which bias
// (false) and count (1) may be left out. InvalidArgument names `source`, the entry's place and name, the key, what was
// expected and what came.
absl::StatusOr<ModelShapes> ParseLayerTable(absl::string_view text, absl::string_view source);
// NotFound or InvalidArgument name the file.
absl::StatusOr<ModelShapes> ReadLayerTable(const std::string& path);

struct ExpandOptions {
  int64_t scale = 1;        // divides both dimensions, rounded up
  bool fold_biases = true;  // false: biases are left to the optimizer
};
// The layers of a session: names are unique. Entries that follow each other with equal counts above 1 repeat together,
// as the layers of a block do. InvalidArgument: more layers than a session may have.
absl::StatusOr<std::vector<LayerSpec>> ExpandLayers(const ModelShapes& model, const ExpandOptions& options);

}  // namespace precondor
