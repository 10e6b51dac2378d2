// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/tools/model_shapes.h"

#include <fstream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace precondor {
namespace {

using ::testing::HasSubstr;

// Sums of a model's layers without biases.
struct Sums {
  int64_t layers = 0;
  double gradient_mb = 0;    // in bf16
  double statistics_mb = 0;  // one f16 vector for each side of each layer
};

Sums SumsOf(const std::string& preset) {
  const auto model = PresetShapes(preset);
  EXPECT_TRUE(model.ok()) << model.status();
  const auto layers = ExpandLayers(*model, {.fold_biases = false});
  EXPECT_TRUE(layers.ok()) << layers.status();
  Sums sums;
  for (const LayerSpec& layer : *layers) {
    ++sums.layers;
    sums.gradient_mb += 2e-6 * static_cast<double>(layer.d_out * layer.d_in);
    sums.statistics_mb += 2e-6 * static_cast<double>(layer.d_out + layer.d_in);
  }
  return sums;
}

TEST(ModelShapesTest, PresetsHaveTheModelsSizes) {
  // torchvision's resnet50 has 25,557,032 parameters: 2,049,000 of its classifier and 53,120 of batch normalizations
  // are left out.
  const Sums resnet = SumsOf("resnet50");
  EXPECT_EQ(resnet.layers, 53);
  EXPECT_NEAR(resnet.gradient_mb, 2e-6 * (25557032 - 2049000 - 53120), 1e-9);
  EXPECT_NEAR(resnet.statistics_mb, 0.15, 0.01);
  const Sums bert = SumsOf("bert-large");
  EXPECT_EQ(bert.layers, 144);
  EXPECT_NEAR(bert.gradient_mb, 604, 0.5);
  EXPECT_NEAR(bert.statistics_mb, 0.89, 0.01);
  const Sums gpt2 = SumsOf("gpt2-xl");
  EXPECT_EQ(gpt2.layers, 192);
  EXPECT_NEAR(gpt2.gradient_mb, 2950, 5);
  EXPECT_NEAR(gpt2.statistics_mb, 2.5, 0.05);
  const Sums llama = SumsOf("llama2-7b");
  EXPECT_EQ(llama.layers, 224);
  EXPECT_NEAR(llama.gradient_mb, 13000, 100);
  EXPECT_NEAR(llama.statistics_mb, 5.0, 0.01);
}

TEST(ModelShapesTest, EveryPresetIsAValidSession) {
  for (const std::string& name : PresetNames()) {
    const auto model = PresetShapes(name);
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_FALSE(model->left_out.empty()) << name;
    SessionSpec spec;
    spec.name = name;
    spec.layers = *ExpandLayers(*model, {});
    EXPECT_TRUE(ValidateSessionSpec(spec).ok()) << ValidateSessionSpec(spec);
  }
  EXPECT_THAT(PresetShapes("vgg"),
              MessageIs(HasSubstr("expected one of resnet50, bert-large, gpt2-xl, llama2-7b, got \"vgg\"")));
}

TEST(ModelShapesTest, EntriesOfEqualCountRepeatAsABlock) {
  const auto model = ParseLayerTable(R"([{"name": "in", "d_out": 7, "d_in": 5, "bias": true},
      {"name": "block*.a", "d_out": 6, "d_in": 4, "bias": true, "count": 2},
      {"name": "b", "d_out": 3, "d_in": 6, "count": 2}])",
                                     "table");
  ASSERT_TRUE(model.ok()) << model.status();
  const auto layers = ExpandLayers(*model, {});
  ASSERT_TRUE(layers.ok()) << layers.status();
  const std::vector<LayerSpec> expected = {{"in", 7, 6, true},
                                           {"block0.a", 6, 5, true},
                                           {"b.0", 3, 6, false},
                                           {"block1.a", 6, 5, true},
                                           {"b.1", 3, 6, false}};
  EXPECT_EQ(*layers, expected);
  const auto half = ExpandLayers(*model, {.scale = 2, .fold_biases = false});
  EXPECT_EQ(half->front(), (LayerSpec{"in", 4, 3, false}));
}

TEST(ModelShapesTest, SaysWhatIsWrongWithWhichEntry) {
  const auto message = [](const char* text) { return std::string(ParseLayerTable(text, "f.json").status().message()); };
  EXPECT_EQ(message("nonsense"), "f.json: expected JSON");
  EXPECT_THAT(message("{}"), HasSubstr("expected a list of layers that is not empty, got object"));
  EXPECT_THAT(message("[]"), HasSubstr("got an empty one"));
  EXPECT_THAT(message("[3]"),
              HasSubstr("layers[0]: expected an object {name, d_out, d_in, bias, count}, got a number"));
  EXPECT_THAT(message(R"([{"d_out": 1, "d_in": 1}])"), HasSubstr("layers[0]: name: expected a text"));
  EXPECT_EQ(message(R"([{"name": "a", "d_out": 1, "d_in": 1}, {"name": "fc", "d_out": 0, "d_in": 1}])"),
            "f.json: layers[1] \"fc\": d_out: expected an integer, 1 ... 1048576, got 0");
  EXPECT_THAT(message(R"([{"name": "fc", "d_out": 1}])"),
              HasSubstr("d_in: expected an integer, 1 ... 1048575, got nothing"));
  EXPECT_THAT(message(R"([{"name": "fc", "d_out": 18446744073709551615, "d_in": 1}])"), HasSubstr("d_out: expected"));
  EXPECT_THAT(message(R"([{"name": "fc", "d_out": 1, "d_in": 1.5}])"), HasSubstr("got 1.5"));
  EXPECT_THAT(message(R"([{"name": "fc", "d_out": 1, "d_in": 1, "bias": 1}])"),
              HasSubstr("bias: expected true or false, got 1"));
  EXPECT_THAT(message(R"([{"name": "fc", "d_out": 1, "d_in": 1, "count": 0}])"), HasSubstr("count: expected"));
  EXPECT_THAT(message(R"([{"name": "fc", "d_out": 1, "d_in": 1, "din": 4}])"), HasSubstr("got \"din\""));
  const auto many = ParseLayerTable(R"([{"name": "a", "d_out": 1, "d_in": 1, "count": 65536},
                                        {"name": "b", "d_out": 1, "d_in": 1}])",
                                    "f.json");
  EXPECT_THAT(ExpandLayers(*many, {}), MessageIs(HasSubstr("expected at most 65536 layers, got 65537")));
}

TEST(ModelShapesTest, ReadsAFile) {
  const TempDir folder;
  const std::string path = folder.path() + "/layers.json";
  std::ofstream(path) << R"([{"name": "fc", "d_out": 2, "d_in": 3}])";
  const auto model = ReadLayerTable(path);
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(model->layers.size(), 1u);
  EXPECT_EQ(model->name, path);
  EXPECT_THAT(ReadLayerTable(path + "x"), StatusIs(absl::StatusCode::kNotFound, HasSubstr("layers.jsonx")));
}

}  // namespace
}  // namespace precondor
