// SPDX-License-Identifier: Apache-2.0
#include "client/python/src/conversions.h"

#include <map>
#include <optional>
#include <pybind11/stl.h>
#include <set>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "client/python/src/python_call.h"
#include "kernels/base/status_macros.h"
#include "pybind11/stl.h"

namespace precondor::python {
namespace {

namespace py = pybind11;

constexpr py::ssize_t kElement = sizeof(float);

std::string Describe(const py::object& value) {
  if (!py::isinstance<py::array>(value)) return py::str(py::type::of(value)).cast<std::string>();
  const auto array = py::reinterpret_borrow<py::array>(value);
  return absl::StrCat(py::str(array.dtype()).cast<std::string>(), " of shape ",
                      py::str(array.attr("shape")).cast<std::string>(), ", strides ",
                      py::str(array.attr("strides")).cast<std::string>());
}

[[noreturn]] void Refuse(const char* what, const char* expected, const py::object& value) {
  Raise(absl::InvalidArgumentError(absl::StrCat(what, ": expected ", expected, ", got ", Describe(value))));
}

bool IsFloatMatrix(const py::object& value) { return py::isinstance<py::array_t<float>>(value); }

// Elements of a row side by side, rows in order, not overlapping.
bool HasViewLayout(const py::array& array) {
  if (array.ndim() != 2) return false;
  const bool rows_fit =
      array.shape(0) <= 1 || (array.strides(0) >= array.shape(1) * kElement && array.strides(0) % kElement == 0);
  return rows_fit && (array.shape(1) <= 1 || array.strides(1) == kElement);
}

int64_t StrideOf(const py::array& array) { return array.shape(0) <= 1 ? array.shape(1) : array.strides(0) / kElement; }

namespace py = pybind11;

constexpr int kMostEnumerators = 8;  // of an enumeration of a session; they count from 1

template <typename T>
inline constexpr bool kIsRecordList = false;
template <HasFields T>
inline constexpr bool kIsRecordList<std::vector<T>> = true;

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
  if constexpr (HasFields<T>) {
    if (!py::isinstance<py::dict>(value)) return WrongType(where, "a dict", value);
    const auto dict = py::reinterpret_borrow<py::dict>(value);
    absl::Status status;
    std::set<std::string> known;
    ForEachField(
        [&](absl::string_view name, auto& field) {
          const py::str key(name.data(), name.size());
          known.emplace(name);
          if (dict.contains(key)) status.Update(Read(absl::StrCat(where, ".", name), dict[key], field));
        },
        out);
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
    for (int i = 1; i <= kMostEnumerators; ++i) {
      const absl::string_view name = NameOf(static_cast<T>(i));
      if (name == "UNKNOWN") continue;  // a number that is not used
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
  if constexpr (HasFields<T>) {
    py::dict dict;
    ForEachField(
        [&dict](absl::string_view name, const auto& field) { dict[py::str(name.data(), name.size())] = Write(field); },
        value);
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

py::array Readable(const char* what, const py::object& value) {
  if (!py::isinstance<py::array>(value)) Refuse(what, "a NumPy array [rows, columns]", value);
  auto array = py::reinterpret_borrow<py::array>(value);
  const char kind = array.dtype().kind();
  if (array.ndim() != 2 || (kind != 'f' && kind != 'i' && kind != 'u')) {
    Refuse(what, "an array of real numbers with two dimensions", value);
  }
  if (IsFloatMatrix(value) && HasViewLayout(array)) return array;
  return py::array_t<float, py::array::c_style | py::array::forcecast>(array);
}

ConstMatrixView ViewOf(const py::array& readable) {
  return ConstMatrixView(static_cast<const float*>(readable.data()), readable.shape(0), readable.shape(1),
                         StrideOf(readable));
}

MatrixView Writable(const char* what, const py::object& value) {
  if (!IsFloatMatrix(value)) Refuse(what, "a float32 array [rows, columns]", value);
  auto array = py::reinterpret_borrow<py::array>(value);
  if (!HasViewLayout(array) || !array.writeable()) {
    Refuse(what, "a writable float32 array of two dimensions with rows without gaps", value);
  }
  return MatrixView(static_cast<float*>(array.mutable_data()), array.shape(0), array.shape(1), StrideOf(array));
}

DeviceTensor OnDevice(const char* what, const py::object& array, int device, uintptr_t stream) {
  constexpr char kExpected[] = "a writable float32 matrix with __cuda_array_interface__ and rows without gaps";
  if (!py::hasattr(array, "__cuda_array_interface__")) Refuse(what, kExpected, array);
  const py::dict interface = array.attr("__cuda_array_interface__");
  const auto shape = interface["shape"].cast<std::vector<int64_t>>();
  const auto [address, read_only] = interface["data"].cast<std::pair<uintptr_t, bool>>();
  if (shape.size() != 2 || interface["typestr"].cast<std::string>() != "<f4" || read_only)
    Refuse(what, kExpected, array);
  DeviceTensor tensor{.device = device,
                      .data = reinterpret_cast<float*>(address),
                      .rows = shape[0],
                      .cols = shape[1],
                      .stride = shape[1],
                      .stream = reinterpret_cast<void*>(stream)};
  if (interface.contains("strides") && !interface["strides"].is_none()) {
    const auto strides = interface["strides"].cast<std::vector<int64_t>>();
    const bool rows_fit = shape[0] <= 1 || (strides[0] >= shape[1] * kElement && strides[0] % kElement == 0);
    if (!rows_fit || (shape[1] > 1 && strides[1] != kElement)) Refuse(what, kExpected, array);
    if (shape[0] > 1) tensor.stride = strides[0] / kElement;
  }
  return tensor;
}

py::array_t<float> NewMatrix(int64_t rows, int64_t cols) {
  return py::array_t<float>(py::array::ShapeContainer{rows, cols});
}

MatrixView ViewOf(py::array_t<float>& matrix) {
  return MatrixView(matrix.mutable_data(), matrix.shape(0), matrix.shape(1));
}

absl::StatusOr<SessionSpec> SpecFromDict(const py::dict& dict) {
  SessionSpec spec;
  PRECONDOR_RETURN_IF_ERROR(Read("session", dict, spec));
  return spec;
}

py::dict SpecToDict(const SessionSpec& spec) { return py::reinterpret_steal<py::dict>(Write(spec).release()); }

}  // namespace precondor::python
