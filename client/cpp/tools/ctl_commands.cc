// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/tools/ctl_commands.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <future>
#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/impl/codegen/proto_utils.h>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include <google/protobuf/wrappers.pb.h>
#include <nlohmann/json.hpp>

#include "client/cpp/src/control.h"
#include "client/cpp/tools/ctl_render.h"
#include "client/cpp/tools/flags.h"
#include "client/cpp/tools/plan.h"
#include "client/cpp/tools/plan_command.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/unix_address.h"
#include "proto/wire/channel.h"
#include "proto/wire/status_codec.h"

namespace precondor {
namespace {

std::string Dump(const nlohmann::json& document) {
  // Names come from peers: bytes that are not UTF-8 are replaced rather than refused, and what a terminal would obey is
  // escaped, with all that is not ASCII.
  return document.dump(2, ' ', /*ensure_ascii=*/true, nlohmann::json::error_handler_t::replace) + "\n";
}

// Waits until the server at this address answers.
absl::StatusOr<v1::GetServerInfoResponse> GetInfo(const CtlOptions& options, const std::string& address) {
  ControlClient server(address, options.timeout, options.security);
  Canceller canceller;
  return server.WaitForServer(options.timeout, canceller);
}

// Waits until the server at this address answers, and then makes the call.
template <typename Response, typename Request>
absl::StatusOr<Response> Ask(const CtlOptions& options, const std::string& address, const Request& request) {
  ControlClient server(address, options.timeout, options.security);
  Canceller canceller;
  PRECONDOR_RETURN_IF_ERROR(server.WaitForServer(options.timeout, canceller).status());
  return server.Call<Response>(request, canceller);
}

absl::StatusOr<CtlOutput> RunStatus(const CtlOptions& options) {
  PRECONDOR_ASSIGN_OR_RETURN(v1::GetServerInfoResponse info, GetInfo(options, options.server));
  std::vector<ServerStatus> servers = {{options.server, info, ""}};
  CtlOutput output;
  if (info.role() == v1::ROLE_COORDINATOR) {
    for (const std::string& address : info.shards()) {
      const auto shard_info = GetInfo(options, address);
      output.ok &= shard_info.ok();
      servers.push_back({address, shard_info.ok() ? *shard_info : v1::GetServerInfoResponse(),
                         shard_info.ok() ? "" : std::string(shard_info.status().message())});
    }
  }
  output.text = options.json ? Dump(StatusJson(servers)) : StatusTable(servers);
  return output;
}

absl::StatusOr<CtlOutput> RunSessions(const CtlOptions& options) {
  PRECONDOR_ASSIGN_OR_RETURN(const auto response,
                             Ask<v1::ListSessionsResponse>(options, options.server, v1::ListSessionsRequest()));
  return CtlOutput{options.json ? Dump(SessionsJson(response)) : SessionsTable(response), true};
}

absl::StatusOr<CtlOutput> RunSession(const CtlOptions& options) {
  v1::CloseSessionRequest request;
  request.set_name(options.argument);
  PRECONDOR_ASSIGN_OR_RETURN(const auto closed, Ask<v1::CloseSessionResponse>(options, options.server, request));
  if (!closed.existed()) {
    return absl::NotFoundError(
        absl::StrCat("server ", options.server, ": no session ", options.argument, ", or no longer"));
  }
  return CtlOutput{options.json ? Dump({{"closed", options.argument}}) : absl::StrCat(options.argument, ": closed\n"),
                   true};
}

// Shows the layers of a session. A coordinator owns no layers, so this asks its shards.
absl::StatusOr<CtlOutput> RunLayers(const CtlOptions& options) {
  PRECONDOR_ASSIGN_OR_RETURN(const v1::GetServerInfoResponse info, GetInfo(options, options.server));
  std::vector<std::string> shards = {options.server};
  if (info.role() == v1::ROLE_COORDINATOR) {
    PRECONDOR_ASSIGN_OR_RETURN(const auto sessions,
                               Ask<v1::ListSessionsResponse>(options, options.server, v1::ListSessionsRequest()));
    const auto found = std::find_if(sessions.sessions().begin(), sessions.sessions().end(),
                                    [&](const v1::SessionSummary& s) { return s.spec().name() == options.argument; });
    if (found == sessions.sessions().end()) {
      return absl::NotFoundError(absl::StrCat("server ", options.server, ": no session ", options.argument));
    }
    shards.clear();
    for (const v1::ShardAssignment& assignment : found->shard_map().assignments()) {
      shards.push_back(assignment.address());
    }
  }
  v1::GetLayerStatsRequest request;
  request.set_session(options.argument);
  std::vector<v1::LayerStats> layers;
  for (const std::string& address : shards) {
    PRECONDOR_ASSIGN_OR_RETURN(const auto response, Ask<v1::GetLayerStatsResponse>(options, address, request));
    layers.insert(layers.end(), response.layers().begin(), response.layers().end());
  }
  std::sort(layers.begin(), layers.end(),
            [](const v1::LayerStats& x, const v1::LayerStats& y) { return x.layer() < y.layer(); });
  return CtlOutput{options.json ? Dump(LayersJson(options.argument, layers)) : LayersTable(layers), true};
}

absl::StatusOr<CtlOutput> RunMode(const CtlOptions& options) {
  v1::ModeStatus status;
  if (options.mode.empty()) {
    v1::GetModeRequest request;
    request.set_session(options.argument);
    PRECONDOR_ASSIGN_OR_RETURN(auto response, Ask<v1::GetModeResponse>(options, options.server, request));
    status = std::move(*response.mutable_status());
  } else {
    v1::SetModeRequest request;
    request.set_session(options.argument);
    if (options.mode == "second-order") request.set_mode(v1::MODE_SECOND_ORDER);
    if (options.mode == "first-order") request.set_mode(v1::MODE_FIRST_ORDER);
    PRECONDOR_ASSIGN_OR_RETURN(auto response, Ask<v1::SetModeResponse>(options, options.server, request));
    status = std::move(*response.mutable_status());
  }
  return CtlOutput{options.json ? Dump(ModeJson(options.argument, status)) : ModeTable(options.argument, status), true};
}

absl::StatusOr<CtlOutput> RunCreate(const CtlOptions& options) {
  v1::CreateSnapshotRequest request;
  request.set_session(options.argument);
  PRECONDOR_ASSIGN_OR_RETURN(const auto begun, Ask<v1::CreateSnapshotResponse>(options, options.server, request));
  if (options.json) {
    return CtlOutput{
        Dump({{"session", options.argument}, {"snapshot_id", begun.snapshot_id()}, {"step", begun.step()}}), true};
  }
  return CtlOutput{absl::StrCat(options.argument, ": snapshot ", begun.snapshot_id(), " as of step ", begun.step(),
                                ", once the job has come to it; snapshot list tells what became of it\n"),
                   true};
}

absl::StatusOr<CtlOutput> RunSnapshots(const CtlOptions& options) {
  const bool verifies = options.command->action == "verify";
  PRECONDOR_ASSIGN_OR_RETURN(const v1::GetServerInfoResponse info, GetInfo(options, options.server));
  std::vector<std::string> shards = {options.server};
  if (info.role() == v1::ROLE_COORDINATOR) shards.assign(info.shards().begin(), info.shards().end());
  Canceller canceller;
  CtlOutput output;
  std::vector<v1::SessionSnapshot> sessions;
  if (info.role() != v1::ROLE_SHARD && !verifies) {
    PRECONDOR_ASSIGN_OR_RETURN(const auto listed,
                               Ask<v1::ListSnapshotsResponse>(options, options.server, v1::ListSnapshotsRequest()));
    for (const v1::SessionSnapshot& snapshot : listed.session_snapshots()) {
      if (options.argument.empty() || snapshot.session() == options.argument) sessions.push_back(snapshot);
    }
  }
  std::vector<ShardSnapshot> rows;
  for (const std::string& address : shards) {
    ControlClient shard(address, options.timeout, options.security);
    PRECONDOR_ASSIGN_OR_RETURN(const auto listed,
                               shard.Call<v1::ListSnapshotsResponse>(v1::ListSnapshotsRequest(), canceller));
    for (const v1::SnapshotInfo& found : listed.snapshots()) {
      if (!options.argument.empty() && found.session() != options.argument) continue;
      ShardSnapshot row{address, found, ""};
      if (verifies) {
        v1::VerifySnapshotRequest request;
        request.set_session_id(found.session_id());
        request.set_snapshot_id(found.snapshot_id());
        const absl::Status verified = shard.Call<v1::VerifySnapshotResponse>(request, canceller).status();
        row.state = verified.ok() ? "whole" : std::string(verified.message());
        output.ok &= verified.ok();
      }
      rows.push_back(std::move(row));
    }
  }
  // A wrong name, or shards without a directory, must not look like snapshots that are whole.
  if (rows.empty() && sessions.empty() && (verifies || !options.argument.empty())) {
    return absl::NotFoundError(absl::StrCat("server ", options.server, ": no snapshot",
                                            options.argument.empty() ? "" : " of session ", options.argument));
  }
  output.text = options.json ? Dump(SnapshotsJson(sessions, rows)) : SnapshotsTable(sessions, rows);
  return output;
}

const char* HealthName(int32_t status) {
  constexpr const char* kNames[] = {"UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN"};
  return kNames[status > 0 && status <= 3 ? status : 0];
}

// HealthCheckRequest and HealthCheckResponse have the wire format of the well-known wrappers: one field, number 1.
absl::StatusOr<CtlOutput> RunHealth(const CtlOptions& options) {
  using Stub = grpc::TemplatedGenericStub<google::protobuf::StringValue, google::protobuf::Int32Value>;
  ControlClient server(options.server, options.timeout, options.security);
  const wire::ChannelSecurity& security = *server.security();
  PRECONDOR_RETURN_IF_ERROR(security.status());
  const auto channel = MakeChannel(options.server, security);
  Stub stub(channel);
  grpc::ClientContext context;
  context.set_deadline(wire::GrpcDeadline(options.timeout));
  context.set_wait_for_ready(true);
  google::protobuf::StringValue request;
  request.set_value(options.argument);
  google::protobuf::Int32Value response;
  std::promise<grpc::Status> done;
  stub.UnaryCall(&context, "/grpc.health.v1.Health/Check", {}, &request, &response,
                 [&done](grpc::Status status) { done.set_value(std::move(status)); });
  const absl::Status status = wire::FromGrpcStatus(done.get_future().get());
  if (status.code() == absl::StatusCode::kDeadlineExceeded) {
    // Another call says why. It needs credentials, which a probe has not, but connections fail for both.
    Canceller canceller;
    const absl::Status why = server.WaitForServer(absl::Milliseconds(100), canceller).status();
    return absl::UnavailableError(absl::StrCat("server ", options.server, ": no answer within ",
                                               absl::FormatDuration(options.timeout), why.ok() ? "" : ": ",
                                               why.ok() ? "" : why.message()));
  }
  // NOT_FOUND is how the protocol says that the server does not know the service.
  if (!status.ok() && status.code() != absl::StatusCode::kNotFound) return status;
  const char* name = HealthName(status.ok() ? response.value() : 3);
  CtlOutput output;
  output.ok = status.ok() && response.value() == 1;
  output.text = options.json ? Dump({{"server", options.server}, {"service", options.argument}, {"status", name}})
                             : absl::StrCat(name, "\n");
  return output;
}

absl::StatusOr<CtlOutput> RunDrain(const CtlOptions& options) {
  v1::DrainRequest request;
  request.set_deadline_ms(
      static_cast<uint32_t>(std::min<int64_t>(absl::ToInt64Milliseconds(options.drain_deadline), int64_t{UINT32_MAX})));
  PRECONDOR_ASSIGN_OR_RETURN(const auto response, Ask<v1::DrainResponse>(options, options.server, request));
  return CtlOutput{options.json ? Dump({{"server", options.server}, {"in_flight", response.in_flight()}})
                                : absl::StrCat("draining ", options.server, ": ", response.in_flight(),
                                               " contributions in flight\n"),
                   true};
}

absl::StatusOr<CtlOutput> RunPlan(const CtlOptions& options) {
  PRECONDOR_ASSIGN_OR_RETURN(const ModelShapes model, PlanShapes(options.plan));
  PlanInput input = options.plan.input;
  PRECONDOR_ASSIGN_OR_RETURN(input.spec.layers, ExpandLayers(model, options.plan.expand));
  PRECONDOR_ASSIGN_OR_RETURN(const Plan plan, MakePlan(input));
  return CtlOutput{options.json ? Dump(PlanJson(model, input, plan)) : PlanTable(model, input, plan), plan.fits};
}

absl::StatusOr<CtlOutput> RunHelp(const CtlOptions&) { return CtlOutput{absl::StrCat(CtlHelp(), PlanHelp()), true}; }

constexpr CtlCommand kCommands[] = {
    {"status", "", "",
     "The command shows version, role, memory and sessions of a server, and of a coordinator's shards.", RunStatus},
    {"sessions", "", "", "The command lists the sessions of a server.", RunSessions},
    {"session", "close", "SESSION", "The coordinator ends a session. Its factors are deleted, and its workers fail.",
     RunSession},
    {"layers", "", "SESSION",
     "The command shows counters and factor state of each layer. A coordinator asks all its shards.", RunLayers},
    {"mode", "", "SESSION [second-order|first-order|auto]",
     "The command shows the mode of the steps and its reason, or sets it. auto returns the choice to the policy.",
     RunMode},
    {"snapshot", "create", "SESSION",
     "All shards write a snapshot at one step, which the coordinator chooses shortly ahead of the job.", RunCreate},
    {"snapshot", "list", "[SESSION]", "The command lists the snapshots of whole sessions and those of each shard.",
     RunSnapshots},
    {"snapshot", "verify", "[SESSION]", "The command lists the snapshots after a shard has read every byte of them.",
     RunSnapshots},
    {"snapshot", "restore", "SESSION",
     "The coordinator opens a session with the factors of a snapshot, on its present shards. The job then begins\n"
     "      with the step of the snapshot.",
     RunRestore},
    {"health", "", "[SERVICE]", "The command asks grpc.health.v1. It fails unless the answer is SERVING.", RunHealth},
    {"drain", "", "", "The server takes no new sessions, finishes the work in flight, and ends.", RunDrain},
    {"plan", "", "",
     "The command computes memory, bytes and seconds a step of a session, and the number of shards that it needs.",
     RunPlan},
    {"help", "", "", "The command prints this text.", RunHelp},
};

constexpr std::array<absl::string_view, 3> kModes = {"second-order", "first-order", "auto"};

// Returns the commands' first words, or the second words of the commands with the first word `name`.
std::string Expected(absl::string_view name = "") {
  std::vector<absl::string_view> words;
  for (const CtlCommand& command : CtlCommands()) {
    const absl::string_view word = name.empty() ? command.name : command.action;
    if ((name.empty() || command.name == name) && (words.empty() || words.back() != word)) words.push_back(word);
  }
  return absl::StrJoin(words, ", ");
}

constexpr char kDuration[] = "a duration such as 10s or 500ms";
constexpr char kRestore[] = "command snapshot restore";

FlagSetter Positive(absl::Duration& out) {
  return [&out](absl::string_view text) { return absl::ParseDuration(text, &out) && out > absl::ZeroDuration(); };
}

FlagSetter Given(bool& out) {
  return [&out](absl::string_view) { return out = true; };
}

std::vector<Flag> CtlFlags(CtlOptions& o) {
  const auto server = [&o](absl::string_view v) { return Text(o.server)(v) && CheckServerAddress(v).ok(); };
  const auto add_path = [&o](absl::string_view v) { return !o.snapshot_paths.emplace_back(v).empty(); };
  std::vector<Flag> flags = {
      {"server", server, "host:port or unix:/path/to/socket"},
      {"tls-ca", Text(o.security.tls_ca)},
      {"tls-cert", Text(o.security.tls_cert)},
      {"tls-key", Text(o.security.tls_key)},
      {"token-file", Text(o.security.token_file)},
      {"timeout", Positive(o.timeout), kDuration},
      {"json", Given(o.json), "", "", /*takes_value=*/false},
      {"deadline", Positive(o.drain_deadline), kDuration, "command drain"},
      {"snapshot-path", add_path, "a directory", kRestore},
      {"snapshot", Integer(o.snapshot, 1, INT64_MAX), "the number of a snapshot as snapshot list shows it", kRestore},
      {"world-size", Integer(o.world_size, 1, kMaxWorldSize), absl::StrCat("a number of ranks, 1 ... ", kMaxWorldSize),
       kRestore},
      {"replace", Given(o.replace), "", kRestore, /*takes_value=*/false},
  };
  for (Flag& flag : PlanFlags(o.plan)) flags.push_back(std::move(flag));
  return flags;
}

absl::Status CheckSecurity(const ClientSecurity& files) {
  if (files.tls_cert.empty() != files.tls_key.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(files.tls_cert.empty() ? "--tls-key" : "--tls-cert", ": expected ",
                                                   files.tls_cert.empty() ? "--tls-cert" : "--tls-key",
                                                   " beside it, got none"));
  }
  if (!files.tls_ca.empty() || (files.tls_cert.empty() && files.token_file.empty())) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(files.token_file.empty() ? "--tls-cert" : "--token-file",
                                                 ": expected --tls-ca beside it, got none"));
}

absl::StatusOr<const CtlCommand*> FindCommand(const std::vector<std::string>& words) {
  if (words.empty()) return absl::InvalidArgumentError(absl::StrCat("expected a command: ", Expected()));
  const std::string action = words.size() > 1 ? words[1] : "";
  bool known = false;
  for (const CtlCommand& command : CtlCommands()) {
    if (command.name != words[0]) continue;
    if (command.action.empty() || command.action == action) return &command;
    known = true;
  }
  return absl::InvalidArgumentError(
      known ? absl::StrCat(words[0], ": expected ", Expected(words[0]), ", got \"", action, "\"")
            : absl::StrCat("expected ", Expected(), ", got \"", words[0], "\""));
}

absl::Status CheckCommand(const std::vector<std::string>& words, CtlOptions& options) {
  PRECONDOR_ASSIGN_OR_RETURN(options.command, FindCommand(words));
  const CtlCommand& command = *options.command;
  const size_t own = command.action.empty() ? 1 : 2;
  const std::vector<absl::string_view> expected = absl::StrSplit(command.arguments, ' ', absl::SkipEmpty());
  if (words.size() == own && !expected.empty() && expected[0][0] != '[') {
    return absl::InvalidArgumentError(absl::StrCat(command.name, command.action.empty() ? "" : " ", command.action,
                                                   ": expected the name of a session"));
  }
  if (words.size() > own + expected.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat(command.name, ": unexpected argument \"", words[own + expected.size()], "\""));
  }
  if (words.size() > own) options.argument = words[own];
  if (words.size() <= own + 1) return absl::OkStatus();
  options.mode = words[own + 1];
  if (std::find(kModes.begin(), kModes.end(), options.mode) != kModes.end()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("mode: expected ", absl::StrJoin(kModes, ", "), ", got \"", options.mode, "\""));
}

}  // namespace

absl::Span<const CtlCommand> CtlCommands() { return kCommands; }

absl::StatusOr<CtlOutput> RunCtlCommand(const CtlOptions& options) { return options.command->run(options); }

absl::StatusOr<CtlOptions> ParseCtlOptions(const std::vector<std::string>& arguments) {
  CtlOptions options;
  PRECONDOR_ASSIGN_OR_RETURN(const ParsedOptions flags, ParseFlags(arguments, CtlFlags(options), /*takes_words=*/true));
  PRECONDOR_RETURN_IF_ERROR(CheckCommand(flags.help ? std::vector<std::string>{"help"} : flags.words, options));
  if (flags.help) return options;
  const CtlCommand& command = *options.command;
  PRECONDOR_RETURN_IF_ERROR(
      flags.CheckCommand(absl::StrCat("command ", command.name, command.action.empty() ? "" : " ", command.action)));
  PRECONDOR_RETURN_IF_ERROR(CheckSecurity(options.security));
  if (command.action == "restore" && options.snapshot_paths.empty()) {
    return absl::InvalidArgumentError("snapshot restore: expected --snapshot-path, a data directory of each shard");
  }
  if (command.name == "plan") PRECONDOR_RETURN_IF_ERROR(CheckPlan(options.plan));
  return options;
}

std::string CtlHelp() {
  std::string commands;
  for (const CtlCommand& command : CtlCommands()) {
    absl::StrAppend(&commands, "  ", command.name, command.action.empty() ? "" : " ", command.action,
                    command.arguments.empty() ? "" : " ", command.arguments, "\n      ", command.help, "\n");
  }
  return absl::StrCat(
      "precondorctl: asks and steers running servers.\n\nUsage: precondorctl [FLAGS] COMMAND\n\nCommands\n", commands,
      R"(
Connection
  --server=ADDRESS  default 127.0.0.1:7070
      The command asks the server at host:port or unix:/path/to/socket.
  --tls-ca=FILE  default none
      The server's certificate needs the signature of an authority in this file. Without it, the connection is plaintext.
  --tls-cert=FILE  default none
      The command shows this certificate to a server that asks for one.
  --tls-key=FILE  default none
      This file has the private key of --tls-cert.
  --token-file=FILE  default none
      Every call carries the bearer token in this file. The flag needs --tls-ca.
  --timeout=DURATION  default 10 s
      A call fails after this time, such as 500ms or 10s.

Commands' own flags
  --deadline=DURATION  default the server's --drain-deadline-ms
      A drain waits this long for work in flight.
  --snapshot-path=DIR  default none
      A restore reads this data directory of a shard, or a copy of it. Give the flag once for each shard.
  --snapshot=ID  default the newest
      A restore reads the snapshot with this number, which snapshot list shows.
  --world-size=N  default that of the snapshot
      The restored job has this many ranks.
  --replace
      A restore first closes a session of this name. The factors of that session are deleted.

Output
  --json
      The command prints one JSON document, and no table.
  --help
      The command prints this text.

Exit status: 0 done; 1 no answer, a refusal or an unhealthy server; 2 wrong usage.

Examples
  precondorctl --server=coordinator:7070 status
  precondorctl layers bert --json | jq '.layers[] | select(.rejected > 0)'
  precondorctl --server=coordinator:7070 mode bert first-order
  precondorctl --server=shard-3:7070 health && echo ready
  precondorctl --server=shard-3:7070 drain --deadline=30s
  precondorctl snapshot restore bert --snapshot-path=/backup/shard-0 --snapshot-path=/backup/shard-1
)");
}

}  // namespace precondor
