// SPDX-License-Identifier: Apache-2.0
// Renders answers of AdminService as tables for people and as JSON for programs. Pure functions.
#pragma once

#include <google/protobuf/message.h>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include <nlohmann/json_fwd.hpp>

#include "precondor/v1/admin.pb.h"
#include "precondor/v1/snapshot.pb.h"

namespace precondor {

// A server's address, and its answer or the reason why it gave none.
struct ServerStatus {
  std::string address;
  v1::GetServerInfoResponse info;
  std::string error;  // empty if `info` is valid
};

// A shard's snapshot.
struct ShardSnapshot {
  std::string address;
  v1::SnapshotInfo info;
  std::string state;  // "whole", or the problem; empty if not verified
};

// Renders all fields but bytes by their names, enumerators in lower case without the prefix of their type.
nlohmann::json MessageJson(const google::protobuf::Message& message);

nlohmann::json StatusJson(const std::vector<ServerStatus>& servers);
nlohmann::json SessionsJson(const v1::ListSessionsResponse& response);
nlohmann::json ModeJson(absl::string_view session, const v1::ModeStatus& status);
nlohmann::json LayersJson(absl::string_view session, const std::vector<v1::LayerStats>& layers);
// Renders the snapshots of whole sessions, which a coordinator lists, and the parts on the shards.
nlohmann::json SnapshotsJson(const std::vector<v1::SessionSnapshot>& sessions, const std::vector<ShardSnapshot>& parts);

std::string StatusTable(const std::vector<ServerStatus>& servers);
std::string SessionsTable(const v1::ListSessionsResponse& response);
std::string ModeTable(absl::string_view session, const v1::ModeStatus& status);
std::string LayersTable(const std::vector<v1::LayerStats>& layers);
std::string SnapshotsTable(const std::vector<v1::SessionSnapshot>& sessions, const std::vector<ShardSnapshot>& parts);

// Returns a table. Columns are padded to their widest cell and two spaces apart; no line ends with spaces. The first
// row is the heading. A column whose cells below the heading are all numbers is aligned to the right.
std::string FormatTable(std::vector<std::vector<std::string>> rows);

// Returns text like "1.5 GiB" or "640 B".
std::string FormatBytes(uint64_t bytes);

}  // namespace precondor
