// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/tools/model_shapes.h"

#include <array>
#include <fstream>
#include <sstream>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include <nlohmann/json.hpp>

#include "kernels/base/status_macros.h"

namespace precondor {
namespace {

using nlohmann::json;

// He et al. 2015 (arXiv:1512.03385), table 1, as torchvision builds it: bottleneck blocks of 1x1, 3x3 and 1x1
// convolutions without biases; the first block of a stage has a 1x1 convolution on its shortcut.
ModelShapes ResNet50() {
  struct Stage {
    int64_t width, blocks;
  };
  constexpr std::array<Stage, 4> kStages = {{{64, 3}, {128, 4}, {256, 6}, {512, 3}}};
  ModelShapes model{.name = "resnet50",
                    .layers = {{"conv1", 64, int64_t{3} * 7 * 7}},
                    .left_out = "batch normalizations and the classifier fc [1000, 2048]"};
  int64_t inputs = 64;
  for (size_t s = 0; s < kStages.size(); ++s) {
    const auto [width, blocks] = kStages[s];
    const std::string stage = absl::StrCat("layer", s + 1);
    const int64_t outputs = 4 * width;
    model.layers.push_back({stage + ".first.conv1", width, inputs});
    model.layers.push_back({stage + ".first.conv2", width, width * 9});
    model.layers.push_back({stage + ".first.conv3", outputs, width});
    model.layers.push_back({stage + ".first.shortcut", outputs, inputs});
    model.layers.push_back({stage + ".rest*.conv1", width, outputs, false, blocks - 1});
    model.layers.push_back({stage + ".rest*.conv2", width, width * 9, false, blocks - 1});
    model.layers.push_back({stage + ".rest*.conv3", outputs, width, false, blocks - 1});
    inputs = outputs;
  }
  return model;
}

// Devlin et al. 2018 (arXiv:1810.04805): 24 blocks, hidden size 1024, feed-forward size 4096.
ModelShapes BertLarge() {
  constexpr int64_t kBlocks = 24, kHidden = 1024, kInner = 4096;
  return {"bert-large",
          {{"block*.query", kHidden, kHidden, true, kBlocks},
           {"block*.key", kHidden, kHidden, true, kBlocks},
           {"block*.value", kHidden, kHidden, true, kBlocks},
           {"block*.output", kHidden, kHidden, true, kBlocks},
           {"block*.up", kInner, kHidden, true, kBlocks},
           {"block*.down", kHidden, kInner, true, kBlocks}},
          "embeddings, layer normalizations, pooler and heads"};
}

// Radford et al. 2019: 48 blocks, width 1600; query, key and value are one matrix.
ModelShapes Gpt2Xl() {
  constexpr int64_t kBlocks = 48, kWidth = 1600;
  return {"gpt2-xl",
          {{"block*.attention", 3 * kWidth, kWidth, true, kBlocks},
           {"block*.projection", kWidth, kWidth, true, kBlocks},
           {"block*.up", 4 * kWidth, kWidth, true, kBlocks},
           {"block*.down", kWidth, 4 * kWidth, true, kBlocks}},
          "token and position embeddings (the head shares the former) and layer normalizations"};
}

// Touvron et al. 2023 (arXiv:2307.09288): 32 blocks, width 4096, gated feed-forward of 11008; no biases.
ModelShapes Llama2() {
  constexpr int64_t kBlocks = 32, kWidth = 4096, kInner = 11008;
  return {"llama2-7b",
          {{"block*.query", kWidth, kWidth, false, kBlocks},
           {"block*.key", kWidth, kWidth, false, kBlocks},
           {"block*.value", kWidth, kWidth, false, kBlocks},
           {"block*.output", kWidth, kWidth, false, kBlocks},
           {"block*.gate", kInner, kWidth, false, kBlocks},
           {"block*.up", kInner, kWidth, false, kBlocks},
           {"block*.down", kWidth, kInner, false, kBlocks}},
          "embedding, head and RMS normalizations"};
}

// Reads the values of one entry. Its error messages name the entry.
struct EntryReader {
  const json& entry;
  std::string place;  // "shapes.json: layers[3] \"fc\""

  absl::Status Wrong(absl::string_view key, absl::string_view expected) const {
    const auto found = entry.find(key);
    const std::string got =
        found == entry.end() ? "nothing" : found->dump(-1, ' ', false, json::error_handler_t::replace).substr(0, 64);
    return absl::InvalidArgumentError(absl::StrCat(place, ": ", key, ": expected ", expected, ", got ", got));
  }
  absl::StatusOr<int64_t> Integer(const char* key, int64_t most) const {
    const auto found = entry.find(key);
    const bool whole = found != entry.end() && found->is_number_integer();
    // A number beyond int64 would be read as negative, so the range is checked on the double.
    if (whole && found->get<double>() >= 1 && found->get<double>() <= static_cast<double>(most)) {
      return found->get<int64_t>();
    }
    return Wrong(key, absl::StrCat("an integer, 1 ... ", most));
  }
};

absl::StatusOr<LayerShape> ReadEntry(const json& entry, absl::string_view source, size_t index) {
  EntryReader reader{entry, absl::StrCat(source, ": layers[", index, "]")};
  if (!entry.is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat(reader.place, ": expected an object {name, d_out, d_in, bias, count}, got a ", entry.type_name()));
  }
  LayerShape shape;
  const auto name = entry.find("name");
  if (name == entry.end() || !name->is_string() || name->get<std::string>().empty()) {
    return reader.Wrong("name", "a text that is not empty");
  }
  shape.name = name->get<std::string>();
  absl::StrAppend(&reader.place, " \"", shape.name, "\"");
  for (const auto& [key, value] : entry.items()) {
    if (key == "name" || key == "d_out" || key == "d_in" || key == "bias" || key == "count") continue;
    return absl::InvalidArgumentError(
        absl::StrCat(reader.place, ": expected the keys name, d_out, d_in, bias and count, got \"", key, "\""));
  }
  PRECONDOR_ASSIGN_OR_RETURN(shape.d_out, reader.Integer("d_out", kMaxDimension));
  // One less than kMaxDimension, to leave room for the column of a bias.
  PRECONDOR_ASSIGN_OR_RETURN(shape.d_in, reader.Integer("d_in", kMaxDimension - 1));
  if (const auto bias = entry.find("bias"); bias != entry.end()) {
    if (!bias->is_boolean()) return reader.Wrong("bias", "true or false");
    shape.bias = bias->get<bool>();
  }
  if (entry.contains("count")) {
    PRECONDOR_ASSIGN_OR_RETURN(shape.count, reader.Integer("count", kMaxLayers));
  }
  return shape;
}

std::string CopyName(const LayerShape& shape, int64_t copy) {
  if (shape.name.find('*') != std::string::npos) return absl::StrReplaceAll(shape.name, {{"*", absl::StrCat(copy)}});
  return shape.count > 1 ? absl::StrCat(shape.name, ".", copy) : shape.name;
}

}  // namespace

const std::vector<std::string>& PresetNames() {
  static const auto* const kNames = new std::vector<std::string>{"resnet50", "bert-large", "gpt2-xl", "llama2-7b"};
  return *kNames;
}

absl::StatusOr<ModelShapes> PresetShapes(absl::string_view name) {
  if (name == "resnet50") return ResNet50();
  if (name == "bert-large") return BertLarge();
  if (name == "gpt2-xl") return Gpt2Xl();
  if (name == "llama2-7b") return Llama2();
  return absl::NotFoundError(
      absl::StrCat("expected one of ", absl::StrJoin(PresetNames(), ", "), ", got \"", name.substr(0, 64), "\""));
}

absl::StatusOr<ModelShapes> ParseLayerTable(absl::string_view text, absl::string_view source) {
  const json document = json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  if (document.is_discarded()) return absl::InvalidArgumentError(absl::StrCat(source, ": expected JSON"));
  if (!document.is_array() || document.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(source, ": expected a list of layers that is not empty, got ",
                                                   document.is_array() ? "an empty one" : document.type_name()));
  }
  ModelShapes model{.name = std::string(source)};
  for (size_t i = 0; i < document.size(); ++i) {
    PRECONDOR_ASSIGN_OR_RETURN(LayerShape shape, ReadEntry(document[i], source, i));
    model.layers.push_back(std::move(shape));
  }
  return model;
}

absl::StatusOr<ModelShapes> ReadLayerTable(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  if (!file)
    return absl::NotFoundError(
        absl::StrCat("--layers: expected a file with a layer table, cannot read \"", path, "\""));
  return ParseLayerTable(text.str(), path);
}

absl::StatusOr<std::vector<LayerSpec>> ExpandLayers(const ModelShapes& model, const ExpandOptions& options) {
  int64_t total = 0;
  for (const LayerShape& shape : model.layers) total += shape.count;
  if (total > kMaxLayers) {
    return absl::InvalidArgumentError(
        absl::StrCat(model.name, ": expected at most ", kMaxLayers, " layers, got ", total));
  }
  const auto scaled = [&](int64_t d) { return (d + options.scale - 1) / options.scale; };
  std::vector<LayerSpec> layers;
  for (size_t begin = 0, end = 0; begin < model.layers.size(); begin = end) {
    const int64_t count = model.layers[begin].count;
    for (end = begin + 1; count > 1 && end < model.layers.size() && model.layers[end].count == count;) ++end;
    for (int64_t copy = 0; copy < count; ++copy) {
      for (size_t i = begin; i < end; ++i) {
        const LayerShape& shape = model.layers[i];
        const bool bias = shape.bias && options.fold_biases;
        layers.push_back(
            {CopyName(shape, copy), scaled(shape.d_out), scaled(shape.d_in) + static_cast<int64_t>(bias), bias});
      }
    }
  }
  return layers;
}

}  // namespace precondor
