// SPDX-License-Identifier: Apache-2.0
#include "proto/wire/spec_codec.h"

#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/unknown_field_set.h>
#include <gtest/gtest.h>
#include <set>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"

namespace precondor::wire {
namespace {

using ::testing::HasSubstr;

SessionSpec FullSpec() {
  SessionSpec spec;
  spec.name = "job-1.a_b";
  spec.seed = 0xFFFFFFFFFFFFFFFFull;
  spec.world_size = 7;
  spec.exchange = ExchangeMode::kDelegate;
  spec.statistics = StatisticsKind::kSigned;
  spec.sketches = 5;
  spec.inv_freq = 1;
  spec.warmup_steps = 0;
  spec.statistics_dtype = DType::kBF16;
  spec.gradient_dtype = DType::kF16;
  spec.method.name = "mkor";
  spec.method.options = {
      {"rule", std::string("BLEND")}, {"rank", 16.0}, {"gamma", 0.9}, {"scaling", std::string("NONE")}};
  // Every field differs from its default.
  spec.fallback = {.policy = FallbackPolicy::kAtStep,
                   .at_step = 0,
                   .rate_decay = 0,
                   .lr_jump = 0.25,
                   .min_steps = 7,
                   .beta = 0.2,
                   .patience_steps = 3};
  spec.layers = {{"encoder.0", 48, 65, true}, {"ünïcode", 1, 1 << 20, false, {64, 128, 128}}};
  spec.layer_methods = {
      {.method = {.name = "identity", .options = {}}, .statistics = StatisticsKind::kCovariance, .layers = {1}}};
  spec.delegates = {1, 0};
  return spec;
}

v1::SessionSpec Encoded(const SessionSpec& spec) {
  absl::StatusOr<v1::SessionSpec> encoded = EncodeSessionSpec(spec);
  EXPECT_TRUE(encoded.ok()) << encoded.status();
  return encoded.ok() ? *encoded : v1::SessionSpec();
}

void ExpectMalformed(const absl::Status& status, const std::string& text) {
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_EQ(GetErrorReason(status), ErrorReason::kMalformed);
  EXPECT_THAT(std::string(status.message()), HasSubstr(text));
}

TEST(SpecCodecTest, RoundTripKeepsEveryField) {
  const SessionSpec spec = FullSpec();
  v1::SessionSpec parsed;
  ASSERT_TRUE(parsed.ParseFromString(Encoded(spec).SerializeAsString()));
  const absl::StatusOr<SessionSpec> back = DecodeSessionSpec(parsed);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(*back, spec);
}

TEST(SpecCodecTest, EveryEnumeratorSurvives) {
  for (int exchange = 1; exchange <= 4; ++exchange) {
    for (int statistics = 1; statistics <= 3; ++statistics) {
      for (int dtype = 1; dtype <= 3; ++dtype) {
        SessionSpec spec = FullSpec();
        spec.exchange = static_cast<ExchangeMode>(exchange);
        spec.statistics = static_cast<StatisticsKind>(statistics);
        spec.statistics_dtype = static_cast<DType>(dtype);
        spec.gradient_dtype = static_cast<DType>(4 - dtype);
        const absl::StatusOr<SessionSpec> back = DecodeSessionSpec(Encoded(spec));
        ASSERT_TRUE(back.ok()) << back.status();
        EXPECT_EQ(*back, spec);
      }
    }
  }
}

template <typename T>
void ExpectSameFields(const google::protobuf::Descriptor& message) {
  std::set<std::string> ours, theirs;
  for (const absl::string_view name : NamesOfFields<T>()) ours.emplace(name);
  for (int i = 0; i < message.field_count(); ++i) theirs.insert(message.field(i)->name());
  EXPECT_EQ(ours, theirs) << message.full_name();
}

TEST(SpecCodecTest, StructsAndMessagesHaveTheSameFields) {
  ExpectSameFields<SessionSpec>(*v1::SessionSpec::descriptor());
  ExpectSameFields<FallbackConfig>(*v1::FallbackConfig::descriptor());
  ExpectSameFields<LayerSpec>(*v1::Layer::descriptor());
  ExpectSameFields<LayerMethod>(*v1::LayerMethod::descriptor());
}

// Expects that `name` of each number of the enumeration is the end of its name in the .proto, and that the numbers
// around have none.
template <typename Ours>
void ExpectSameEnumerators(const google::protobuf::EnumDescriptor& type, absl::string_view (*name)(Ours)) {
  const int last = type.value(type.value_count() - 1)->number();
  for (int number = 0; number <= last + 1; ++number) {
    const google::protobuf::EnumValueDescriptor* const value = type.FindValueByNumber(number);
    const std::string ours = absl::AsciiStrToUpper(name(static_cast<Ours>(number)));
    if (number == 0 || value == nullptr) {
      EXPECT_EQ(ours, "UNKNOWN") << type.name() << " " << number;
    } else {
      EXPECT_TRUE(absl::EndsWith(value->name(), absl::StrCat("_", ours))) << value->name() << " and " << ours;
    }
  }
}

TEST(SpecCodecTest, EnumerationsHaveTheSameNumbersAndNames) {
  ExpectSameEnumerators<DType>(*v1::DataType_descriptor(), DTypeName);
  ExpectSameEnumerators<ExchangeMode>(*v1::ExchangeMode_descriptor(), ExchangeModeName);
  ExpectSameEnumerators<StatisticsKind>(*v1::StatisticsKind_descriptor(), StatisticsKindName);
  ExpectSameEnumerators<Decision>(*v1::Decision_descriptor(), DecisionName);
  ExpectSameEnumerators<FallbackPolicy>(*v1::FallbackPolicy_descriptor(), FallbackPolicyName);
  EXPECT_EQ(EncodeMode(Mode::kSecondOrder), v1::MODE_SECOND_ORDER);
  EXPECT_EQ(EncodeMode(Mode::kFirstOrder), v1::Mode_MAX);
}

TEST(SpecCodecTest, AbsentFieldsHaveTheDefaultsThatTheProtoGives) {
  v1::SessionSpec message;
  message.set_name("s");
  message.set_world_size(3);
  const absl::StatusOr<SessionSpec> spec = DecodeSessionSpec(message);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->exchange, ExchangeMode::kDirect);
  EXPECT_EQ(spec->statistics, StatisticsKind::kSigned);
  EXPECT_EQ(spec->sketches, 6);  // ceil(16 / 3)
  EXPECT_EQ(spec->inv_freq, 10);
  EXPECT_EQ(spec->warmup_steps, 10);
  EXPECT_EQ(spec->statistics_dtype, DType::kF16);
  EXPECT_EQ(spec->gradient_dtype, DType::kF32);
  EXPECT_EQ(spec->method.name, "mkor");
  EXPECT_TRUE(spec->method.options.empty());
}

TEST(SpecCodecTest, AbsentFallbackFieldsHaveTheDefaultsThatTheProtoGives) {
  v1::SessionSpec message;
  message.mutable_fallback();
  const absl::StatusOr<SessionSpec> spec = DecodeSessionSpec(message);
  ASSERT_TRUE(spec.ok()) << spec.status();
  const FallbackConfig& fallback = spec->fallback;
  EXPECT_EQ(fallback.policy, FallbackPolicy::kNever);
  EXPECT_EQ(fallback.at_step, std::nullopt);
  EXPECT_EQ(fallback.rate_decay, 0.99);
  EXPECT_EQ(fallback.lr_jump, 0.1);
  EXPECT_EQ(fallback.min_steps, 200);
  EXPECT_EQ(fallback.beta, 0.1);
  EXPECT_EQ(fallback.patience_steps, 50);
}

TEST(SpecCodecTest, ADefaultFallbackIsLeftOutAndMeansTheSame) {
  SessionSpec spec = FullSpec();
  spec.fallback = {};
  EXPECT_FALSE(Encoded(spec).has_fallback());
  v1::SessionSpec spelled_out = Encoded(spec);
  spelled_out.mutable_fallback()->set_policy(v1::FALLBACK_POLICY_NEVER);
  spelled_out.mutable_fallback()->set_beta(0.1);
  EXPECT_EQ(*DecodeSessionSpec(spelled_out), spec);
}

TEST(SpecCodecTest, EveryFallbackPolicySurvives) {
  for (const FallbackPolicy policy : {FallbackPolicy::kNever, FallbackPolicy::kLossRate, FallbackPolicy::kAtStep}) {
    SessionSpec spec = FullSpec();
    spec.fallback.policy = policy;
    EXPECT_EQ(DecodeSessionSpec(Encoded(spec))->fallback, spec.fallback);
  }
}

TEST(SpecCodecTest, FallbackOptionsOfALaterReleaseAreRefused) {
  v1::SessionSpec message;
  v1::FallbackConfig* fallback = message.mutable_fallback();
  fallback->set_policy(static_cast<v1::FallbackPolicy>(5));
  ExpectMalformed(DecodeSessionSpec(message).status(), "fallback.policy: expected a FallbackPolicy of 1 ... 4, got 5");
  fallback->set_policy(static_cast<v1::FallbackPolicy>(3));  // COST_AWARE, which is gone
  ExpectMalformed(DecodeSessionSpec(message).status(), "fallback.policy: expected");
  fallback->Clear();
  fallback->GetReflection()->MutableUnknownFields(fallback)->AddVarint(55, 1);
  ExpectMalformed(DecodeSessionSpec(message).status(), "fallback: unknown option, field 55");
}

TEST(SpecCodecTest, SketchesDefaultToSixteenAcrossTheWorkers) {
  const struct {
    int32_t world_size, sketches;
  } cases[] = {{1, 16}, {2, 8}, {4, 4}, {5, 4}, {15, 2}, {16, 1}, {17, 1}, {65536, 1}};
  for (const auto& c : cases) {
    v1::SessionSpec message;
    message.set_world_size(c.world_size);
    EXPECT_EQ(DecodeSessionSpec(message)->sketches, c.sketches) << c.world_size;
    message.set_statistics(v1::STATISTICS_KIND_MEAN);
    EXPECT_EQ(DecodeSessionSpec(message)->sketches, 0) << c.world_size;
  }
}

TEST(SpecCodecTest, ZeroIsKeptWhereItIsNotTheDefault) {
  v1::SessionSpec message;
  message.set_inv_freq(0);  // present, and for ValidateSessionSpec to refuse
  message.set_warmup_steps(0);
  const absl::StatusOr<SessionSpec> spec = DecodeSessionSpec(message);
  ASSERT_TRUE(spec.ok());
  EXPECT_EQ(spec->inv_freq, 0);
  EXPECT_EQ(spec->warmup_steps, 0);
  EXPECT_EQ(spec->world_size, 0);
}

TEST(SpecCodecTest, UnknownEnumeratorsAreRefusedByField) {
  v1::SessionSpec message;
  message.set_exchange(static_cast<v1::ExchangeMode>(9));
  ExpectMalformed(DecodeSessionSpec(message).status(), "exchange: expected a ExchangeMode of 1 ... 5, got 9");
  message.Clear();
  message.set_statistics(static_cast<v1::StatisticsKind>(-1));
  ExpectMalformed(DecodeSessionSpec(message).status(), "statistics: ");
  message.Clear();
  message.set_statistics_dtype(static_cast<v1::DataType>(4));
  ExpectMalformed(DecodeSessionSpec(message).status(), "statistics_dtype: ");
  message.Clear();
  message.add_layer_methods();
  message.add_layer_methods()->set_statistics(static_cast<v1::StatisticsKind>(5));
  ExpectMalformed(DecodeSessionSpec(message).status(),
                  "layer_methods[1].statistics: expected a StatisticsKind of 1 ... 4, got 5");
  message.Clear();
  message.set_gradient_dtype(static_cast<v1::DataType>(77));
  ExpectMalformed(DecodeSessionSpec(message).status(), "gradient_dtype: expected a DataType of 1 ... 3, got 77");
  ExpectMalformed(DecodeMode(v1::MODE_UNSPECIFIED, "mode").status(), "got 0 (not set)");
  ExpectMalformed(DecodeDecision(v1::DECISION_UNSPECIFIED, "decision").status(), "decision: ");
}

TEST(SpecCodecTest, ModesAndDecisionsSurvive) {
  for (const Mode mode : {Mode::kSecondOrder, Mode::kFirstOrder}) EXPECT_EQ(*DecodeMode(EncodeMode(mode), "m"), mode);
  for (const Decision decision : {Decision::kPreconditioned, Decision::kIdentity, Decision::kSkip}) {
    EXPECT_EQ(*DecodeDecision(EncodeDecision(decision), "d"), decision);
  }
}

TEST(MethodCodecTest, OnlyPresentOptionsAppear) {
  v1::MethodConfig message;
  message.mutable_mkor()->set_rank(0);  // present though zero
  message.mutable_mkor()->set_rule("REFERENCE");
  const absl::StatusOr<MethodConfig> config = DecodeMethodConfig(message);
  ASSERT_TRUE(config.ok());
  EXPECT_EQ(config->name, "mkor");
  const std::map<std::string, OptionValue> expected = {{"rank", 0.0}, {"rule", std::string("REFERENCE")}};
  EXPECT_EQ(config->options, expected);
}

TEST(MethodCodecTest, ArmsWithoutOptionsSurvive) {
  v1::MethodConfig message;
  message.mutable_identity();
  const absl::StatusOr<MethodConfig> config = DecodeMethodConfig(message);
  ASSERT_TRUE(config.ok());
  EXPECT_EQ(config->name, "identity");
  const absl::StatusOr<v1::MethodConfig> back = EncodeMethodConfig(*config);
  ASSERT_TRUE(back.ok());
  EXPECT_EQ(back->method_case(), v1::MethodConfig::kIdentity);
}

// Every field of every method's message has to be of a type that an option can have.
TEST(MethodCodecTest, EveryFieldOfEveryArmIsAnOption) {
  const google::protobuf::OneofDescriptor& oneof = *v1::MethodConfig::descriptor()->FindOneofByName("method");
  ASSERT_GE(oneof.field_count(), 2);
  for (int i = 0; i < oneof.field_count(); ++i) {
    MethodConfig config;
    config.name = oneof.field(i)->name();
    const google::protobuf::Descriptor& fields = *oneof.field(i)->message_type();
    for (int j = 0; j < fields.field_count(); ++j) {
      using google::protobuf::FieldDescriptor;
      const FieldDescriptor& field = *fields.field(j);
      EXPECT_TRUE(field.has_presence()) << field.full_name() << ": absent and zero must differ";
      switch (field.cpp_type()) {
        case FieldDescriptor::CPPTYPE_STRING:
          config.options[field.name()] = std::string("text");
          break;
        case FieldDescriptor::CPPTYPE_BOOL:
          config.options[field.name()] = true;
          break;
        default:
          config.options[field.name()] = 3.0;
      }
    }
    const absl::StatusOr<v1::MethodConfig> message = EncodeMethodConfig(config);
    ASSERT_TRUE(message.ok()) << message.status();
    const absl::StatusOr<MethodConfig> back = DecodeMethodConfig(*message);
    ASSERT_TRUE(back.ok()) << back.status();
    EXPECT_EQ(*back, config);
  }
}

TEST(MethodCodecTest, EncodingRefusesWhatHasNoField) {
  ExpectMalformed(EncodeMethodConfig({"adam", {}}).status(),
                  "expected one of mkor, identity, eva, kfac, kron, soap, muon, got \"adam\"");
  ExpectMalformed(EncodeMethodConfig({"method", {}}).status(), "got \"method\"");
  ExpectMalformed(EncodeMethodConfig({"mkor", {{"rnk", 3.0}}}).status(),
                  "method.mkor: expected one of clip, damping, gamma, max_factor_dim, norm_threshold, products, "
                  "rank, representation, rule, scaling, scaling_clip, storage, zeta, got \"rnk\"");
  ExpectMalformed(EncodeMethodConfig({"identity", {{"rank", 3.0}}}).status(),
                  "method.identity: expected one of (no options), got \"rank\"");
}

TEST(MethodCodecTest, ANumberIsTheScheduleThatAlwaysHasIt) {
  for (const double value : {0.001, 0.95, 5.0, 1.0 / 3, 1e-12, 1e300}) {
    const auto encoded = EncodeMethodConfig({"kfac", {{"damping", value}}});
    ASSERT_TRUE(encoded.ok()) << encoded.status();
    double read = 0;
    EXPECT_TRUE(absl::SimpleAtod(encoded->kfac().damping(), &read) && read == value) << encoded->kfac().damping();
  }
  EXPECT_EQ(EncodeMethodConfig({"kfac", {{"damping", 0.00003}}})->kfac().damping(), "0.00003");
  EXPECT_EQ(EncodeMethodConfig({"kfac", {{"damping", 1e5}}})->kfac().damping(), "100000");
}

TEST(MethodCodecTest, EncodingRefusesAnotherType) {
  ExpectMalformed(EncodeMethodConfig({"mkor", {{"rank", 3.5}}}).status(),
                  "method.mkor.rank: expected a whole number of 32 bits, got 3.5");
  ExpectMalformed(EncodeMethodConfig({"mkor", {{"rank", 1e300}}}).status(), "method.mkor.rank");
  ExpectMalformed(EncodeMethodConfig({"mkor", {{"rank", true}}}).status(),
                  "method.mkor.rank: expected a whole number of 32 bits, got true");
  ExpectMalformed(EncodeMethodConfig({"kfac", {{"prediv", 1.0}}}).status(),
                  "method.kfac.prediv: expected true or false, got 1");
  ExpectMalformed(EncodeMethodConfig({"mkor", {{"gamma", std::string(".9")}}}).status(),
                  "method.mkor.gamma: expected a number, got \".9\"");
  ExpectMalformed(EncodeMethodConfig({"mkor", {{"rule", true}}}).status(),
                  "method.mkor.rule: expected a string, got true");
  SessionSpec spec = FullSpec();
  spec.method.options["rule"] = false;
  ExpectMalformed(EncodeSessionSpec(spec).status(), "method.mkor.rule");
}

// Otherwise a newer client's method or option would be lost silently, and the arithmetic would be another one.
TEST(MethodCodecTest, DecodingRefusesMethodsAndOptionsOfALaterRelease) {
  v1::MethodConfig arm;
  arm.GetReflection()->MutableUnknownFields(&arm)->AddLengthDelimited(99, "");
  ExpectMalformed(DecodeMethodConfig(arm).status(), "unknown field 99");
  v1::MethodConfig option;
  v1::MkorConfig* mkor = option.mutable_mkor();
  mkor->GetReflection()->MutableUnknownFields(mkor)->AddVarint(55, 1);
  ExpectMalformed(DecodeMethodConfig(option).status(), "method.mkor: expected one of clip, damping, ");
  ExpectMalformed(DecodeMethodConfig(option).status(), "storage, zeta, got unknown field 55");
}

}  // namespace
}  // namespace precondor::wire
