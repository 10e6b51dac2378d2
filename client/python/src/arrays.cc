// SPDX-License-Identifier: Apache-2.0
#include "client/python/src/arrays.h"

#include <pybind11/stl.h>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

#include "client/python/src/python_call.h"

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

}  // namespace precondor::python
