// SPDX-License-Identifier: Apache-2.0
#include "proto/wire/spec_codec.h"

#include <algorithm>
#include <cmath>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>
#include <google/protobuf/reflection.h>
#include <google/protobuf/unknown_field_set.h>
#include <limits>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "kernels/base/check.h"
#include "kernels/base/error_reason.h"
#include "kernels/base/schedule.h"
#include "kernels/base/status_macros.h"

namespace precondor::wire {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::EnumDescriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::OneofDescriptor;
using google::protobuf::Reflection;

// The enumerations here and in kernels/base have equal numbers and names (spec_codec_test). 0 is "not set".
template <typename Ours>
absl::StatusOr<Ours> DecodeEnum(int number, const EnumDescriptor& type, absl::string_view field) {
  if (number != 0 && type.FindValueByNumber(number) != nullptr) return static_cast<Ours>(number);
  const int last = type.value(type.value_count() - 1)->number();
  return MalformedError(absl::StrCat(field, ": expected a ", type.name(), " of 1 ... ", last, ", got ", number,
                                     number == 0 ? " (not set)" : ""));
}

template <typename Ours, typename Wire>
absl::StatusOr<Ours> DecodeEnum(Wire value, absl::string_view field) {
  return DecodeEnum<Ours>(static_cast<int>(value), *google::protobuf::GetEnumDescriptor<Wire>(), field);
}

const OneofDescriptor& MethodOneof() { return *v1::MethodConfig::descriptor()->FindOneofByName("method"); }

std::string MethodNames() {
  std::string names;
  for (int i = 0; i < MethodOneof().field_count(); ++i) {
    absl::StrAppend(&names, i == 0 ? "" : ", ", MethodOneof().field(i)->name());
  }
  return names;
}

std::string OptionNames(const Descriptor& options) {
  if (options.field_count() == 0) return "(no options)";
  std::vector<std::string> names;
  names.reserve(options.field_count());
  for (int i = 0; i < options.field_count(); ++i) names.push_back(options.field(i)->name());
  std::sort(names.begin(), names.end());
  return absl::StrJoin(names, ", ");
}

std::string Text(const OptionValue& value) {
  if (const auto* text = std::get_if<std::string>(&value)) return absl::StrCat("\"", text->substr(0, 64), "\"");
  if (const auto* flag = std::get_if<bool>(&value)) return *flag ? "true" : "false";
  return absl::StrCat(std::get<double>(value));
}

absl::Status WrongType(absl::string_view method, absl::string_view option, absl::string_view expected,
                       const OptionValue& got) {
  return MalformedError(absl::StrCat("method.", method, ".", option, ": expected ", expected, ", got ", Text(got)));
}

// Sets one option of a method's message.
absl::Status SetOption(const std::string& method, const std::string& name, const OptionValue& value, Message& message) {
  const FieldDescriptor* field = message.GetDescriptor()->FindFieldByName(name);
  if (field == nullptr) {
    return MalformedError(absl::StrCat("method.", method, ": expected one of ", OptionNames(*message.GetDescriptor()),
                                       ", got \"", name.substr(0, 64), "\""));
  }
  const Reflection& reflection = *message.GetReflection();
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_STRING: {
      if (std::holds_alternative<bool>(value)) return WrongType(method, name, "a string", value);
      const auto* number = std::get_if<double>(&value);
      reflection.SetString(&message, field, number != nullptr ? Schedule::Text(*number) : std::get<std::string>(value));
      return absl::OkStatus();
    }
    case FieldDescriptor::CPPTYPE_DOUBLE: {
      const auto* number = std::get_if<double>(&value);
      if (number == nullptr) return WrongType(method, name, "a number", value);
      reflection.SetDouble(&message, field, *number);
      return absl::OkStatus();
    }
    case FieldDescriptor::CPPTYPE_INT32: {
      const auto* number = std::get_if<double>(&value);
      const bool fits = number != nullptr && *number == std::floor(*number) &&
                        std::abs(*number) <= std::numeric_limits<int32_t>::max();
      if (!fits) return WrongType(method, name, "a whole number of 32 bits", value);
      reflection.SetInt32(&message, field, static_cast<int32_t>(*number));
      return absl::OkStatus();
    }
    case FieldDescriptor::CPPTYPE_BOOL: {
      const auto* flag = std::get_if<bool>(&value);
      if (flag == nullptr) return WrongType(method, name, "true or false", value);
      reflection.SetBool(&message, field, *flag);
      return absl::OkStatus();
    }
    default:
      return absl::InternalError(absl::StrCat(field->full_name(), ": options are string, double, int32 or bool"));
  }
}

absl::StatusOr<OptionValue> GetOption(const Message& message, const FieldDescriptor& field) {
  const Reflection& reflection = *message.GetReflection();
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_STRING:
      return OptionValue(reflection.GetString(message, &field));
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return OptionValue(reflection.GetDouble(message, &field));
    case FieldDescriptor::CPPTYPE_INT32:
      return OptionValue(static_cast<double>(reflection.GetInt32(message, &field)));
    case FieldDescriptor::CPPTYPE_BOOL:
      return OptionValue(reflection.GetBool(message, &field));
    default:
      return absl::InternalError(absl::StrCat(field.full_name(), ": options are string, double, int32 or bool"));
  }
}

// Returns 0 if there is none.
int FirstUnknownField(const Message& message) {
  const google::protobuf::UnknownFieldSet& unknown = message.GetReflection()->GetUnknownFields(message);
  return unknown.empty() ? 0 : unknown.field(0).number();
}

// Returns the message's fields in the order of the struct's, which have their names.
template <HasFields T>
std::vector<const FieldDescriptor*> FieldsLike(const Message& message) {
  std::vector<const FieldDescriptor*> fields;
  for (const absl::string_view name : NamesOfFields<T>()) {
    fields.push_back(message.GetDescriptor()->FindFieldByName(std::string(name)));
    PRECONDOR_CHECK(fields.back() != nullptr);
  }
  return fields;
}

// Place of a field in a session, for errors.
struct FieldPath {
  std::string Text() const {
    return absl::StrCat(parent == nullptr ? "" : absl::StrCat(parent->Text(), "."), name,
                        index < 0 ? "" : absl::StrCat("[", index, "]"));
  }
  const FieldPath* parent;
  absl::string_view name;
  int index = -1;  // in a repeated field
};

#define PRECONDOR_SCALAR(Type, Name)                                                                         \
  void Set(const Reflection& reflection, Message* out, const FieldDescriptor* field, Is<Type> auto& value) { \
    reflection.Set##Name(out, field, value);                                                                 \
  }                                                                                                          \
  void Get(const Reflection& reflection, const Message& in, const FieldDescriptor* field, Type& value) {     \
    value = reflection.Get##Name(in, field);                                                                 \
  }
PRECONDOR_SCALAR(bool, Bool)
PRECONDOR_SCALAR(int32_t, Int32)
PRECONDOR_SCALAR(int64_t, Int64)
PRECONDOR_SCALAR(uint64_t, UInt64)
PRECONDOR_SCALAR(double, Double)
PRECONDOR_SCALAR(std::string, String)
#undef PRECONDOR_SCALAR

template <typename T>
constexpr bool kIsVector = false;
template <typename T>
constexpr bool kIsVector<std::vector<T>> = true;
template <typename T>
constexpr bool kIsOptional = false;
template <typename T>
constexpr bool kIsOptional<std::optional<T>> = true;

// Copies the fields of a struct to the fields of a message with the same names.
template <HasFields T>
absl::Status Encode(const T& value, Message& out);
absl::Status Encode(const MethodConfig& value, Message& out) {
  PRECONDOR_ASSIGN_OR_RETURN(static_cast<v1::MethodConfig&>(out), EncodeMethodConfig(value));
  return absl::OkStatus();
}

template <typename T>
absl::Status EncodeField(const T& value, const FieldDescriptor* field, Message* out) {
  const Reflection& reflection = *out->GetReflection();
  if constexpr (std::is_enum_v<T>) {
    reflection.SetEnumValue(out, field, static_cast<int>(value));
  } else if constexpr (requires { Set(reflection, out, field, value); }) {
    Set(reflection, out, field, value);
  } else if constexpr (kIsOptional<T>) {
    if (value.has_value()) return EncodeField(*value, field, out);
  } else if constexpr (!kIsVector<T>) {
    if (std::is_same_v<T, MethodConfig> || value != T()) return Encode(value, *reflection.MutableMessage(out, field));
  } else if constexpr (HasFields<typename T::value_type>) {
    for (const auto& element : value) PRECONDOR_RETURN_IF_ERROR(Encode(element, *reflection.AddMessage(out, field)));
  } else if (!value.empty()) {
    const auto elements = reflection.GetMutableRepeatedFieldRef<typename T::value_type>(out, field);
    for (const auto element : value) elements.Add(element);
  }
  return absl::OkStatus();
}

template <HasFields T>
absl::Status Encode(const T& value, Message& out) {
  static const std::vector<const FieldDescriptor*> kFields = FieldsLike<T>(out);
  auto to = kFields.begin();
  absl::Status status;
  ForEachField([&](absl::string_view, const auto& field) { status.Update(EncodeField(field, *to++, &out)); }, value);
  return status;
}

// Copies the fields of a message to a struct. A field that the message lacks keeps its value, which is the default.
template <HasFields T>
absl::Status Decode(const Message& in, const FieldPath* path, T& out);
absl::Status Decode(const Message& in, const FieldPath*, MethodConfig& out) {
  PRECONDOR_ASSIGN_OR_RETURN(out, DecodeMethodConfig(static_cast<const v1::MethodConfig&>(in)));
  return absl::OkStatus();
}

template <typename T>
absl::Status DecodeField(const Message& in, const FieldDescriptor* field, FieldPath path, T& out) {
  const Reflection& reflection = *in.GetReflection();
  const bool absent =
      kIsVector<T> ? reflection.FieldSize(in, field) == 0 : field->has_presence() && !reflection.HasField(in, field);
  if (absent) return absl::OkStatus();
  if constexpr (std::is_enum_v<T>) {
    const int number = reflection.GetEnumValue(in, field);
    if (number == 0) return absl::OkStatus();
    PRECONDOR_ASSIGN_OR_RETURN(out, DecodeEnum<T>(number, *field->enum_type(), path.Text()));
  } else if constexpr (requires { Get(reflection, in, field, out); }) {
    Get(reflection, in, field, out);
  } else if constexpr (kIsOptional<T>) {
    return DecodeField(in, field, path, out.emplace());
  } else if constexpr (!kIsVector<T>) {
    return Decode(reflection.GetMessage(in, field), &path, out);
  } else if constexpr (HasFields<typename T::value_type>) {
    out.resize(static_cast<size_t>(reflection.FieldSize(in, field)));
    for (size_t i = 0; i < out.size(); ++i) {
      path.index = static_cast<int>(i);
      PRECONDOR_RETURN_IF_ERROR(Decode(reflection.GetRepeatedMessage(in, field, path.index), &path, out[i]));
    }
  } else {
    const auto elements = reflection.GetRepeatedFieldRef<typename T::value_type>(in, field);
    out.assign(elements.begin(), elements.end());
  }
  return absl::OkStatus();
}

template <HasFields T>
absl::Status Decode(const Message& in, const FieldPath* path, T& out) {
  if constexpr (std::is_same_v<T, FallbackConfig>) {
    const int number = FirstUnknownField(in);
    if (number != 0) return MalformedError(absl::StrCat("fallback: unknown option, field ", number));
  }
  static const std::vector<const FieldDescriptor*> kFields = FieldsLike<T>(in);
  auto from = kFields.begin();
  absl::Status status;
  ForEachField(
      [&](absl::string_view name, auto& field) {
        status.Update(DecodeField(in, *from++, FieldPath{.parent = path, .name = name}, field));
      },
      out);
  return status;
}

}  // namespace

v1::DataType EncodeDType(DType dtype) { return static_cast<v1::DataType>(dtype); }
v1::Mode EncodeMode(Mode mode) { return static_cast<v1::Mode>(mode); }
v1::Decision EncodeDecision(Decision decision) { return static_cast<v1::Decision>(decision); }

absl::StatusOr<DType> DecodeDType(v1::DataType value, absl::string_view field) {
  return DecodeEnum<DType>(value, field);
}
absl::StatusOr<Mode> DecodeMode(v1::Mode value, absl::string_view field) { return DecodeEnum<Mode>(value, field); }
absl::StatusOr<Decision> DecodeDecision(v1::Decision value, absl::string_view field) {
  return DecodeEnum<Decision>(value, field);
}

absl::StatusOr<v1::MethodConfig> EncodeMethodConfig(const MethodConfig& config) {
  const FieldDescriptor* arm = v1::MethodConfig::descriptor()->FindFieldByName(config.name);
  if (arm == nullptr || arm->containing_oneof() != &MethodOneof()) {
    return MalformedError(absl::StrCat("method: expected one of ", MethodNames(), ", got \"", config.name, "\""));
  }
  v1::MethodConfig out;
  Message& message = *out.GetReflection()->MutableMessage(&out, arm);
  for (const auto& [name, value] : config.options) {
    PRECONDOR_RETURN_IF_ERROR(SetOption(config.name, name, value, message));
  }
  return out;
}

absl::StatusOr<MethodConfig> DecodeMethodConfig(const v1::MethodConfig& config) {
  MethodConfig out;
  const FieldDescriptor* arm = config.GetReflection()->GetOneofFieldDescriptor(config, &MethodOneof());
  // An unknown field of a newer peer would change the arithmetic if it were ignored.
  if (const int number = FirstUnknownField(config); number != 0) {
    return MalformedError(absl::StrCat("method: expected one of ", MethodNames(), ", got unknown field ", number));
  }
  if (arm == nullptr) return out;  // mkor with defaults
  out.name = arm->name();
  const Message& message = config.GetReflection()->GetMessage(config, arm);
  if (const int number = FirstUnknownField(message); number != 0) {
    return MalformedError(absl::StrCat("method.", out.name, ": expected one of ", OptionNames(*message.GetDescriptor()),
                                       ", got unknown field ", number));
  }
  const Descriptor& options = *message.GetDescriptor();
  for (int i = 0; i < options.field_count(); ++i) {
    const FieldDescriptor& field = *options.field(i);
    if (!message.GetReflection()->HasField(message, &field)) continue;
    PRECONDOR_ASSIGN_OR_RETURN(OptionValue value, GetOption(message, field));
    out.options.emplace(field.name(), std::move(value));
  }
  return out;
}

absl::StatusOr<v1::SessionSpec> EncodeSessionSpec(const SessionSpec& spec) {
  v1::SessionSpec out;
  PRECONDOR_RETURN_IF_ERROR(Encode(spec, out));
  return out;
}

absl::StatusOr<SessionSpec> DecodeSessionSpec(const v1::SessionSpec& spec) {
  SessionSpec out;  // its initializers are the defaults of common.proto; spec_codec_test compares them
  PRECONDOR_RETURN_IF_ERROR(Decode(spec, nullptr, out));
  if (out.sketches == 0 && UsesSketches(out) && out.world_size > 0) out.sketches = SketchesPerWorker(out);
  return out;
}

}  // namespace precondor::wire
