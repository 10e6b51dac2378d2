// SPDX-License-Identifier: Apache-2.0
// NumPy arrays as matrix views, and session descriptions as dictionaries of plain values, of which
// precondor/_session.py makes its classes. All functions need the GIL. Names are those of PRECONDOR_FIELDS in
// kernels/base, enumerations their stable names.
#pragma once

#include <cstdint>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include "absl/status/statusor.h"

#include "kernels/base/matrix_view.h"
#include "kernels/base/session_spec.h"
#include "precondor/client.h"

namespace precondor::python {

// A matrix to read: `array` itself where it is f32 with rows that lie without gaps between elements, else a copy of it
// that is. Raises precondor.InvalidArgumentError, naming `what`, unless it has two dimensions and real numbers.
pybind11::array Readable(const char* what, const pybind11::object& array);
ConstMatrixView ViewOf(const pybind11::array& readable);

// A matrix to write to in place: raises precondor.InvalidArgumentError where Readable would copy, or it is read-only.
MatrixView Writable(const char* what, const pybind11::object& array);

// What `__cuda_array_interface__` tells of a matrix in device memory, to write to in place; its device and stream are
// not in it. Raises precondor.InvalidArgumentError, naming `what`, unless it is a writable f32 matrix with rows that
// lie without gaps between elements.
DeviceTensor OnDevice(const char* what, const pybind11::object& array, int device, uintptr_t stream);

// New, not initialised.
pybind11::array_t<float> NewMatrix(int64_t rows, int64_t cols);
MatrixView ViewOf(pybind11::array_t<float>& matrix);

// A field that is left out has its default. InvalidArgument names the field, what was expected and what came; so for an
// unknown field.
absl::StatusOr<SessionSpec> SpecFromDict(const pybind11::dict& dict);
// Every field.
pybind11::dict SpecToDict(const SessionSpec& spec);

}  // namespace precondor::python
