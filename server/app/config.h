// SPDX-License-Identifier: Apache-2.0
// The configuration of a server process. Flags override PRECONDOR_* environment variables, these override a YAML file,
// and that overrides the defaults. The table in config_options.cc describes all options, and --help prints it.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "server/app/config_options.h"

namespace precondor {

// Returns the address that workers connect to, unless the coordinator knows the server by another one: `advertise`, or
// else the first address of `listen`, whose port may still be 0.
std::string DialAddress(const ServerConfig& config);

// Returns the host and port of `trace_endpoint`, or an empty string if it is not an http:// URL of just these two.
std::string TraceCollector(const ServerConfig& config);

// Returns the first address of `listen` that accepts plaintext from other hosts; empty if there is none.
std::string OpenAddress(const ServerConfig& config);

// What the command line asks for.
enum class ConfigAction : uint8_t { kRun, kHelp, kVersion, kCheck, kPrint };

struct ParsedConfig {
  ServerConfig config;
  ConfigAction action = ConfigAction::kRun;
};

// Environment variables by name.
using Environment = std::map<std::string, std::string>;
Environment ProcessEnvironment();  // variables of this process that begin with PRECONDOR_

// Parses `arguments`, which do not include the program's name. If a flag is repeated, the last one counts; a repeated
// key in the file is an error. Returns InvalidArgument with the source, the option, what was expected and what was
// found. An unknown name is an error, which suggests the nearest known name. In the environment it is an error only if
// it is similar to a known name, because other programs set variables too: Kubernetes sets PRECONDOR_PORT for a service
// "precondor". Returns NotFound if the file cannot be read. Relative paths, also those in the file, are relative to the
// working directory.
absl::StatusOr<ParsedConfig> ParseServerConfig(const std::vector<std::string>& arguments,
                                               const Environment& environment);

// Returns the text of --help: every option by topic, with its default and what it does, and examples.
std::string ServerHelp();

// Returns the configuration as YAML that --config can read. Each line has the source of its value.
std::string PrintServerConfig(const ServerConfig& config);

}  // namespace precondor
