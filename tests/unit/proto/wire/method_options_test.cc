// SPDX-License-Identifier: Apache-2.0
// Every option that a method of the registry reads has a field in common.proto, and every such field is an option that
// its method reads. Both lists come from the code that uses them, so that an option that cannot be sent fails here.
#include <google/protobuf/descriptor.h>
#include <gtest/gtest.h>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "kernels/methods/registry.h"
#include "precondor/v1/common.pb.h"
#include "proto/wire/spec_codec.h"

namespace precondor::wire {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::OneofDescriptor;

const OneofDescriptor& MethodOneof() { return *v1::MethodConfig::descriptor()->FindOneofByName("method"); }

std::vector<OptionInfo> OptionsOf(absl::string_view method) {
  absl::StatusOr<std::vector<OptionInfo>> options = MethodOptions(method);
  EXPECT_TRUE(options.ok()) << options.status();
  return options.ok() ? *options : std::vector<OptionInfo>();
}

// Two values of each type that differ, so that one of them is not the option's default.
OptionValue ValueOf(OptionType type, bool second) {
  switch (type) {
    case OptionType::kFlag:
      return second;
    case OptionType::kNumber:
      return second ? -1e300 : 0.1;
    case OptionType::kInteger:
      return second ? 2147483647.0 : -3.0;
    case OptionType::kText:
      return std::string(second ? "" : "piecewise(0, 1: 0.95)");
  }
  return false;
}

FieldDescriptor::CppType WireType(OptionType type) {
  const std::map<OptionType, FieldDescriptor::CppType> types = {{OptionType::kFlag, FieldDescriptor::CPPTYPE_BOOL},
                                                                {OptionType::kNumber, FieldDescriptor::CPPTYPE_DOUBLE},
                                                                {OptionType::kInteger, FieldDescriptor::CPPTYPE_INT32},
                                                                {OptionType::kText, FieldDescriptor::CPPTYPE_STRING}};
  return types.at(type);
}

// Returns what DecodeSessionSpec gives for the bytes that EncodeSessionSpec writes, as a server gets them from a
// client.
SessionSpec Sent(const SessionSpec& spec) {
  const absl::StatusOr<v1::SessionSpec> encoded = EncodeSessionSpec(spec);
  EXPECT_TRUE(encoded.ok()) << encoded.status();
  v1::SessionSpec received;
  if (!encoded.ok() || !received.ParseFromString(encoded->SerializeAsString())) return {};
  absl::StatusOr<SessionSpec> decoded = DecodeSessionSpec(received);
  EXPECT_TRUE(decoded.ok()) << decoded.status();
  return decoded.ok() ? *std::move(decoded) : SessionSpec();
}

SessionSpec SpecOf(const MethodConfig& method) {
  SessionSpec spec;
  spec.name = "options";
  spec.sketches = 16;
  spec.method = method;
  spec.layers = {{"w", 4, 4, false}, {"v", 4, 4, false}};
  spec.layer_methods = {{.method = method, .statistics = StatisticsKind::kMean, .layers = {1}}};
  return spec;
}

void ExpectArrives(const SessionSpec& spec, const std::string& what) {
  const SessionSpec sent = Sent(spec);
  EXPECT_TRUE(sent == spec) << spec.method.name << ", " << what << ": " << DescribeDifference(sent, spec);
}

TEST(MethodOptionsTest, TheRegistryAndTheOneofHaveTheSameMethods) {
  std::set<std::string> registry, wire;
  for (const absl::string_view name : MethodNames()) registry.emplace(name);
  for (int i = 0; i < MethodOneof().field_count(); ++i) wire.insert(MethodOneof().field(i)->name());
  EXPECT_EQ(registry, wire);
}

TEST(MethodOptionsTest, EveryOptionHasAFieldOfItsTypeAndEveryFieldIsAnOption) {
  for (const absl::string_view method : MethodNames()) {
    const FieldDescriptor* arm = v1::MethodConfig::descriptor()->FindFieldByName(std::string(method));
    ASSERT_NE(arm, nullptr) << method;
    const Descriptor& fields = *arm->message_type();
    std::set<std::string> names;
    for (const OptionInfo& option : OptionsOf(method)) {
      EXPECT_TRUE(names.insert(option.name).second) << method << " reads " << option.name << " twice";
      const FieldDescriptor* field = fields.FindFieldByName(option.name);
      if (field == nullptr) {
        ADD_FAILURE() << method << "'s option " << option.name << " has no field in common.proto";
        continue;
      }
      EXPECT_EQ(field->cpp_type(), WireType(option.type)) << field->full_name();
    }
    for (int i = 0; i < fields.field_count(); ++i) {
      EXPECT_TRUE(names.contains(fields.field(i)->name())) << fields.field(i)->full_name() << " is no option";
    }
  }
}

TEST(MethodOptionsTest, EveryOptionArrivesAloneAndWithAllOthers) {
  for (const absl::string_view method : MethodNames()) {
    for (const bool second : {false, true}) {
      MethodConfig all{.name = std::string(method), .options = {}};
      for (const OptionInfo& option : OptionsOf(method)) {
        const OptionValue value = ValueOf(option.type, second);
        const SessionSpec alone = SpecOf({.name = all.name, .options = {{option.name, value}}});
        ExpectArrives(alone, option.name);
        all.options.emplace(option.name, value);
      }
      ExpectArrives(SpecOf(all), "all options");
    }
  }
}

// MethodOptions reads as MakeMethod does: each of its options is one that MakeMethod knows, and MakeMethod's list of
// known options has no other.
TEST(MethodOptionsTest, MakeMethodKnowsTheSameOptions) {
  for (const absl::string_view method : MethodNames()) {
    std::set<std::string> names;
    for (const OptionInfo& option : OptionsOf(method)) names.insert(option.name);
    std::string expected;
    for (const std::string& name : names) expected += (expected.empty() ? "" : ", ") + name;
    if (names.empty()) expected = "(no options)";
    const absl::Status status = MakeMethod({.name = std::string(method), .options = {{"none", true}}}).status();
    EXPECT_EQ(std::string(status.message()),
              "method " + std::string(method) + ": option none: expected one of " + expected);
  }
  EXPECT_EQ(MethodOptions("adam").status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace precondor::wire
