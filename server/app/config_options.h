// SPDX-License-Identifier: Apache-2.0
// The table of a server's options, from which flags, environment variables, keys of the file and --help are made.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

#include "server/app/config_values.h"

namespace precondor {

struct Option {
  std::string name;   // as in YAML; flags use '-' for '_', environment variables upper case
  std::string value;  // what --help calls the value; the default of BYTES and MILLISECONDS is shown with a larger unit
  std::string help;   // sentences
  std::function<absl::Status(ServerConfig&, absl::string_view)> set;  // its error says what was expected
  std::function<std::string(const ServerConfig&)> get;
  bool list = false;  // whether the file may contain a list
  std::string topic = {};
};

// Returns all options. Those of one topic follow each other.
const std::vector<Option>& Options();

std::string FlagName(absl::string_view option);

}  // namespace precondor
