// SPDX-License-Identifier: Apache-2.0
#include "server/app/config.h"

#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <string>
#include <unistd.h>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace precondor {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Strings = std::vector<std::string>;

struct OptionCase {
  std::string name;
  std::string text;  // differs from the default
  std::function<bool(const ServerConfig&)> has_default;
  std::function<bool(const ServerConfig&)> has_text;
};

template <typename T>
OptionCase Case(std::string name, T ServerConfig::*field, T standard, std::string text, T value) {
  return {std::move(name), std::move(text), [=](const ServerConfig& config) { return config.*field == standard; },
          [=](const ServerConfig& config) { return config.*field == value; }};
}

// Every option with its default.
std::vector<OptionCase> Cases() {
  using C = ServerConfig;
  using S = std::string;
  using I = int64_t;
  return {
      Case("role", &C::role, ServerRole::kAll, "shard", ServerRole::kShard),
      Case("listen", &C::listen, Strings{"127.0.0.1:7070"}, "127.0.0.1:0,unix:a", Strings{"127.0.0.1:0", "unix:a"}),
      Case("port_file", &C::port_file, S(), "a/port", S("a/port")),
      Case("advertise", &C::advertise, S(), "gpu0:7071", S("gpu0:7071")),
      Case("plaintext", &C::plaintext, S("loopback"), "any", S("any")),
      Case("backend", &C::backend, S("auto"), "cuda", S("cuda")),
      Case("cuda_device", &C::cuda_device, I{0}, "3", I{3}),
      Case("device_plane_bytes", &C::device_plane_bytes, I{0}, "2GiB", I{2147483648}),
      Case("threads", &C::threads, I{0}, "3", I{3}),
      Case("memory_limit", &C::memory_limit_bytes, I{8589934592}, "512MiB", I{536870912}),
      Case("window_steps", &C::window_steps, I{2}, "5", I{5}),
      Case("data_dir", &C::data_dir, S(""), "/data", S("/data")),
      Case("snapshot_interval_steps", &C::snapshot_interval_steps, I{1000}, "5", I{5}),
      Case("gradient_journal_bytes", &C::gradient_journal_bytes, I{256} << 20, "0", I{0}),
      Case("quarantine_days", &C::quarantine_days, I{30}, "0", I{0}),
      Case("session_snapshot_steps", &C::session_snapshot_steps, I{0}, "5000", I{5000}),
      Case("lease_steps", &C::lease_steps, I{64}, "7", I{7}),
      Case("tenant_max_sessions", &C::tenant_max_sessions, I{0}, "7", I{7}),
      Case("tenant_max_bytes", &C::tenant_max_bytes, I{0}, "2GiB", I{2147483648}),
      Case("slow_worker_ms", &C::slow_worker_ms, I{30000}, "0", I{0}),
      Case("reconcile_interval_ms", &C::reconcile_interval_ms, I{1000}, "250", I{250}),
      Case("etcd_prefix", &C::etcd_prefix, S("/precondor/coordinator"), "/jobs/a", S("/jobs/a")),
      Case("etcd_lease_ms", &C::etcd_lease_ms, I{10000}, "5000", I{5000}),
      Case("metrics_listen", &C::metrics_listen, S(), "[::1]:0", S("[::1]:0")),
      Case("metrics_port_file", &C::metrics_port_file, S(), "m", S("m")),
      Case("log_format", &C::log_format, S("text"), "json", S("json")),
      Case("log_level", &C::log_level, S("info"), "debug", S("debug")),
      Case("trace_endpoint", &C::trace_endpoint, S(), "http://localhost:4318", S("http://localhost:4318")),
      Case("trace_ratio", &C::trace_ratio, 0.01, "0", 0.0),
      Case("drain_deadline_ms", &C::drain_deadline_ms, I{10000}, "0", I{0}),
      Case("exit_with_pid", &C::exit_with_pid, I{0}, "4711", I{4711}),
      Case("shard_timeout_ms", &C::shard_timeout_ms, I{10000}, "1", I{1}),
      Case("max_message_bytes", &C::max_message_bytes, I{268435456}, "4MiB", I{4194304}),
      Case("transport_memory", &C::transport_memory, I{536870912}, "1GiB", I{1073741824}),
      Case("shared_memory_bytes", &C::shared_memory_bytes, I{134217728}, "0", I{0}),
      Case("credit_bytes", &C::credit_bytes, I{67108864}, "1048576", I{1048576}),
  };
}

std::string Flag(absl::string_view name, absl::string_view text) {
  return absl::StrCat("--", absl::StrReplaceAll(name, {{"_", "-"}}), "=", text);
}
std::string Variable(absl::string_view name) { return absl::StrCat("PRECONDOR_", absl::AsciiStrToUpper(name)); }

class ConfigTest : public ::testing::Test {
 protected:
  void SetUp() override { std::filesystem::create_directories(folder_); }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string File(absl::string_view text) {
    const std::string path = folder_ / absl::StrCat("config", files_++, ".yaml");
    std::ofstream(path) << text;
    return path;
  }
  static ServerConfig Parse(const Strings& arguments, const Environment& environment = {}) {
    const auto parsed = ParseServerConfig(arguments, environment);
    EXPECT_TRUE(parsed.ok()) << parsed.status();
    return parsed.ok() ? parsed->config : ServerConfig();
  }
  static std::string Refusal(const Strings& arguments, const Environment& environment = {},
                             absl::StatusCode code = absl::StatusCode::kInvalidArgument) {
    const auto parsed = ParseServerConfig(arguments, environment);
    EXPECT_EQ(parsed.status().code(), code) << parsed.status();
    return std::string(parsed.status().message());
  }
  std::string FileRefusal(absl::string_view text) { return Refusal({"--config=" + File(text)}); }

  const std::filesystem::path folder_ =
      std::filesystem::path(::testing::TempDir()) / absl::StrCat("config_test", getpid());

 private:
  int files_ = 0;
};

TEST_F(ConfigTest, EveryOptionHasItsDefault) {
  const ServerConfig config = Parse({});
  for (const OptionCase& option : Cases()) {
    EXPECT_TRUE(option.has_default(config)) << option.name;
    EXPECT_EQ(config.origins.at(option.name), "default");
  }
  EXPECT_TRUE(config.shards.empty());
  EXPECT_EQ(config.origins.size(), Cases().size() + 2 + 7) << "an option is missing above; shards, etcd_endpoints, the "
                                                              "files of TLS and tenant_max_calls have their own tests";
}

TEST_F(ConfigTest, EveryOptionComesFromEachSource) {
  for (const OptionCase& option : Cases()) {
    SCOPED_TRACE(option.name);
    const ServerConfig flag = Parse({Flag(option.name, option.text)});
    EXPECT_TRUE(option.has_text(flag));
    EXPECT_EQ(flag.origins.at(option.name), "flag --" + absl::StrReplaceAll(option.name, {{"_", "-"}}));
    const ServerConfig environment = Parse({}, {{Variable(option.name), option.text}});
    EXPECT_TRUE(option.has_text(environment));
    EXPECT_EQ(environment.origins.at(option.name), "environment " + Variable(option.name));
    const std::string path = File(absl::StrCat(option.name, ": \"", option.text, "\"\n"));
    const ServerConfig file = Parse({"--config=" + path});
    EXPECT_TRUE(option.has_text(file));
    EXPECT_EQ(file.origins.at(option.name), absl::StrCat("file ", path, ": ", option.name));
  }
}

TEST_F(ConfigTest, FlagsWinOverTheEnvironmentOverTheFileOverDefaults) {
  const std::string path = File("threads: 1\nlease_steps: 1\nwindow_steps: 3\n");
  const Environment environment = {{"PRECONDOR_THREADS", "2"}, {"PRECONDOR_LEASE_STEPS", "2"}};
  const ServerConfig config = Parse({"--threads=4", "--config=" + path}, environment);
  EXPECT_EQ(config.threads, 4);
  EXPECT_EQ(config.lease_steps, 2);
  EXPECT_EQ(config.window_steps, 3);
  EXPECT_EQ(config.log_level, "info");
  EXPECT_EQ(Parse({"--threads=4", "--threads=5"}).threads, 5) << "the last of two counts";
}

TEST_F(ConfigTest, TheFileIsNamedByTheFlagBeforeTheEnvironment) {
  const Environment environment = {{"PRECONDOR_CONFIG", File("threads: 1\n")}};
  EXPECT_EQ(Parse({}, environment).threads, 1);
  EXPECT_EQ(Parse({"--config=" + File("threads: 2\n")}, environment).threads, 2);
  EXPECT_EQ(Parse({"--config="}, environment).threads, 0) << "no file at all";
}

TEST_F(ConfigTest, ShardsAreAListOrSeparatedByCommas) {
  const auto expected = ElementsAre("a:1", "[::1]:2");
  EXPECT_THAT(Parse({"--role=coordinator", "--shards=a:1, [::1]:2,"}).shards, expected);
  EXPECT_THAT(Parse({"--role=coordinator"}, {{"PRECONDOR_SHARDS", "a:1,[::1]:2"}}).shards, expected);
  EXPECT_THAT(Parse({"--config=" + File("role: coordinator\nshards:\n  - a:1\n  - \"[::1]:2\"\n")}).shards, expected);
  EXPECT_THAT(Parse({"--config=" + File("role: coordinator\nshards: \"a:1,[::1]:2\"\n")}).shards, expected);
  EXPECT_THAT(Parse({"--role=coordinator", "--shards=b:3"}, {{"PRECONDOR_SHARDS", "a:1,c:2"}}).shards,
              ElementsAre("b:3"))
      << "the flag replaces the list";
}

TEST_F(ConfigTest, BytesTakeBinaryUnits) {
  const std::map<std::string, int64_t> cases = {{"1048576", int64_t{1} << 20}, {"2048KiB", int64_t{2} << 20},
                                                {"3MiB", int64_t{3} << 20},    {"4GiB", int64_t{4} << 30},
                                                {"1TiB", int64_t{1} << 40},    {"1024TiB", int64_t{1} << 50}};
  for (const auto& [text, bytes] : cases) EXPECT_EQ(Parse({"--memory-limit=" + text}).memory_limit_bytes, bytes);
  for (const std::string text : {"8GB", "8G", "8gib", "-1", "-1GiB", "1.5GiB", "GiB", "", "1048575", "1025TiB",
                                 "99999999999999999999", "9007199254740993KiB"}) {
    EXPECT_THAT(Refusal({"--memory-limit=" + text}),
                AllOf(HasSubstr("flag --memory-limit: expected bytes such as 4096, 512MiB or 8GiB in 1048576 ... "),
                      HasSubstr(absl::StrCat("got \"", text, "\""))));
  }
}

TEST_F(ConfigTest, BadValuesNameOptionExpectationAndWhatCame) {
  const std::map<std::string, std::vector<std::string>> bad = {
      {"role", {"", "Shard", "both"}},
      {"backend", {"", "cuda9"}},
      {"threads", {"", "many", "-1", "1025", "1.5", "0x10"}},
      {"window_steps", {"1", "65"}},
      {"trace_ratio", {"", "-0.5", "1.0001", "nan", "inf", "half", "50%"}},
      {"slow_worker_ms", {"-1", "3600001"}},
      {"snapshot_interval_steps", {"-1", "1073741825"}},
      {"gradient_journal_bytes", {"-1"}},
      {"quarantine_days", {"-1", "36501"}},
      {"session_snapshot_steps", {"-1", "1073741825"}},
      {"lease_steps", {"0", "1048577"}},
      {"tenant_max_sessions", {"-1", "1048577"}},
      {"tenant_max_bytes", {"-1", "2 sessions"}},
      {"tenant_max_calls", {"-1", "1073741825"}},
      {"etcd_lease_ms", {"999", "3600001"}},
      {"etcd_prefix", {"", "precondor"}},
      {"reconcile_interval_ms", {"9", "3600001"}},
      {"log_format", {"", "xml"}},
      {"log_level", {"", "INFO"}},
      {"drain_deadline_ms", {"-1", "3600001"}},
      {"exit_with_pid", {"-1", "4194305"}},
      {"shard_timeout_ms", {"0", "3600001"}},
      {"max_message_bytes", {"4194303", "2GiB"}},
      {"credit_bytes", {"1MiBs", "1048575"}},
      {"transport_memory", {"8388607", "much"}}};
  for (const auto& [name, texts] : bad) {
    for (const std::string& text : texts) {
      const auto tells = AllOf(HasSubstr(": expected "), HasSubstr(absl::StrCat("got \"", text, "\"")));
      EXPECT_THAT(Refusal({Flag(name, text)}),
                  AllOf(HasSubstr("flag --" + absl::StrReplaceAll(name, {{"_", "-"}})), tells));
      EXPECT_THAT(Refusal({}, {{Variable(name), text}}), AllOf(HasSubstr("environment " + Variable(name)), tells));
      EXPECT_THAT(FileRefusal(absl::StrCat(name, ": \"", text, "\"\n")),
                  AllOf(HasSubstr(absl::StrCat(".yaml: ", name)), tells));
    }
  }
}

TEST_F(ConfigTest, AddressesAreHostAndPort) {
  for (const std::string name : {"listen", "advertise", "metrics_listen"}) {
    for (const std::string text : {"localhost", ":7070", "host:", "host:port", "host:-1", "host:65536"}) {
      EXPECT_THAT(Refusal({Flag(name, text)}),
                  AllOf(HasSubstr(Flag(name, "").substr(0, Flag(name, "").size() - 1)), HasSubstr("expected host:port"),
                        HasSubstr(absl::StrCat("got \"", text, "\""))));
    }
  }
  EXPECT_THAT(Refusal({"--listen="}), HasSubstr("flag --listen: expected at least one host:port"));
  EXPECT_THAT(Refusal({"--advertise=gpu0:0"}), HasSubstr("a port in 1 ... 65535")) << "no worker can dial it";
  EXPECT_THAT(Refusal({"--role=coordinator", "--shards=a:1,b"}), HasSubstr("flag --shards: expected host:port"));
  EXPECT_THAT(Refusal({"--role=coordinator", "--shards=a:0"}), HasSubstr("a port in 1 ... 65535"));
}

TEST_F(ConfigTest, SocketsHaveAPath) {
  EXPECT_THAT(Parse({"--listen=unix:a, unix:///b,:::0", "--plaintext=any"}).listen,
              ElementsAre("unix:a", "unix:///b", ":::0"));
  EXPECT_THAT(Parse({"--role=coordinator", "--shards=unix:/a,b:1"}).shards, ElementsAre("unix:/a", "b:1"));
  for (const std::string name : {"listen", "advertise", "shards"}) {
    EXPECT_THAT(Refusal({"--role=coordinator", Flag(name, "unix:")}),
                HasSubstr("or unix:/path/to/socket, got \"unix:\""));
    const std::string late = absl::StrCat("unix:/", std::string(107, 'a'));
    EXPECT_THAT(
        Refusal({"--role=coordinator", Flag(name, late)}),
        HasSubstr(absl::StrCat("flag --", name, ": expected unix:PATH with a path of 1 ... 107 bytes, got 108")));
  }
  for (const std::string name : {"advertise", "shards"}) {
    EXPECT_THAT(Refusal({"--role=coordinator", Flag(name, "unix:a")}), HasSubstr("got \"unix:a\""))
        << "others are elsewhere";
  }
  EXPECT_THAT(Refusal({"--metrics-listen=unix:7070"}), HasSubstr("expected host:port with a port in 0 ... 65535, got"));
  EXPECT_THAT(Refusal({"--metrics-listen=a:0,b:0"}), HasSubstr("expected host:port with a port in 0 ... 65535, got"));
  EXPECT_THAT(Refusal({"--listen=unix:/a,unix:/a"}), HasSubstr("each address once, got \"unix:/a\" twice"));
}

TEST_F(ConfigTest, WorkersDialWhatIsAdvertisedOrTheFirst) {
  EXPECT_EQ(DialAddress(Parse({"--listen=unix:/a,localhost:1"})), "unix:/a");
  EXPECT_EQ(DialAddress(Parse({"--listen=localhost:1,unix:/a"})), "localhost:1");
  EXPECT_EQ(DialAddress(Parse({"--listen=localhost:1", "--advertise=unix:/a"})), "unix:/a");
  EXPECT_EQ(DialAddress(Parse({"--listen=unix:a"})),
            absl::StrCat("unix:", (std::filesystem::current_path() / "a").string()));
}

TEST_F(ConfigTest, OptionsMustFitTogether) {
  EXPECT_THAT(Refusal({"--role=coordinator"}), HasSubstr("shards: expected at least one address"));
  EXPECT_THAT(Refusal({"--role=shard", "--shards=a:1,b:2"}), HasSubstr("expected none with role shard, got 2"));
  EXPECT_THAT(Refusal({"--shards=a:1"}), HasSubstr("expected none with role all, got 1"));
  EXPECT_THAT(Refusal({"--role=coordinator", "--shards=a:1,b:2,a:1"}),
              HasSubstr("expected each address once, got \"a:1\" twice"));
  for (const std::string listen : {"0.0.0.0:7070", "[::]:7070"}) {
    EXPECT_THAT(Refusal({"--listen=" + listen, "--plaintext=any"}),
                AllOf(HasSubstr("advertise: expected the address that workers dial"), HasSubstr(listen)));
    EXPECT_THAT(Parse({"--listen=" + listen, "--plaintext=any", "--advertise=host:7070"}).listen, ElementsAre(listen));
    EXPECT_THAT(Parse({"--role=shard", "--plaintext=any", "--listen=" + listen}).listen, ElementsAre(listen));
    EXPECT_THAT(Parse({"--listen=unix:/a," + listen, "--plaintext=any"}).listen, ElementsAre("unix:/a", listen))
        << "they dial the first";
  }
}

TEST_F(ConfigTest, PlaintextForOtherHostsIsAskedFor) {
  for (const std::string open : {"0.0.0.0:7070", "[::]:7070", "gpu0:7070", "127.gpu.example:1", "[::2]:1"}) {
    EXPECT_THAT(
        Refusal({"--role=shard", "--listen=unix:/a,127.0.0.1:1," + open}),
        HasSubstr("flag --listen: expected tls_cert and tls_key, or plaintext=any to let all who reach " + open));
    EXPECT_EQ(OpenAddress(Parse({"--role=shard", "--listen=127.0.0.1:1," + open, "--plaintext=any"})), open);
    EXPECT_EQ(OpenAddress(Parse({"--role=shard", "--listen=" + open, "--tls-cert=c", "--tls-key=k"})), "");
  }
  EXPECT_EQ(OpenAddress(Parse({"--listen=127.0.0.2:1,localhost:0,[::1]:3,unix:/a", "--plaintext=any"})), "");
}

TEST_F(ConfigTest, FilesOfTlsGoTogether) {
  const ServerConfig config = Parse({"--role=coordinator", "--shards=a:1", "--tls-cert=c", "--tls-key=k",
                                     "--tls-client-ca=l", "--access-file=a", "--tls-ca=r", "--token-file=t"});
  EXPECT_EQ(config.tls_cert + config.tls_key + config.tls_client_ca + config.access_file, "ckla");
  EXPECT_EQ(config.tls_ca + config.token_file, "rt");
  EXPECT_THAT(Refusal({"--tls-cert=c"}), HasSubstr("flag --tls-cert: expected tls_key beside it, got none"));
  EXPECT_THAT(Refusal({"--tls-key=k"}), HasSubstr("expected tls_cert beside it"));
  EXPECT_THAT(Refusal({"--tls-client-ca=l"}), HasSubstr("expected tls_cert beside it"));
  EXPECT_THAT(Refusal({"--access-file=a"}), HasSubstr("expected tls_cert beside it"));
  EXPECT_THAT(Refusal({"--tenant-max-calls=7"}), HasSubstr("flag --tenant-max-calls: expected access_file"));
  EXPECT_EQ(Parse({"--tls-cert=c", "--tls-key=k", "--access-file=a", "--tenant-max-calls=7"}).tenant_max_calls, 7);
  EXPECT_THAT(Refusal({"--token-file=a"}), HasSubstr("expected tls_ca beside it"));
  EXPECT_THAT(Refusal({"--role=shard", "--tls-ca=r"}), HasSubstr("flag --tls-ca: expected none with role shard"));
}

TEST_F(ConfigTest, MemoryForMessagesHoldsTheLargest) {
  EXPECT_EQ(Parse({"--max-message-bytes=1GiB"}).transport_memory, int64_t{2} << 30);
  EXPECT_EQ(Parse({"--max-message-bytes=8MiB", "--transport-memory=8MiB"}).transport_memory, 8 << 20);
  EXPECT_THAT(Refusal({"--max-message-bytes=1GiB", "--transport-memory=512MiB"}),
              HasSubstr("flag --transport-memory: expected at least max_message_bytes, 1073741824, got 536870912"));
}

TEST_F(ConfigTest, UnknownNamesAreErrorsThatOfferTheNearest) {
  EXPECT_THAT(Refusal({"--memory-limits=1GiB"}),
              HasSubstr("command line: unknown option \"memory_limits\"; the nearest is \"memory_limit\""));
  EXPECT_THAT(FileRefusal("treads: 4\n"), HasSubstr("unknown option \"treads\"; the nearest is \"threads\""));
  EXPECT_THAT(FileRefusal("[a, b]: 4\n"), HasSubstr("unknown option \"\""));
  EXPECT_THAT(Refusal({}, {{"PRECONDOR_MEMORY_LIMT", "1GiB"}}),
              AllOf(HasSubstr("environment PRECONDOR_MEMORY_LIMT"), HasSubstr("\"memory_limit\"")));
  EXPECT_LT(Refusal({"--" + std::string(1 << 20, 'x') + "=1"}).size(), 200u);
}

TEST_F(ConfigTest, VariablesOfOthersAreLeftAlone) {
  const Environment environment = {{"PRECONDOR_PORT", "tcp://127.0.0.1:7070"},
                                   {"PRECONDOR_SERVICE_HOST", "127.0.0.1"},
                                   {"PRECONDOR_PORT_7070_TCP_PROTO", "tcp"},
                                   {"PRECONDOR_SHARD_SERVICE_PORT", "7071"},
                                   {"PRECONDOR_", ""},
                                   {"PATH", "/bin"},
                                   {"THREADS", "9"},
                                   {"PRECONDOR_THREADS", "2"}};
  EXPECT_EQ(Parse({}, environment).threads, 2);
}

TEST_F(ConfigTest, CommandLineTakesNamesWithValuesOnly) {
  for (const std::string argument : {"--threads", "threads=3", "-h", "x", ""}) {
    EXPECT_THAT(Refusal({argument}), HasSubstr(absl::StrCat("expected --name=value, got \"", argument, "\"")));
  }
  EXPECT_EQ(Parse({"--port-file=a=b"}).port_file, "a=b");
  EXPECT_THAT(Refusal({"--data-dir="}), HasSubstr("--data-dir=: expected a path, got none"));
}

TEST_F(ConfigTest, AnEmptyFileChangesNothing) {
  for (const std::string text : {"", "\n", "# nothing\n", "---\n", "{}\n", "---\n{}\n...\n", "%YAML 1.2\n---\n{}\n"}) {
    const ServerConfig config = Parse({"--config=" + File(text)});
    for (const OptionCase& option : Cases()) EXPECT_TRUE(option.has_default(config)) << option.name;
  }
}

TEST_F(ConfigTest, AFileThatIsNotAMapOfOptionsIsRefused) {
  EXPECT_THAT(FileRefusal("- threads\n"), HasSubstr("expected a map of options"));
  EXPECT_THAT(FileRefusal("threads\n"), HasSubstr("expected a map of options"));
  EXPECT_THAT(FileRefusal("threads: [1\n"), AllOf(HasSubstr(".yaml: "), HasSubstr("line ")));
  EXPECT_THAT(FileRefusal("threads: 1\n---\nthreads: 2\n"), HasSubstr("expected one YAML document, got more"));
  EXPECT_THAT(FileRefusal(",threads: 1\n"), HasSubstr("expected a map of options"));
  EXPECT_THAT(FileRefusal("threads: 1\nthreads: 2\n"), HasSubstr("threads: expected once, got twice"));
  EXPECT_THAT(FileRefusal("port_file: {a: 1}\n"), HasSubstr("port_file: expected one value, got a map"));
  EXPECT_THAT(FileRefusal("port_file: [a]\n"), HasSubstr("port_file: expected one value, got a list"));
  EXPECT_THAT(FileRefusal("role: coordinator\nshards: {a: 1}\n"),
              HasSubstr("shards: expected one value or a list of them, got a map"));
  EXPECT_THAT(FileRefusal("role: coordinator\nshards: [a:1, [b:2]]\n"),
              HasSubstr("shards: expected one value or a list of them, got a list with a list or a map in it"));
  EXPECT_THAT(FileRefusal("threads:\n"), HasSubstr("threads: expected a whole number"));
  EXPECT_EQ(Parse({"--config=" + File("port_file:\n")}).port_file, "");
}

TEST_F(ConfigTest, AFileThatCannotBeReadIsNotFound) {
  const std::string missing = folder_ / "missing.yaml";
  EXPECT_THAT(Refusal({"--config=" + missing}, {}, absl::StatusCode::kNotFound), HasSubstr(missing));
  EXPECT_THAT(Refusal({"--config=" + folder_.string()}, {}, absl::StatusCode::kNotFound),
              HasSubstr("cannot read " + folder_.string()));
}

TEST_F(ConfigTest, RelativePathsAreOfTheWorkingDirectory) {
  const std::string path = File("port_file: sub/port\n");
  const std::filesystem::path before = std::filesystem::current_path();
  std::filesystem::current_path(folder_);
  const ServerConfig config = Parse({"--config=" + std::filesystem::path(path).filename().string()});
  std::filesystem::current_path(before);
  EXPECT_EQ(config.port_file, "sub/port") << "kept as written: the working directory is the process' own";
}

TEST_F(ConfigTest, WhatIsPrintedReadsBackTheSame) {
  Strings arguments;
  for (const OptionCase& option : Cases()) arguments.push_back(Flag(option.name, option.text));
  arguments.push_back("--role=coordinator");
  arguments.push_back("--shards=a:1,b:2");
  arguments.push_back("--trace-ratio=0.66666666666666663");
  arguments.push_back("--port-file=a \"b\" #c: \\d\té\n");
  const ServerConfig config = Parse(arguments);
  const std::string printed = PrintServerConfig(config);
  const ServerConfig again = Parse({"--config=" + File(printed)});
  for (const OptionCase& option : Cases()) {
    if (option.name == "role" || option.name == "trace_ratio" || option.name == "port_file") continue;
    EXPECT_TRUE(option.has_text(again)) << option.name;
  }
  EXPECT_EQ(again.role, ServerRole::kCoordinator);
  EXPECT_THAT(again.shards, ElementsAre("a:1", "b:2"));
  EXPECT_EQ(again.trace_ratio, 2.0 / 3);
  EXPECT_EQ(again.port_file, "a \"b\" #c: \\d\té\n");
  EXPECT_THAT(printed, AllOf(HasSubstr("threads: \"3\"  # flag --threads\n"), HasSubstr("credit_bytes: \"1048576\"")));
  // A second round tells the file as the origin; a path with a line break must not end the comment.
  const std::filesystem::path odd = folder_ / "two\nlines: 1.yaml";
  std::ofstream(odd) << printed;
  const std::string second = PrintServerConfig(Parse({"--config=" + odd.string()}));
  EXPECT_EQ(Parse({"--config=" + File(second)}).trace_ratio, 2.0 / 3);
}

TEST_F(ConfigTest, ActionsStillCheckTheConfigurationButHelpAndVersionDoNot) {
  const auto action = [](const Strings& arguments) {
    const auto parsed = ParseServerConfig(arguments, {});
    EXPECT_TRUE(parsed.ok()) << parsed.status();
    return parsed.ok() ? parsed->action : ConfigAction::kRun;
  };
  EXPECT_EQ(action({}), ConfigAction::kRun);
  EXPECT_EQ(action({"--check-config", "--threads=2"}), ConfigAction::kCheck);
  EXPECT_EQ(action({"--print-config"}), ConfigAction::kPrint);
  EXPECT_EQ(action({"--version", "--role=coordinator"}), ConfigAction::kVersion);
  EXPECT_EQ(action({"--help", "--threads=many"}), ConfigAction::kHelp);
  for (const std::string flag : {"--check-config", "--print-config"}) {
    EXPECT_THAT(Refusal({flag, "--threads=many"}), HasSubstr("--threads"));
    EXPECT_THAT(Refusal({flag, "--role=coordinator"}), HasSubstr("shards"));
  }
}

TEST_F(ConfigTest, EtcdIsForCoordinatorsWithoutADataDirectory) {
  const auto parsed =
      ParseServerConfig({"--role=coordinator", "--shards=a:1", "--etcd-endpoints=e1:2379, e2:2379"}, {});
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->config.etcd_endpoints, (Strings{"e1:2379", "e2:2379"}));
  EXPECT_THAT(Refusal({"--etcd-endpoints=e1:2379"}), HasSubstr("expected none with role all, got 1"));
  const Strings coordinator = {"--role=coordinator", "--shards=a:1"};
  EXPECT_THAT(Refusal({coordinator[0], coordinator[1], "--etcd-endpoints=e1"}), HasSubstr("--etcd-endpoints"));
  EXPECT_THAT(Refusal({coordinator[0], coordinator[1], "--etcd-endpoints=e1:2379", "--etcd-lease-ms=1500"}),
              HasSubstr("--etcd-lease-ms: expected whole seconds, got \"1500\""));
  EXPECT_THAT(Refusal({coordinator[0], coordinator[1], "--etcd-endpoints=e1:2379", "--data-dir=d"}),
              HasSubstr("either etcd_endpoints or data_dir"));
}

TEST_F(ConfigTest, HelpNamesEveryOptionWithItsDefault) {
  const std::string help = ServerHelp();
  for (const OptionCase& option : Cases()) EXPECT_THAT(help, HasSubstr("\n  " + Flag(option.name, "")));
  for (const char* line :
       {"\nMemory\n", "\n  --role=all|shard|coordinator  default all\n", "\n  --shards=ADDRESS,...  default none\n",
        "\n  --listen=ADDRESS,...  default 127.0.0.1:7070\n", "\n  --memory-limit=BYTES  default 8 GiB\n",
        "\n  --device-plane-bytes=BYTES  default 0\n", "\n  --slow-worker-ms=MILLISECONDS  default 30 s\n",
        "\n  --snapshot-interval-steps=STEPS  default 1000\n", "\n  --trace-ratio=FRACTION  default 0.01\n"}) {
    EXPECT_THAT(help, HasSubstr(line));
  }
  for (absl::string_view line : absl::StrSplit(help, '\n')) EXPECT_LE(line.size(), 110) << line;
}

TEST_F(ConfigTest, TheProcessEnvironmentIsOfOurPrefixOnly) {
  for (const auto& [name, value] : ProcessEnvironment()) EXPECT_THAT(name, ::testing::StartsWith("PRECONDOR_"));
  ASSERT_EQ(setenv("PRECONDOR_THREADS", "a=b", 1), 0);
  const Environment environment = ProcessEnvironment();
  unsetenv("PRECONDOR_THREADS");
  EXPECT_EQ(environment.count("PATH"), 0u);
  EXPECT_EQ(environment.at("PRECONDOR_THREADS"), "a=b");
}

}  // namespace
}  // namespace precondor
