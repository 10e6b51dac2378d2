// SPDX-License-Identifier: Apache-2.0
#include "server/config.h"

#include <algorithm>
#include <arpa/inet.h>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <functional>
#include <optional>
#include <set>
#include <unistd.h>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "yaml-cpp/yaml.h"

#include "kernels/base/status_macros.h"
#include "kernels/base/unix_address.h"

namespace precondor {
namespace {

constexpr absl::string_view kVariablePrefix = "PRECONDOR_";
constexpr int kMostDevice = 1023;
constexpr size_t kSlip = 2;  // an unknown variable within this edit distance of an option's is reported

struct Option {
  std::string name;  // as in YAML; flags use '-' for '_', environment variables upper case
  std::string help;
  std::function<absl::Status(ServerConfig&, absl::string_view)> set;  // its error says what was expected
  std::function<std::string(const ServerConfig&)> get;
  bool list = false;  // whether the file may contain a list
};

absl::Status Expected(absl::string_view what) { return absl::InvalidArgumentError(what); }

Option TextOption(std::string name, std::string ServerConfig::*field, std::string help) {
  return {std::move(name), std::move(help),
          [field](ServerConfig& config, absl::string_view text) {
            config.*field = std::string(text);
            return absl::OkStatus();
          },
          [field](const ServerConfig& config) { return config.*field; }};
}

Option ChoiceOption(std::string name, std::string ServerConfig::*field, std::vector<std::string> choices,
                    std::string help) {
  Option option = TextOption(std::move(name), field, absl::StrCat(help, " (", absl::StrJoin(choices, "|"), ")"));
  option.set = [field, choices](ServerConfig& config, absl::string_view text) {
    if (std::find(choices.begin(), choices.end(), text) == choices.end()) return Expected(absl::StrJoin(choices, ", "));
    config.*field = std::string(text);
    return absl::OkStatus();
  };
  return option;
}

// Parses "8GiB", "512MiB" or "4096". Returns -1 if the text has another form.
int64_t ParseBytes(absl::string_view text) {
  int64_t unit = 1;
  for (const auto& [suffix, shift] : std::map<std::string, int>{{"KiB", 10}, {"MiB", 20}, {"GiB", 30}, {"TiB", 40}}) {
    if (absl::EndsWith(text, suffix)) {
      unit = int64_t{1} << shift;
      text.remove_suffix(suffix.size());
      break;
    }
  }
  int64_t number = 0;
  return absl::SimpleAtoi(text, &number) && number >= 0 && number <= (int64_t{1} << 62) / unit ? number * unit : -1;
}

Option NumberOption(std::string name, int64_t ServerConfig::*field, int64_t low, int64_t high, std::string help,
                    bool bytes = false) {
  return {std::move(name), std::move(help),
          [=](ServerConfig& config, absl::string_view text) {
            int64_t number = 0;
            const bool parsed = bytes ? (number = ParseBytes(text)) >= 0 : absl::SimpleAtoi(text, &number);
            if (!parsed || number < low || number > high) {
              return Expected(absl::StrCat(bytes ? "bytes such as 4096, 512MiB or 8GiB" : "a whole number", " in ", low,
                                           " ... ", high));
            }
            config.*field = number;
            return absl::OkStatus();
          },
          [field](const ServerConfig& config) { return absl::StrCat(config.*field); }};
}

// The printed text has enough digits to give the number back.
Option FractionOption(std::string name, double ServerConfig::*field, std::string help) {
  return {std::move(name), std::move(help),
          [field](ServerConfig& config, absl::string_view text) {
            double number = 0;
            if (!absl::SimpleAtod(text, &number) || !(number >= 0 && number <= 1))
              return Expected("a number in 0 ... 1");
            config.*field = number;
            return absl::OkStatus();
          },
          [field](const ServerConfig& config) { return absl::StrFormat("%.17g", config.*field); }};
}

Option RoleOption() {
  return {"role", "all: coordinator and one shard in one process; shard; coordinator (all|shard|coordinator)",
          [](ServerConfig& config, absl::string_view text) {
            for (ServerRole role : {ServerRole::kAll, ServerRole::kShard, ServerRole::kCoordinator}) {
              if (text != ServerRoleName(role)) continue;
              config.role = role;
              return absl::OkStatus();
            }
            return Expected("all, shard or coordinator");
          },
          [](const ServerConfig& config) { return std::string(ServerRoleName(config.role)); }};
}

Option ListOption(const char* name, std::vector<std::string> ServerConfig::*field, const char* help) {
  return {name, help,
          [field](ServerConfig& config, absl::string_view text) {
            (config.*field).clear();
            for (absl::string_view part : absl::StrSplit(text, ',', absl::SkipWhitespace())) {
              (config.*field).emplace_back(absl::StripAsciiWhitespace(part));
            }
            return absl::OkStatus();
          },
          [field](const ServerConfig& config) { return absl::StrJoin(config.*field, ","); }, true};
}

Option CudaDevicesOption() {
  Option option = ListOption("cuda_devices", &ServerConfig::cuda_devices,
                             "cuda: several of them that the shard spreads its layers over, numbers separated by "
                             "commas, or all; empty: cuda_device alone");
  option.set = [set = option.set](ServerConfig& config, absl::string_view text) {
    ServerConfig parsed;
    PRECONDOR_RETURN_IF_ERROR(set(parsed, text));
    std::set<int> seen;
    bool numbers = true;
    for (const std::string& device : parsed.cuda_devices) {
      int number = -1;
      numbers = numbers && absl::SimpleAtoi(device, &number) && number >= 0 && number <= kMostDevice &&
                absl::StrCat(number) == device && seen.insert(number).second;
    }
    if (!numbers && parsed.cuda_devices != std::vector<std::string>{"all"}) {
      return Expected(absl::StrCat("all, or numbers in 0 ... ", kMostDevice, " separated by commas, each once"));
    }
    config.cuda_devices = std::move(parsed.cuda_devices);
    return absl::OkStatus();
  };
  return option;
}

const std::vector<Option>& Options() {
  constexpr int64_t kAnyBytes = int64_t{1} << 50, kHour = 3600 * 1000, kMostPid = 1 << 22;
  using C = ServerConfig;
  static const std::vector<Option>& options = *new std::vector<Option>{
      RoleOption(),
      ListOption(
          "listen", &C::listen,
          "where to take calls, separated by commas: host:port, port 0 takes a free one; or unix:/path/to/socket, "
          "for this user's processes on this host"),
      TextOption("port_file", &C::port_file,
                 "file to write the first gRPC port to, or without one the address, once it accepts calls"),
      TextOption("advertise", &C::advertise,
                 "address that workers dial, host:port or unix:/path/to/socket; default: the coordinator's name for "
                 "the shard, or the first of `listen`"),
      ListOption("shards", &C::shards,
                 "coordinator: its shards, host:port or unix:/path/to/socket, separated by commas"),
      TextOption("tls_cert", &C::tls_cert,
                 "file of this server's certificate in PEM form, with those between it and its authority: every "
                 "host:port of `listen` takes TLS alone; read again when it changes, as are the files below"),
      TextOption("tls_key", &C::tls_key, "file of that certificate's private key"),
      TextOption("tls_client_ca", &C::tls_client_ca,
                 "file of the authorities that sign clients' certificates: every client needs one; empty: none does"),
      TextOption("access_file", &C::access_file,
                 "file that says which tokens and certificates' names may call what; empty: who may connect may call "
                 "everything"),
      TextOption("tls_ca", &C::tls_ca,
                 "coordinator: file of the authorities that sign its shards' certificates; empty: it dials in "
                 "plaintext"),
      TextOption("token_file", &C::token_file, "coordinator: file of the token that it shows to its shards"),
      ChoiceOption("plaintext", &C::plaintext, {"loopback", "any"},
                   "without tls_cert: where host:port of `listen` may be; any: all who reach it read and change "
                   "everything"),
      ChoiceOption("backend", &C::backend, {"auto", "cpu", "cuda"},
                   "device of a shard; auto: cuda where there is one, else cpu"),
      NumberOption("cuda_device", &C::cuda_device, 0, kMostDevice, "cuda: which of the host's devices, as CUDA counts"),
      CudaDevicesOption(),
      NumberOption(
          "device_plane_bytes", &C::device_plane_bytes, 0, kAnyBytes,
          "cuda: most bytes of the ring in the device's memory that a stream of a worker on this host, which dials "
          "a unix: address, may have, out of memory_limit; 0: none",
          true),
      NumberOption(
          "threads", &C::threads, 0, 1024,
          "threads for the arithmetic of each of a shard's devices, and with cuda the most layers that are under way "
          "at once on each; 0: the devices' share of the cores, with cuda at least 4 and 512 layers"),
      NumberOption("memory_limit", &C::memory_limit_bytes, 1 << 20, kAnyBytes,
                   "bytes that sessions may reserve on each of a shard's devices, or on a coordinator", true),
      NumberOption("window_steps", &C::window_steps, 2, 64, "steps of a layer that may be open at once"),
      NumberOption("slow_worker_ms", &C::slow_worker_ms, 0, kHour,
                   "name the workers that a step has been waiting for so long; 0: never"),
      TextOption("data_dir", &C::data_dir,
                 "directory to come back from after a crash; one server's alone; empty: nothing is kept"),
      NumberOption("snapshot_interval_steps", &C::snapshot_interval_steps, 0, 1 << 30,
                   "steps between two snapshots of a session in the data directory; 0: none"),
      NumberOption("gradient_journal_bytes", &C::gradient_journal_bytes, 0, kAnyBytes,
                   "gradients of a session in the data directory after which a snapshot is due; 0: gradients are not "
                   "written, and only a drain brings methods that learn from them back exactly",
                   true),
      NumberOption(
          "quarantine_days", &C::quarantine_days, 0, 36500,
          "days that a running shard keeps sessions which no coordinator knows, on disk alone; 0: without limit"),
      NumberOption("session_snapshot_steps", &C::session_snapshot_steps, 0, 1 << 30,
                   "coordinator: steps between two snapshots of a whole session, all shards as of one step; 0: none"),
      ListOption("etcd_endpoints", &C::etcd_endpoints,
                 "coordinator: members of an etcd that keeps its journal, host:port, separated by commas"),
      TextOption("etcd_prefix", &C::etcd_prefix, "what all keys of one deployment begin with there"),
      NumberOption("etcd_lease_ms", &C::etcd_lease_ms, 1000, kHour,
                   "silence after which another coordinator takes over; whole seconds"),
      NumberOption("lease_steps", &C::lease_steps, 1, 1 << 20, "steps granted beyond the one reported"),
      NumberOption("tenant_max_sessions", &C::tenant_max_sessions, 0, 1 << 20,
                   "sessions that one tenant of the access file may have open; 0: any number"),
      NumberOption("tenant_max_bytes", &C::tenant_max_bytes, 0, kAnyBytes,
                   "bytes that one tenant's sessions may reserve for factors and staging on all shards; 0: any number",
                   true),
      NumberOption("tenant_max_calls", &C::tenant_max_calls, 0, 1 << 30,
                   "calls that one tenant of the access file may begin in a second; 0: any number"),
      NumberOption("reconcile_interval_ms", &C::reconcile_interval_ms, 10, kHour,
                   "pause of a coordinator between looks at what its shards hold"),
      TextOption("metrics_listen", &C::metrics_listen, "address of the Prometheus port, host:port; empty: none"),
      TextOption("metrics_port_file", &C::metrics_port_file, "file to write the Prometheus port to"),
      ChoiceOption("log_format", &C::log_format, {"text", "json"}, "form of a log line"),
      ChoiceOption("log_level", &C::log_level, {"debug", "info", "warning", "error"}, "least severity logged"),
      TextOption(
          "trace_endpoint", &C::trace_endpoint,
          "collector that takes spans as OTLP/HTTP in JSON, such as http://localhost:4318; empty: none are made"),
      FractionOption("trace_ratio", &C::trace_ratio, "fraction of the training steps that have spans"),
      NumberOption("drain_deadline_ms", &C::drain_deadline_ms, 0, kHour, "longest wait for work in flight at SIGTERM"),
      NumberOption("exit_with_pid", &C::exit_with_pid, 0, kMostPid,
                   "end when this process does, however it does: for a server of one job's own; 0: none"),
      NumberOption("shard_timeout_ms", &C::shard_timeout_ms, 1, kHour, "deadline of a coordinator's call to a shard"),
      NumberOption("max_message_bytes", &C::max_message_bytes, 4 << 20, (int64_t{1} << 31) - 1,
                   "largest gRPC message accepted", true),
      NumberOption(
          "transport_memory", &C::transport_memory, 8 << 20, kAnyBytes,
          "bytes of messages that gRPC may hold, of all connections: in parts as they come, and unread as they go",
          true),
      NumberOption("credit_bytes", &C::credit_bytes, 1 << 20, kAnyBytes,
                   "payload that a stream may have unacknowledged", true),
  };
  return options;
}

std::string FlagName(absl::string_view name) { return absl::StrCat("--", absl::StrReplaceAll(name, {{"_", "-"}})); }
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

absl::string_view ServerRoleName(ServerRole role) {
  switch (role) {
    case ServerRole::kAll:
      return "all";
    case ServerRole::kShard:
      return "shard";
    case ServerRole::kCoordinator:
      return "coordinator";
  }
  return "unknown";
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
      "Every option may also stand in the environment (PRECONDOR_ROLE=shard) or in a YAML file (role: shard);\n"
      "flags win over the environment, the environment over the file.\n\nOptions:\n"
      "  --config=FILE               YAML file with options\n"
      "  --check-config              check the configuration and exit: 0 good, 2 bad\n"
      "  --print-config              print the configuration and where each value came from, and exit\n"
      "  --version                   print the version and exit\n"
      "  --help                      print this and exit\n";
  const ServerConfig defaults;
  for (const Option& option : Options()) {
    const std::string value = option.get(defaults);
    absl::StrAppendFormat(&text, "  %-27s %s [%s]\n", FlagName(option.name), option.help, value);
  }
  text +=
      "\nExamples:\n"
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
