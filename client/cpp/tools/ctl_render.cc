// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/tools/ctl_render.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/generated_enum_reflection.h>
#include <google/protobuf/message.h>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include <nlohmann/json.hpp>

#include "kernels/base/check.h"
#include "kernels/base/printable.h"
#include "kernels/base/session_spec.h"

namespace precondor {
namespace {

using nlohmann::json;

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

// Returns an enumerator's name in lower case without the prefix of its type: "ROLE_SHARD" gives "shard". Returns "-"
// for the enumerator that means nothing.
std::string EnumeratorText(const google::protobuf::EnumValueDescriptor& value) {
  const size_t prefix = value.type()->value(0)->name().size() - absl::string_view("UNSPECIFIED").size();
  return value.number() == 0 ? "-" : absl::AsciiStrToLower(value.name().substr(prefix));
}
template <typename Enum>
std::string EnumeratorText(Enum value) {
  const auto* const known = google::protobuf::GetEnumDescriptor<Enum>()->FindValueByNumber(value);
  return known == nullptr ? absl::StrCat(static_cast<int>(value)) : EnumeratorText(*known);
}

// Returns one value of a field: of the element `index` if the field is repeated.
json FieldJson(const Message& message, const FieldDescriptor& field, int index) {
  const Reflection& get = *message.GetReflection();
  const bool repeated = field.is_repeated();
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_UINT32:
      return repeated ? get.GetRepeatedUInt32(message, &field, index) : get.GetUInt32(message, &field);
    case FieldDescriptor::CPPTYPE_UINT64:
      return repeated ? get.GetRepeatedUInt64(message, &field, index) : get.GetUInt64(message, &field);
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return repeated ? get.GetRepeatedDouble(message, &field, index) : get.GetDouble(message, &field);
    case FieldDescriptor::CPPTYPE_BOOL:
      return repeated ? get.GetRepeatedBool(message, &field, index) : get.GetBool(message, &field);
    case FieldDescriptor::CPPTYPE_STRING:
      return repeated ? get.GetRepeatedString(message, &field, index) : get.GetString(message, &field);
    case FieldDescriptor::CPPTYPE_ENUM:
      return EnumeratorText(repeated ? *get.GetRepeatedEnum(message, &field, index) : *get.GetEnum(message, &field));
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return MessageJson(repeated ? get.GetRepeatedMessage(message, &field, index) : get.GetMessage(message, &field));
    default:
      PRECONDOR_CHECK(false);
  }
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

json MessageJson(const Message& message) {
  json document = json::object();
  for (int f = 0; f < message.GetDescriptor()->field_count(); ++f) {
    const FieldDescriptor& field = *message.GetDescriptor()->field(f);
    if (field.type() == FieldDescriptor::TYPE_BYTES) continue;
    json& value = document[field.name()];
    if (!field.is_repeated()) {
      value = FieldJson(message, field, 0);
      continue;
    }
    value = json::array();
    const int size = message.GetReflection()->FieldSize(message, &field);
    for (int i = 0; i < size; ++i) value.push_back(FieldJson(message, field, i));
  }
  return document;
}

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
    list.push_back(MessageJson(server.info));
    list.back()["address"] = server.address;
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
    rows.push_back({server.address, EnumeratorText(info.role()), info.version(), Uptime(info.uptime_seconds()),
                    info.backend().empty() ? "-" : info.backend(),
                    has_memory ? FormatBytes(info.reserved_bytes()) : "-",
                    has_memory ? FormatBytes(info.capacity_bytes()) : "-", absl::StrCat(info.sessions()),
                    info.draining() ? "draining"
                    : any_lost      ? "device lost"
                                    : "serving"});
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
                    {"exchange", EnumeratorText(spec.exchange())},
                    {"statistics", EnumeratorText(spec.statistics())},
                    {"layers", spec.layers_size()},
                    {"world_size", spec.world_size()},
                    {"joined", session.joined()},
                    {"epoch", session.epoch()},
                    {"last_step", session.last_step()},
                    {"mode", EnumeratorText(session.mode())},
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
                    absl::StrCat(session.last_step()), EnumeratorText(session.mode()),
                    absl::StrFormat("%.6g", session.loss()),
                    session.reserved_bytes() == 0 ? "-" : FormatBytes(session.reserved_bytes()),  // shards know them
                    absl::StrCat(session.shard_map().assignments_size())});
  }
  return FormatTable(rows);
}

json ModeJson(absl::string_view session, const v1::ModeStatus& status) {
  json document = MessageJson(status);
  document["session"] = session;
  if (status.forced() == v1::MODE_UNSPECIFIED) document["forced"] = nullptr;
  return document;
}

std::string ModeTable(absl::string_view session, const v1::ModeStatus& status) {
  std::string text = absl::StrCat(session, ": ", EnumeratorText(status.mode()), " at step ", status.step(), ", ",
                                  status.forced() == v1::MODE_UNSPECIFIED ? "by policy" : "by an operator", "\n",
                                  status.rule(), ": ", status.reason(), "\n\n");
  std::vector<std::vector<std::string>> rows = {{"FROM STEP", "MODE"}};
  for (const v1::ModeInterval& interval : status.schedule()) {
    rows.push_back({absl::StrCat(interval.first_step()), EnumeratorText(interval.mode())});
  }
  return absl::StrCat(text, FormatTable(rows));
}

json SnapshotsJson(const std::vector<v1::SessionSnapshot>& sessions, const std::vector<ShardSnapshot>& parts) {
  json whole = json::array();
  for (const v1::SessionSnapshot& snapshot : sessions) {
    whole.push_back(MessageJson(snapshot));
    whole.back()["shards"] = std::move(whole.back()["parts"]);
    whole.back().erase("parts");
  }
  json list = json::array();
  for (const ShardSnapshot& part : parts) {
    list.push_back(MessageJson(part.info));
    list.back()["shard"] = part.address;
    if (!part.state.empty()) list.back()["state"] = part.state;
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
                       absl::StrCat(snapshot.epoch()), EnumeratorText(snapshot.state()),
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
  for (const v1::LayerStats& layer : layers) list.push_back(MessageJson(layer));
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
