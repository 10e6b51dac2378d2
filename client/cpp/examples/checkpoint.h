// SPDX-License-Identifier: Apache-2.0
// A worker's own checkpoint: what a process that takes its rank over needs to go on bitwise.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "client/cpp/examples/host_matrix.h"
#include "client/cpp/examples/trainer.h"

namespace precondor::digits {

struct Checkpoint {
  int64_t run = 0;  // of the job
  TrainState state;
};

std::string EncodeCheckpoint(const Checkpoint& checkpoint);
// InvalidArgument for bytes that are damaged or cut short.
absl::StatusOr<Checkpoint> DecodeCheckpoint(absl::string_view bytes);

// Whole or not at all, whenever the process is killed; not proof against the loss of the machine.
absl::Status WriteCheckpoint(const std::string& path, const Checkpoint& checkpoint);
// nullopt: there is none.
absl::StatusOr<std::optional<Checkpoint>> ReadCheckpoint(const std::string& path);

}  // namespace precondor::digits
