// SPDX-License-Identifier: Apache-2.0
#include "client/python/src/spec_dict.h"

#include <map>
#include <optional>
#include <set>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "kernels/base/status_macros.h"
#include "pybind11/stl.h"

namespace precondor::python {
namespace {

namespace py = pybind11;

// The stable names of every enumeration of a session; values count from 1.
absl::string_view NameOf(ExchangeMode value) { return ExchangeModeName(value); }
absl::string_view NameOf(StatisticsKind value) { return StatisticsKindName(value); }
absl::string_view NameOf(FallbackPolicy value) { return FallbackPolicyName(value); }
absl::string_view NameOf(DType value) { return DTypeName(value); }
constexpr int CountOf(ExchangeMode) { return 5; }
constexpr int CountOf(StatisticsKind) { return 4; }
constexpr int CountOf(FallbackPolicy) { return 4; }
constexpr int CountOf(DType) { return 3; }

// Calls f(name, field) for every field that the type has; one list for both directions.
template <typename Config, typename F>
void VisitFallback(Config& c, F&& f) {
  f("policy", c.policy);
  f("at_step", c.at_step);
  f("rate_decay", c.rate_decay);
  f("lr_jump", c.lr_jump);
  f("min_steps", c.min_steps);
  f("beta", c.beta);
  f("patience_steps", c.patience_steps);
}

template <typename Layer, typename F>
void VisitLayer(Layer& layer, F&& f) {
  f("name", layer.name);
  f("d_out", layer.d_out);
  f("d_in", layer.d_in);
  f("has_bias", layer.has_bias);
  f("shape", layer.shape);
}

template <typename Config, typename F>
void VisitMethod(Config& method, F&& f) {
  f("name", method.name);
  f("options", method.options);
}

template <typename Exception, typename F>
void VisitLayerMethod(Exception& exception, F&& f) {
  f("method", exception.method);
  f("statistics", exception.statistics);
  f("layers", exception.layers);
}

template <typename Spec, typename F>
void VisitSpec(Spec& spec, F&& f) {
  f("name", spec.name);
  f("seed", spec.seed);
  f("world_size", spec.world_size);
  f("exchange", spec.exchange);
  f("statistics", spec.statistics);
  f("sketches", spec.sketches);
  f("inv_freq", spec.inv_freq);
  f("warmup_steps", spec.warmup_steps);
  f("statistics_dtype", spec.statistics_dtype);
  f("gradient_dtype", spec.gradient_dtype);
  f("method", spec.method);
  f("fallback", spec.fallback);
  f("layers", spec.layers);
  f("layer_methods", spec.layer_methods);
  f("delegates", spec.delegates);
}

template <typename T, typename F>
void Visit(T& value, F&& f) {
  using Plain = std::remove_const_t<T>;
  if constexpr (std::is_same_v<Plain, SessionSpec>) VisitSpec(value, f);
  if constexpr (std::is_same_v<Plain, FallbackConfig>) VisitFallback(value, f);
  if constexpr (std::is_same_v<Plain, MethodConfig>) VisitMethod(value, f);
  if constexpr (std::is_same_v<Plain, LayerSpec>) VisitLayer(value, f);
  if constexpr (std::is_same_v<Plain, LayerMethod>) VisitLayerMethod(value, f);
}

template <typename T>
inline constexpr bool kIsRecord =
    std::is_same_v<T, SessionSpec> || std::is_same_v<T, FallbackConfig> || std::is_same_v<T, MethodConfig> ||
    std::is_same_v<T, LayerSpec> || std::is_same_v<T, LayerMethod>;
template <typename T>
inline constexpr bool kIsRecordList =
    std::is_same_v<T, std::vector<LayerSpec>> || std::is_same_v<T, std::vector<LayerMethod>>;

std::string Repr(py::handle value) { return py::repr(value).cast<std::string>(); }

absl::Status WrongType(const std::string& where, absl::string_view expected, py::handle value) {
  return absl::InvalidArgumentError(absl::StrCat(where, ": expected ", expected, ", got ", Repr(value)));
}

using Options = std::map<std::string, OptionValue>;

// One option of a method: a bool, a str, or any other number as a double. pybind11's caster of a variant would
// turn other objects, such as an int or a list, into a bool.
absl::Status ReadOption(const std::string& where, py::handle value, OptionValue& out) {
  py::detail::make_caster<bool> flag;
  if (flag.load(value, /*convert=*/false)) {
    out = py::detail::cast_op<bool>(flag);
  } else if (py::isinstance<py::str>(value)) {
    out = value.cast<std::string>();
  } else {
    const double number = PyFloat_AsDouble(value.ptr());
    if (PyErr_Occurred() != nullptr) {
      PyErr_Clear();
      return WrongType(where, "a bool, a number or a str", value);
    }
    out = number;
  }
  return absl::OkStatus();
}

absl::Status ReadOptions(const std::string& where, py::handle value, Options& out) {
  if (!py::isinstance<py::dict>(value)) return WrongType(where, "a dict", value);
  for (const std::pair<py::handle, py::handle> item : py::reinterpret_borrow<py::dict>(value)) {
    if (!py::isinstance<py::str>(item.first)) return WrongType(where, "names of type str", item.first);
    const auto name = item.first.cast<std::string>();
    PRECONDOR_RETURN_IF_ERROR(ReadOption(absl::StrCat(where, ".", name), item.second, out[name]));
  }
  return absl::OkStatus();
}

// What a user would write for a field of this type.
template <typename T>
absl::string_view Expected() {
  if constexpr (std::is_same_v<T, bool>) return "a bool";
  if constexpr (std::is_same_v<T, std::string>) return "a str";
  if constexpr (std::is_integral_v<T> || std::is_same_v<T, std::optional<uint64_t>>)
    return "an int that fits its field";
  if constexpr (std::is_floating_point_v<T>) return "a float";
  return "a sequence of int";
}

template <typename T>
absl::Status Read(const std::string& where, py::handle value, T& out) {
  if constexpr (kIsRecord<T>) {
    if (!py::isinstance<py::dict>(value)) return WrongType(where, "a dict", value);
    const auto dict = py::reinterpret_borrow<py::dict>(value);
    absl::Status status;
    std::set<std::string> known;
    Visit(out, [&](const char* name, auto& field) {
      known.insert(name);
      if (dict.contains(name)) status.Update(Read(absl::StrCat(where, ".", name), dict[name], field));
    });
    for (const std::pair<py::handle, py::handle> item : dict) {
      const py::handle key = item.first;
      if (!py::isinstance<py::str>(key) || !known.contains(key.cast<std::string>())) {
        status.Update(WrongType(where, absl::StrCat("one of ", absl::StrJoin(known, ", ")), key));
      }
    }
    return status;
  } else if constexpr (kIsRecordList<T>) {
    if (!py::isinstance<py::sequence>(value)) return WrongType(where, "a sequence of dict", value);
    for (const py::handle item : py::reinterpret_borrow<py::sequence>(value)) {
      out.emplace_back();
      PRECONDOR_RETURN_IF_ERROR(Read(absl::StrCat(where, "[", out.size() - 1, "]"), item, out.back()));
    }
    return absl::OkStatus();
  } else if constexpr (std::is_enum_v<T>) {
    std::vector<absl::string_view> names;
    for (int i = 1; i <= CountOf(T()); ++i) {
      const absl::string_view name = NameOf(static_cast<T>(i));
      if (name == "UNKNOWN") continue;  // a number that is no longer used
      names.push_back(name);
      if (py::isinstance<py::str>(value) && value.cast<std::string>() == std::string(names.back())) {
        out = static_cast<T>(i);
        return absl::OkStatus();
      }
    }
    return WrongType(where, absl::StrCat("one of ", absl::StrJoin(names, ", ")), value);
  } else if constexpr (std::is_same_v<T, Options>) {
    return ReadOptions(where, value, out);
  } else {
    try {
      out = value.cast<T>();
    } catch (const py::cast_error&) {
      return WrongType(where, Expected<T>(), value);
    }
    return absl::OkStatus();
  }
}

template <typename T>
py::object Write(const T& value) {
  if constexpr (kIsRecord<T>) {
    py::dict dict;
    Visit(value, [&dict](const char* name, const auto& field) { dict[name] = Write(field); });
    return dict;
  } else if constexpr (kIsRecordList<T>) {
    py::list list;
    for (const auto& item : value) list.append(Write(item));
    return list;
  } else if constexpr (std::is_enum_v<T>) {
    const absl::string_view name = NameOf(value);
    return py::str(name.data(), name.size());
  } else {
    return py::cast(value);
  }
}

}  // namespace

absl::StatusOr<SessionSpec> SpecFromDict(const py::dict& dict) {
  SessionSpec spec;
  PRECONDOR_RETURN_IF_ERROR(Read("session", dict, spec));
  return spec;
}

py::dict SpecToDict(const SessionSpec& spec) { return py::reinterpret_steal<py::dict>(Write(spec).release()); }

}  // namespace precondor::python
