// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/tools/ctl_render.h"

#include <algorithm>
#include <array>
#include <cstdint>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include <nlohmann/json.hpp>

#include "kernels/base/printable.h"
#include "kernels/base/session_spec.h"

namespace precondor {
namespace {

using nlohmann::json;

// Returns an enumerator's name in lower case without the prefix of its type: "ROLE_SHARD" gives "shard".
std::string ShortName(absl::string_view full, absl::string_view prefix) {
  return absl::AsciiStrToLower(full.substr(prefix.size()));
}

std::string RoleName(v1::Role role) { return ShortName(v1::Role_Name(role), "ROLE_"); }

std::string ModeText(v1::Mode mode) {
  return mode == v1::MODE_UNSPECIFIED ? "-" : ShortName(v1::Mode_Name(mode), "MODE_");
}

std::string SnapshotStateName(v1::SnapshotState state) {
  return ShortName(v1::SnapshotState_Name(state), "SNAPSHOT_STATE_");
}

std::string MethodName(const v1::SessionSpec& spec) {
  const v1::MethodConfig& method = spec.method();
  if (method.method_case() == v1::MethodConfig::METHOD_NOT_SET) return MethodConfig().name;
  return v1::MethodConfig::descriptor()->FindFieldByNumber(method.method_case())->name();
}

std::string Uptime(double seconds) { return absl::FormatDuration(absl::Seconds(static_cast<int64_t>(seconds))); }

std::string Representation(const std::string& name, uint32_t rank) {
  return rank > 0 ? absl::StrCat(name, "(", rank, ")") : name;
}

}  // namespace

std::string FormatBytes(uint64_t bytes) {
  constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  return unit == 0 ? absl::StrCat(bytes, " B") : absl::StrFormat("%.1f %s", value, kUnits[unit]);
}

std::string FormatTable(std::vector<std::vector<std::string>> rows) {
  for (std::vector<std::string>& row : rows) {
    for (std::string& cell : row) cell = Printable(cell);
  }
  std::vector<size_t> widths;
  std::vector<bool> numeric;
  for (size_t r = 0; r < rows.size(); ++r) {
    widths.resize(std::max(widths.size(), rows[r].size()), 0);
    numeric.resize(widths.size(), rows.size() > 1);
    for (size_t c = 0; c < rows[r].size(); ++c) {
      widths[c] = std::max(widths[c], rows[r][c].size());
      double value = 0;
      if (r > 0 && rows[r][c] != "-" && !absl::SimpleAtod(rows[r][c], &value)) numeric[c] = false;
    }
  }
  std::string out;
  for (const std::vector<std::string>& row : rows) {
    std::string line;
    for (size_t c = 0; c < row.size(); ++c) {
      const std::string padding(widths[c] - row[c].size(), ' ');
      absl::StrAppend(&line, c == 0 ? "" : "  ", numeric[c] ? padding : "", row[c], numeric[c] ? "" : padding);
    }
    absl::StripTrailingAsciiWhitespace(&line);
    absl::StrAppend(&out, line, "\n");
  }
  return out;
}

json StatusJson(const std::vector<ServerStatus>& servers) {
  json list = json::array();
  for (const ServerStatus& server : servers) {
    if (!server.error.empty()) {
      list.push_back({{"address", server.address}, {"error", server.error}});
      continue;
    }
    const v1::GetServerInfoResponse& info = server.info;
    json devices = json::array();
    for (const v1::DeviceMemory& device : info.devices()) {
      devices.push_back({{"name", device.name()},
                         {"capacity_bytes", device.capacity_bytes()},
                         {"reserved_bytes", device.reserved_bytes()},
                         {"fault", device.fault()}});
    }
    list.push_back({{"address", server.address},
                    {"version", info.version()},
                    {"role", RoleName(info.role())},
                    {"uptime_seconds", info.uptime_seconds()},
                    {"backend", info.backend()},
                    {"capacity_bytes", info.capacity_bytes()},
                    {"reserved_bytes", info.reserved_bytes()},
                    {"devices", devices},
                    {"sessions", info.sessions()},
                    {"draining", info.draining()},
                    {"shards", std::vector<std::string>(info.shards().begin(), info.shards().end())}});
  }
  return {{"servers", list}};
}

std::string StatusTable(const std::vector<ServerStatus>& servers) {
  std::vector<std::vector<std::string>> rows = {
      {"ADDRESS", "ROLE", "VERSION", "UPTIME", "BACKEND", "RESERVED", "CAPACITY", "SESSIONS", "STATE"}};
  for (const ServerStatus& server : servers) {
    if (!server.error.empty()) {
      rows.push_back({server.address, "-", "-", "-", "-", "-", "-", "-", server.error});
      continue;
    }
    const v1::GetServerInfoResponse& info = server.info;
    const bool has_memory = info.capacity_bytes() > 0;
    const bool any_lost = std::any_of(info.devices().begin(), info.devices().end(),
                                      [](const v1::DeviceMemory& device) { return !device.fault().empty(); });
    rows.push_back({server.address, RoleName(info.role()), info.version(), Uptime(info.uptime_seconds()),
                    info.backend().empty() ? "-" : info.backend(),
                    has_memory ? FormatBytes(info.reserved_bytes()) : "-",
                    has_memory ? FormatBytes(info.capacity_bytes()) : "-", absl::StrCat(info.sessions()),
                    info.draining() ? "draining"
                    : any_lost      ? "device lost"
                                    : "serving"});
    // If there are several devices, each has a row; the row above has their sum.
    for (int i = 0; info.devices_size() > 1 && i < info.devices_size(); ++i) {
      const v1::DeviceMemory& device = info.devices(i);
      rows.push_back({"", "", "", "", device.name(), FormatBytes(device.reserved_bytes()),
                      FormatBytes(device.capacity_bytes()), "", device.fault().empty() ? "" : "lost"});
    }
  }
  return FormatTable(rows);
}

json SessionsJson(const v1::ListSessionsResponse& response) {
  json list = json::array();
  for (const v1::SessionSummary& session : response.sessions()) {
    const v1::SessionSpec& spec = session.spec();
    json shards = json::array();
    for (const v1::ShardAssignment& shard : session.shard_map().assignments()) {
      shards.push_back({{"address", shard.address()}, {"layers", shard.layers_size()}});
    }
    list.push_back({{"name", spec.name()},
                    {"session_id", session.session_id()},
                    {"method", MethodName(spec)},
                    {"exchange", ShortName(v1::ExchangeMode_Name(spec.exchange()), "EXCHANGE_MODE_")},
                    {"statistics", ShortName(v1::StatisticsKind_Name(spec.statistics()), "STATISTICS_KIND_")},
                    {"layers", spec.layers_size()},
                    {"world_size", spec.world_size()},
                    {"joined", session.joined()},
                    {"epoch", session.epoch()},
                    {"last_step", session.last_step()},
                    {"mode", ModeText(session.mode())},
                    {"loss", session.loss()},
                    {"reserved_bytes", session.reserved_bytes()},
                    {"shards", shards}});
  }
  return {{"sessions", list}};
}

std::string SessionsTable(const v1::ListSessionsResponse& response) {
  std::vector<std::vector<std::string>> rows = {
      {"NAME", "METHOD", "LAYERS", "WORKERS", "EPOCH", "STEP", "MODE", "LOSS", "RESERVED", "SHARDS"}};
  for (const v1::SessionSummary& session : response.sessions()) {
    rows.push_back({session.spec().name(), MethodName(session.spec()), absl::StrCat(session.spec().layers_size()),
                    absl::StrCat(session.joined(), "/", session.spec().world_size()), absl::StrCat(session.epoch()),
                    absl::StrCat(session.last_step()), ModeText(session.mode()),
                    absl::StrFormat("%.6g", session.loss()),
                    session.reserved_bytes() == 0 ? "-" : FormatBytes(session.reserved_bytes()),  // shards know them
                    absl::StrCat(session.shard_map().assignments_size())});
  }
  return FormatTable(rows);
}

json ModeJson(absl::string_view session, const v1::ModeStatus& status) {
  json schedule = json::array();
  for (const v1::ModeInterval& interval : status.schedule()) {
    schedule.push_back({{"first_step", interval.first_step()}, {"mode", ModeText(interval.mode())}});
  }
  const bool forced = status.forced() != v1::MODE_UNSPECIFIED;
  return {{"session", session},
          {"mode", ModeText(status.mode())},
          {"schedule", schedule},
          {"forced", forced ? json(ModeText(status.forced())) : json()},
          {"rule", status.rule()},
          {"reason", status.reason()},
          {"step", status.step()},
          {"loss", status.loss()},
          {"rate", status.rate()},
          {"threshold_rate", status.threshold_rate()},
          {"phase_steps", status.phase_steps()},
          {"streak_steps", status.streak_steps()},
          {"second_order_seconds", status.second_order_seconds()},
          {"first_order_seconds", status.first_order_seconds()}};
}

std::string ModeTable(absl::string_view session, const v1::ModeStatus& status) {
  std::string text = absl::StrCat(session, ": ", ModeText(status.mode()), " at step ", status.step(), ", ",
                                  status.forced() == v1::MODE_UNSPECIFIED ? "by policy" : "by an operator", "\n",
                                  status.rule(), ": ", status.reason(), "\n\n");
  std::vector<std::vector<std::string>> rows = {{"FROM STEP", "MODE"}};
  for (const v1::ModeInterval& interval : status.schedule()) {
    rows.push_back({absl::StrCat(interval.first_step()), ModeText(interval.mode())});
  }
  return absl::StrCat(text, FormatTable(rows));
}

json SnapshotsJson(const std::vector<v1::SessionSnapshot>& sessions, const std::vector<ShardSnapshot>& parts) {
  json whole = json::array();
  for (const v1::SessionSnapshot& snapshot : sessions) {
    json shards = json::array();
    for (const v1::SnapshotPart& part : snapshot.parts()) {
      shards.push_back({{"shard", part.shard()},
                        {"snapshot_id", part.snapshot_id()},
                        {"layers", std::vector<uint32_t>(part.layers().begin(), part.layers().end())}});
    }
    whole.push_back({{"session", snapshot.session()},
                     {"snapshot_id", snapshot.snapshot_id()},
                     {"step", snapshot.step()},
                     {"epoch", snapshot.epoch()},
                     {"state", SnapshotStateName(snapshot.state())},
                     {"reason", snapshot.reason()},
                     {"shards", std::move(shards)}});
  }
  json list = json::array();
  for (const ShardSnapshot& part : parts) {
    json entry = {{"shard", part.address},        {"session", part.info.session()},
                  {"step", part.info.step()},     {"snapshot_id", part.info.snapshot_id()},
                  {"layers", part.info.layers()}, {"bytes", part.info.bytes()}};
    if (!part.state.empty()) entry["state"] = part.state;
    list.push_back(std::move(entry));
  }
  return {{"session_snapshots", std::move(whole)}, {"snapshots", std::move(list)}};
}

std::string SnapshotsTable(const std::vector<v1::SessionSnapshot>& sessions, const std::vector<ShardSnapshot>& parts) {
  std::string text;
  if (!sessions.empty()) {
    std::vector<std::vector<std::string>> whole = {{"SESSION", "ID", "STEP", "EPOCH", "STATE", "DURABLE", "REASON"}};
    for (const v1::SessionSnapshot& snapshot : sessions) {
      const auto durable = std::count_if(snapshot.parts().begin(), snapshot.parts().end(),
                                         [](const v1::SnapshotPart& part) { return part.snapshot_id() != 0; });
      whole.push_back({snapshot.session(), absl::StrCat(snapshot.snapshot_id()), absl::StrCat(snapshot.step()),
                       absl::StrCat(snapshot.epoch()), SnapshotStateName(snapshot.state()),
                       absl::StrCat(durable, "/", snapshot.parts_size(), " shards"),
                       snapshot.reason().empty() ? "-" : snapshot.reason()});
    }
    text = absl::StrCat(FormatTable(whole), "\n");
  }
  std::vector<std::vector<std::string>> rows = {{"SESSION", "STEP", "SHARD", "ID", "LAYERS", "SIZE", "STATE"}};
  for (const ShardSnapshot& part : parts) {
    const v1::SnapshotInfo& info = part.info;
    rows.push_back({info.session(), absl::StrCat(info.step()), part.address, absl::StrCat(info.snapshot_id()),
                    absl::StrCat(info.layers()), FormatBytes(info.bytes()), part.state.empty() ? "-" : part.state});
  }
  return absl::StrCat(text, FormatTable(rows));
}

json LayersJson(absl::string_view session, const std::vector<v1::LayerStats>& layers) {
  json list = json::array();
  for (const v1::LayerStats& layer : layers) {
    list.push_back({{"layer", layer.layer()},
                    {"name", layer.name()},
                    {"factor_version", layer.factor_version()},
                    {"input_representation", layer.input_representation()},
                    {"output_representation", layer.output_representation()},
                    {"input_rank", layer.input_rank()},
                    {"output_rank", layer.output_rank()},
                    {"input_damping", layer.input_damping()},
                    {"output_damping", layer.output_damping()},
                    {"failed_decompositions", layer.failed_decompositions()},
                    {"factor_resets", layer.factor_resets()},
                    {"state_bytes", layer.state_bytes()},
                    {"accepted", layer.accepted()},
                    {"duplicates", layer.duplicates()},
                    {"rejected", layer.rejected()},
                    {"preconditioned", layer.preconditioned()},
                    {"identity", layer.identity()},
                    {"skipped", layer.skipped()},
                    {"last_sealed_step", layer.last_sealed_step()},
                    {"update_seconds", layer.update_seconds()},
                    {"precondition_seconds", layer.precondition_seconds()}});
  }
  return {{"session", std::string(session)}, {"layers", list}};
}

std::string LayersTable(const std::vector<v1::LayerStats>& layers) {
  std::vector<std::vector<std::string>> rows = {{"LAYER", "NAME", "VERSION", "INPUT", "OUTPUT", "DAMPING IN/OUT",
                                                 "STATE", "ACCEPTED", "DUPLICATE", "REJECTED", "PRECOND", "IDENTITY",
                                                 "SKIPPED", "STEP", "UPDATE US", "PRECOND US"}};
  for (const v1::LayerStats& layer : layers) {
    rows.push_back({absl::StrCat(layer.layer()), layer.name(), absl::StrCat(layer.factor_version()),
                    Representation(layer.input_representation(), layer.input_rank()),
                    Representation(layer.output_representation(), layer.output_rank()),
                    absl::StrFormat("%.3g/%.3g", layer.input_damping(), layer.output_damping()),
                    FormatBytes(layer.state_bytes()), absl::StrCat(layer.accepted()), absl::StrCat(layer.duplicates()),
                    absl::StrCat(layer.rejected()), absl::StrCat(layer.preconditioned()),
                    absl::StrCat(layer.identity()), absl::StrCat(layer.skipped()),
                    absl::StrCat(layer.last_sealed_step()), absl::StrFormat("%.1f", layer.update_seconds() * 1e6),
                    absl::StrFormat("%.1f", layer.precondition_seconds() * 1e6)});
  }
  return FormatTable(rows);
}

}  // namespace precondor
