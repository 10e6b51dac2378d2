// SPDX-License-Identifier: Apache-2.0
// Session descriptions as Python dictionaries of plain values; precondor/_session.py makes its classes of them.
// Names are those of PRECONDOR_FIELDS in kernels/base, enumerations their stable names.
#pragma once

#include <pybind11/pybind11.h>

#include "absl/status/statusor.h"

#include "kernels/base/session_spec.h"

namespace precondor::python {

// What is left out has its default. InvalidArgument names the field, what was expected and what came; so for an
// unknown field. Needs the GIL.
absl::StatusOr<SessionSpec> SpecFromDict(const pybind11::dict& dict);
// Every field. Needs the GIL.
pybind11::dict SpecToDict(const SessionSpec& spec);

}  // namespace precondor::python
