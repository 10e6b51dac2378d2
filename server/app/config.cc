// SPDX-License-Identifier: Apache-2.0
#include "server/app/config.h"

#include <algorithm>
#include <arpa/inet.h>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <optional>
#include <set>
#include <unistd.h>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "yaml-cpp/yaml.h"

#include "kernels/base/status_macros.h"
#include "kernels/base/unix_address.h"
#include "server/app/config_options.h"

namespace precondor {
namespace {

constexpr absl::string_view kVariablePrefix = "PRECONDOR_";
constexpr size_t kSlip = 2;  // an unknown variable within this edit distance of an option's is reported

std::string VariableName(absl::string_view name) { return absl::StrCat(kVariablePrefix, absl::AsciiStrToUpper(name)); }

size_t EditDistance(absl::string_view a, absl::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t substituted = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substituted});
    }
  }
  return row[b.size()];
}

const Option* FindOption(absl::string_view name) {
  for (const Option& option : Options()) {
    if (option.name == name) return &option;
  }
  return nullptr;
}

const Option& NearestOption(absl::string_view name) {
  name = name.substr(0, 64);
  const auto& options = Options();
  return *std::min_element(options.begin(), options.end(), [name](const Option& a, const Option& b) {
    return EditDistance(a.name, name) < EditDistance(b.name, name);
  });
}

absl::Status UnknownOption(absl::string_view source, absl::string_view name) {
  return absl::InvalidArgumentError(absl::StrCat(source, ": unknown option \"", name.substr(0, 64),
                                                 "\"; the nearest is \"", NearestOption(name).name, "\""));
}

absl::Status SetOption(ServerConfig& config, const Option& option, absl::string_view text, std::string origin) {
  const absl::Status status = option.set(config, text);
  if (!status.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat(origin, ": expected ", status.message(), ", got \"", text.substr(0, 128), "\""));
  }
  config.origins[option.name] = std::move(origin);
  return absl::OkStatus();
}

// Returns whether the text has more than comments, directives and document marks. Returns InvalidArgument if it has two
// documents. YAML::LoadAll cannot be used: it does not end if the text begins with a comma.
absl::StatusOr<bool> CheckOneDocument(const std::string& path, absl::string_view text) {
  bool content = false, ended = false;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    const bool mark = absl::ConsumePrefix(&line, "---") || absl::ConsumePrefix(&line, "...");
    ended = ended || (mark && content);
    line = absl::StripAsciiWhitespace(line);
    if (line.empty() || line.front() == '#' || (!content && line.front() == '%')) continue;
    if (ended) return absl::InvalidArgumentError(absl::StrCat("file ", path, ": expected one YAML document, got more"));
    content = true;
  }
  return content;
}

absl::StatusOr<YAML::Node> ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text;
  for (char part[4096]; file.is_open() && !file.eof() && !file.bad();) {
    file.read(part, sizeof(part));
    text.append(part, static_cast<size_t>(file.gcount()));
  }
  // Opening a directory succeeds; reading it fails.
  if (!file.is_open() || file.bad())
    return absl::NotFoundError(absl::StrCat("--config: cannot read ", path, ": ", std::strerror(errno)));
  PRECONDOR_ASSIGN_OR_RETURN(const bool has_content, CheckOneDocument(path, text));
  try {
    YAML::Node root = YAML::Load(text);
    if (!root.IsNull() || !has_content) return root;
    return absl::InvalidArgumentError(absl::StrCat("file ", path, ": expected a map of options"));
  } catch (const YAML::Exception& error) {
    return absl::InvalidArgumentError(absl::StrCat("file ", path, ": ", error.what()));
  }
}

// Returns a key's value in the form of a flag's text: a list's items are separated by commas, no value is an empty
// text.
absl::StatusOr<std::string> FileValue(const YAML::Node& value, const Option& option, absl::string_view origin) {
  const bool list = value.IsSequence() && option.list;
  if (value.IsNull()) return "";
  if (value.IsScalar()) return value.Scalar();
  std::vector<std::string> items;
  for (const auto& item : value) {
    if (!list || !item.IsScalar()) break;
    items.push_back(item.Scalar());
  }
  if (list && items.size() == value.size()) return absl::StrJoin(items, ",");
  return absl::InvalidArgumentError(
      absl::StrCat(origin, ": expected one value", option.list ? " or a list of them" : "", ", got a ",
                   value.IsSequence() ? "list" : "map", list ? " with a list or a map in it" : ""));
}

absl::Status ApplyFile(ServerConfig& config, const std::string& path) {
  PRECONDOR_ASSIGN_OR_RETURN(const YAML::Node root, ReadFile(path));
  const std::string source = absl::StrCat("file ", path);
  if (root.IsNull()) return absl::OkStatus();
  if (!root.IsMap()) return absl::InvalidArgumentError(absl::StrCat(source, ": expected a map of options"));
  std::set<std::string> seen;
  for (const auto& entry : root) {
    const std::string name = entry.first.IsScalar() ? entry.first.Scalar() : "";
    const Option* option = FindOption(name);
    if (option == nullptr) return UnknownOption(source, name);
    std::string origin = absl::StrCat(source, ": ", name);
    if (!seen.insert(name).second)
      return absl::InvalidArgumentError(absl::StrCat(origin, ": expected once, got twice"));
    PRECONDOR_ASSIGN_OR_RETURN(const std::string text, FileValue(entry.second, *option, origin));
    PRECONDOR_RETURN_IF_ERROR(SetOption(config, *option, text, std::move(origin)));
  }
  return absl::OkStatus();
}

absl::Status ApplyEnvironment(ServerConfig& config, const Environment& environment) {
  for (const Option& option : Options()) {
    const std::string variable = VariableName(option.name);
    if (const auto found = environment.find(variable); found != environment.end()) {
      PRECONDOR_RETURN_IF_ERROR(SetOption(config, option, found->second, absl::StrCat("environment ", variable)));
    }
  }
  for (const auto& [variable, value] : environment) {
    absl::string_view rest = variable;
    if (!absl::ConsumePrefix(&rest, kVariablePrefix) || rest == "CONFIG") continue;
    const std::string name = absl::AsciiStrToLower(rest);
    const size_t distance = EditDistance(NearestOption(name).name, name);
    if (distance > 0 && distance <= kSlip) return UnknownOption(absl::StrCat("environment ", variable), name);
  }
  return absl::OkStatus();
}

struct CommandLine {
  ConfigAction action = ConfigAction::kRun;
  std::optional<std::string> file;
  std::vector<std::pair<const Option*, std::string>> values;
};

absl::StatusOr<CommandLine> ReadCommandLine(const std::vector<std::string>& arguments) {
  const std::map<std::string, ConfigAction> actions = {{"--help", ConfigAction::kHelp},
                                                       {"--version", ConfigAction::kVersion},
                                                       {"--check-config", ConfigAction::kCheck},
                                                       {"--print-config", ConfigAction::kPrint}};
  CommandLine line;
  for (const std::string& argument : arguments) {
    if (const auto action = actions.find(argument); action != actions.end()) {
      line.action = action->second;
      continue;
    }
    const size_t equals = argument.find('=');
    if (!absl::StartsWith(argument, "--") || equals == std::string::npos) {
      return absl::InvalidArgumentError(
          absl::StrCat("command line: expected --name=value, got \"", argument.substr(0, 128), "\"; see --help"));
    }
    const std::string name = absl::StrReplaceAll(argument.substr(2, equals - 2), {{"-", "_"}});
    const std::string value = argument.substr(equals + 1);
    if (value.empty() && name == "data_dir") {  // as from a variable that is not set
      return absl::InvalidArgumentError(absl::StrCat("command line: ", argument, ": expected a path, got none"));
    }
    if (name == "config") {
      line.file = value;
      continue;
    }
    const Option* option = FindOption(name);
    if (option == nullptr) return UnknownOption("command line", name);
    line.values.emplace_back(option, value);
  }
  return line;
}

// Returns the option's name with the source of its value.
std::string OriginOf(const ServerConfig& config, const std::string& name) {
  const auto origin = config.origins.find(name);
  return origin == config.origins.end() || origin->second == "default" ? name : origin->second;
}

absl::Status AddressError(const ServerConfig& config, const std::string& name, absl::string_view expected,
                          absl::string_view address) {
  return absl::InvalidArgumentError(
      absl::StrCat(OriginOf(config, name), ": expected ", expected, ", got \"", address.substr(0, 128), "\""));
}

std::string HostAndPort(int low) { return absl::StrCat("host:port with a port in ", low, " ... 65535"); }

bool IsHostAndPort(absl::string_view address, int low) {
  const size_t colon = address.rfind(':');
  int port = -1;
  return colon != absl::string_view::npos && colon > 0 && absl::SimpleAtoi(address.substr(colon + 1), &port) &&
         port >= low && port <= 65535 && !absl::StrContains(address, ',');
}

absl::Status CheckHostAndPort(const ServerConfig& config, const std::string& name, absl::string_view address, int low) {
  if (!UnixPath(address).has_value() && IsHostAndPort(address, low)) return absl::OkStatus();
  return AddressError(config, name, HostAndPort(low), address);
}

// Checks an address of gRPC. One that other processes connect to (`dialled`) needs a port other than 0, or a path that
// does not depend on the working directory.
absl::Status CheckAddress(const ServerConfig& config, const std::string& name, absl::string_view address,
                          bool dialled) {
  const int low = dialled ? 1 : 0;
  const std::optional<std::string> path = UnixPath(address);
  if (path.has_value() ? !path->empty() && (!dialled || path->front() == '/') : IsHostAndPort(address, low)) {
    const absl::Status status = CheckUnixAddress(dialled ? std::string(address) : AbsoluteUnixAddress(address));
    if (status.ok()) return status;
    return absl::InvalidArgumentError(absl::StrCat(OriginOf(config, name), ": ", status.message()));
  }
  return AddressError(config, name, absl::StrCat(HostAndPort(low), " or unix:/path/to/socket"), address);
}

absl::Status CheckAddresses(const ServerConfig& config, const std::string& name,
                            const std::vector<std::string>& addresses, bool dialled) {
  std::set<std::string> seen;
  for (const std::string& address : addresses) {
    PRECONDOR_RETURN_IF_ERROR(CheckAddress(config, name, address, dialled));
    if (!seen.insert(address).second) {
      return absl::InvalidArgumentError(
          absl::StrCat(OriginOf(config, name), ": expected each address once, got \"", address, "\" twice"));
    }
  }
  return absl::OkStatus();
}

bool IsLoopback(absl::string_view address) {
  const absl::string_view host = address.substr(0, address.rfind(':'));
  in_addr ip = {};  // a host name can begin with 127. too
  const bool is_ip = inet_pton(AF_INET, std::string(host).c_str(), &ip) == 1;
  return host == "localhost" || host == "[::1]" || (is_ip && absl::StartsWith(host, "127."));
}

// Checks that `needed` is set if `user` is, because `user` has no effect without it.
absl::Status CheckNeeds(const ServerConfig& config, std::string ServerConfig::*needed, const std::string& needed_name,
                        std::string ServerConfig::*user, const std::string& user_name) {
  if ((config.*user).empty() || !(config.*needed).empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(OriginOf(config, user_name), ": expected ", needed_name, " beside it, got none"));
}

absl::Status CheckSecurity(const ServerConfig& config) {
  using C = ServerConfig;
  PRECONDOR_RETURN_IF_ERROR(CheckNeeds(config, &C::tls_key, "tls_key", &C::tls_cert, "tls_cert"));
  PRECONDOR_RETURN_IF_ERROR(CheckNeeds(config, &C::tls_cert, "tls_cert", &C::tls_key, "tls_key"));
  PRECONDOR_RETURN_IF_ERROR(CheckNeeds(config, &C::tls_cert, "tls_cert", &C::tls_client_ca, "tls_client_ca"));
  PRECONDOR_RETURN_IF_ERROR(CheckNeeds(config, &C::tls_cert, "tls_cert", &C::access_file, "access_file"));
  if (config.tenant_max_calls > 0 && config.access_file.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        OriginOf(config, "tenant_max_calls"), ": expected access_file, which has the tenants, beside it, got none"));
  }
  PRECONDOR_RETURN_IF_ERROR(CheckNeeds(config, &C::tls_ca, "tls_ca", &C::token_file, "token_file"));
  if (config.role != ServerRole::kCoordinator && !config.tls_ca.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(OriginOf(config, "tls_ca"), ": expected none with role ", ServerRoleName(config.role)));
  }
  const std::string open = config.plaintext == "any" ? "" : OpenAddress(config);
  if (open.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      OriginOf(config, "listen"), ": expected tls_cert and tls_key, or plaintext=any to let all who reach ", open,
      " read and change everything"));
}

absl::Status CheckWhole(const ServerConfig& config) {
  if (config.listen.empty()) return AddressError(config, "listen", absl::StrCat("at least one ", HostAndPort(0)), "");
  PRECONDOR_RETURN_IF_ERROR(CheckAddresses(config, "listen", config.listen, false));
  if (!config.metrics_listen.empty()) {
    PRECONDOR_RETURN_IF_ERROR(CheckHostAndPort(config, "metrics_listen", config.metrics_listen, 0));
  }
  if (!config.trace_endpoint.empty() && !IsHostAndPort(TraceCollector(config), 1)) {
    return AddressError(config, "trace_endpoint", absl::StrCat("http:// and ", HostAndPort(1)), config.trace_endpoint);
  }
  if (!config.advertise.empty()) PRECONDOR_RETURN_IF_ERROR(CheckAddress(config, "advertise", config.advertise, true));
  PRECONDOR_RETURN_IF_ERROR(CheckAddresses(config, "shards", config.shards, true));
  PRECONDOR_RETURN_IF_ERROR(CheckSecurity(config));
  for (const std::string& endpoint : config.etcd_endpoints) {
    PRECONDOR_RETURN_IF_ERROR(CheckHostAndPort(config, "etcd_endpoints", endpoint, 1));
  }
  if (!config.etcd_endpoints.empty() && config.role != ServerRole::kCoordinator) {
    return absl::InvalidArgumentError(absl::StrCat(OriginOf(config, "etcd_endpoints"), ": expected none with role ",
                                                   ServerRoleName(config.role), ", got ",
                                                   config.etcd_endpoints.size()));
  }
  if (config.transport_memory < config.max_message_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(OriginOf(config, "transport_memory"),
                                                   ": expected at least max_message_bytes, ", config.max_message_bytes,
                                                   ", got ", config.transport_memory));
  }
  if (!config.etcd_endpoints.empty() && !config.data_dir.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(OriginOf(config, "etcd_endpoints"), ": expected either etcd_endpoints or data_dir, got both"));
  }
  if (!config.etcd_endpoints.empty() && config.etcd_lease_ms % 1000 != 0) {
    return absl::InvalidArgumentError(absl::StrCat(OriginOf(config, "etcd_lease_ms"),
                                                   ": expected whole seconds, got \"", config.etcd_lease_ms, "\""));
  }
  if (config.etcd_prefix.empty() || config.etcd_prefix.front() != '/') {
    return absl::InvalidArgumentError(absl::StrCat(OriginOf(config, "etcd_prefix"),
                                                   ": expected a path such as /precondor/coordinator, got \"",
                                                   config.etcd_prefix, "\""));
  }
  if (config.role == ServerRole::kCoordinator && config.shards.empty()) {
    return absl::InvalidArgumentError("shards: expected at least one address with role coordinator, got none");
  }
  if (config.role != ServerRole::kCoordinator && !config.shards.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(OriginOf(config, "shards"), ": expected none with role ",
                                                   ServerRoleName(config.role), ", got ", config.shards.size()));
  }
  const std::string& first = config.listen.front();
  const bool wildcard = absl::StartsWith(first, "0.0.0.0:") || absl::StartsWith(first, "[::]:");
  if (config.role == ServerRole::kAll && wildcard && config.advertise.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("advertise: expected the address that workers dial when listening on ", first, ", got none"));
  }
  return absl::OkStatus();
}

// Returns the default of an option as a person reads it: "8 GiB", "10 s", "none".
std::string DefaultText(const Option& option, const ServerConfig& defaults) {
  const std::string text = option.get(defaults);
  int64_t number = 0;
  if (text.empty()) return "none";
  if (!absl::SimpleAtoi(text, &number) || number == 0) {
    double fraction = 0;  // of which the option gives more digits than a person needs
    return absl::SimpleAtod(text, &fraction) ? absl::StrCat(fraction) : text;
  }
  if (option.value == "MILLISECONDS") return number % 1000 == 0 ? absl::StrCat(number / 1000, " s") : text + " ms";
  if (option.value != "BYTES") return text;
  size_t unit = 0;
  for (; number % 1024 == 0 && unit < 4; ++unit) number /= 1024;
  return absl::StrCat(number, std::array{" bytes", " KiB", " MiB", " GiB", " TiB"}[unit]);
}

// Returns the words in indented lines of at most 100 characters.
std::string Wrapped(absl::string_view words) {
  constexpr size_t kWidth = 100;
  std::string text, line = "     ";
  for (absl::string_view word : absl::StrSplit(words, ' ')) {
    if (line.size() + 1 + word.size() > kWidth) absl::StrAppend(&text, std::exchange(line, "     "), "\n");
    absl::StrAppend(&line, " ", word);
  }
  return absl::StrCat(text, line, "\n");
}

}  // namespace

std::string DialAddress(const ServerConfig& config) {
  return config.advertise.empty() ? AbsoluteUnixAddress(config.listen.front()) : config.advertise;
}

std::string TraceCollector(const ServerConfig& config) {
  absl::string_view address = config.trace_endpoint;
  if (!absl::ConsumePrefix(&address, "http://")) return "";
  absl::ConsumeSuffix(&address, "/");
  return absl::StrContains(address, '/') ? "" : std::string(address);
}

std::string OpenAddress(const ServerConfig& config) {
  if (!config.tls_cert.empty()) return "";
  const auto open = std::find_if(config.listen.begin(), config.listen.end(), [](const std::string& address) {
    return !UnixPath(address).has_value() && !IsLoopback(address);
  });
  return open == config.listen.end() ? "" : *open;
}

Environment ProcessEnvironment() {
  Environment environment;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::pair<std::string, std::string> variable = absl::StrSplit(*entry, absl::MaxSplits('=', 1));
    if (absl::StartsWith(variable.first, kVariablePrefix)) environment.insert(variable);
  }
  return environment;
}

absl::StatusOr<ParsedConfig> ParseServerConfig(const std::vector<std::string>& arguments,
                                               const Environment& environment) {
  PRECONDOR_ASSIGN_OR_RETURN(CommandLine line, ReadCommandLine(arguments));
  ParsedConfig parsed;
  parsed.action = line.action;
  if (line.action == ConfigAction::kHelp || line.action == ConfigAction::kVersion) return parsed;
  ServerConfig& config = parsed.config;
  for (const Option& option : Options()) config.origins[option.name] = "default";
  std::string path;
  if (const auto found = environment.find("PRECONDOR_CONFIG"); found != environment.end()) path = found->second;
  path = line.file.value_or(path);
  if (!path.empty()) PRECONDOR_RETURN_IF_ERROR(ApplyFile(config, path));
  PRECONDOR_RETURN_IF_ERROR(ApplyEnvironment(config, environment));
  for (const auto& [option, value] : line.values) {
    PRECONDOR_RETURN_IF_ERROR(SetOption(config, *option, value, absl::StrCat("flag ", FlagName(option->name))));
  }
  if (config.origins.at("transport_memory") == "default") {
    config.transport_memory = std::max(config.transport_memory, 2 * config.max_message_bytes);
  }
  PRECONDOR_RETURN_IF_ERROR(CheckWhole(config));
  return parsed;
}

std::string ServerHelp() {
  std::string text =
      "precondor-server: a parameter server for preconditioning.\n\n"
      "Usage: precondor-server [--name=value ...]\n\n"
      "Each flag is also an environment variable (PRECONDOR_ROLE=shard) and a key of a YAML file (role: shard).\n"
      "Flags win over the environment, and the environment over the file. Addresses are host:port or\n"
      "unix:/path/to/socket. BYTES take the units KiB, MiB, GiB and TiB: 8GiB. MILLISECONDS are a number:\n"
      "30000 for 30 s.\n\n"
      "Configuration\n"
      "  --config=FILE  default none\n"
      "      The server reads options from this YAML file. PRECONDOR_CONFIG names one too.\n"
      "  --check-config\n"
      "      The program checks the configuration, but no file that it names, and exits with 0 (good) or 2 (bad).\n"
      "  --print-config\n"
      "      The program prints the configuration as YAML, with the source of each value, and exits.\n"
      "  --version\n"
      "      The program prints its version and exits.\n"
      "  --help\n"
      "      The program prints this text and exits.\n";
  const ServerConfig defaults;
  absl::string_view topic;
  for (const Option& option : Options()) {
    if (option.topic != topic) absl::StrAppend(&text, "\n", topic = option.topic, "\n");
    absl::StrAppend(&text, "  ", FlagName(option.name), "=", option.value, "  default ", DefaultText(option, defaults),
                    "\n", Wrapped(option.help));
  }
  text +=
      "\nExamples\n"
      "  precondor-server                                        everything in one process on 127.0.0.1:7070\n"
      "  precondor-server --listen=unix:/run/precondor.sock      only for processes of this host\n"
      "  precondor-server --role=shard --listen=0.0.0.0:7071 --plaintext=any --memory-limit=64GiB\n"
      "  precondor-server --role=coordinator --shards=gpu0:7071,gpu1:7071 --metrics-listen=0.0.0.0:9090\n"
      "  precondor-server --listen=0.0.0.0:7070 --advertise=gpu0:7070 --tls-cert=gpu0.pem --tls-key=gpu0.key\n";
  return text;
}

std::string PrintServerConfig(const ServerConfig& config) {
  std::string text;
  for (const Option& option : Options()) {
    YAML::Emitter value;
    value << YAML::DoubleQuoted << option.get(config);
    const auto origin = config.origins.find(option.name);
    absl::StrAppend(&text, option.name, ": ", value.c_str(), "  # ",
                    origin == config.origins.end() ? "default" : absl::Utf8SafeCEscape(origin->second), "\n");
  }
  return text;
}

}  // namespace precondor
