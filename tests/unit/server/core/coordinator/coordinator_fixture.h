// SPDX-License-Identifier: Apache-2.0
// A coordinator with fakes around it: shards, a journal, a clock.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"
#include "server/core/coordinator/coordinator.h"
#include "tests/support/fake_clock.h"
#include "tests/support/fake_method.h"
#include "tests/support/status_matchers.h"

namespace precondor {

// Keeps the calls to a shard, and has faults on demand.
struct FakeShard {
  static constexpr int64_t kSessionBytes = 1 << 30;

  // As a real one: refuses tokens below the greatest.
  absl::Status Admit(uint64_t token) {
    ++calls;
    if (token < leader)
      return ReasonedStatus(absl::StatusCode::kFailedPrecondition, ErrorReason::kStaleLeader, "stale");
    leader = token;
    return down ? absl::UnavailableError("down") : absl::OkStatus();
  }
  absl::StatusOr<ShardDescription> Describe() {
    ShardDescription description;
    description.advertise_address = advertise;
    description.device = {.name = "cuda:0", .capacity_bytes = capacity, .ring_device = ring_device};
    for (const auto& [id, install] : installed) {
      description.sessions.push_back({id, install.spec.name, install.epoch, kSessionBytes,
                                      static_cast<uint32_t>(install.members.size()), last_step});
      description.device.reserved_bytes += kSessionBytes;
    }
    return description;
  }
  absl::StatusOr<int64_t> Install(const SessionInstall& install) {
    // A coordinator that asks under its lock would never get here.
    last_install = install.session_id;
    if (during_install) during_install();
    if (refuse_installs) return absl::ResourceExhaustedError("full");
    quarantined.erase(install.session_id);
    installed[install.session_id] = install;
    ++installs;
    return 1;
  }
  absl::StatusOr<std::optional<uint64_t>> Fence(const EpochFence& fence) {
    fences.push_back(fence.epoch);
    return gone;
  }
  absl::StatusOr<SnapshotProgress> TakeSnapshot(const SnapshotOrder& order) {
    if (during_order) during_order();
    orders.push_back(order);
    if (!order_status.ok()) return order_status;
    return progress;
  }
  absl::StatusOr<bool> Remove(uint64_t session_id) {
    if (during_remove) PRECONDOR_RETURN_IF_ERROR(during_remove());
    ++removals;
    return installed.erase(session_id) + quarantined.erase(session_id) > 0;
  }
  absl::StatusOr<bool> Quarantine(uint64_t session_id) {
    const auto found = installed.find(session_id);
    if (found == installed.end()) return false;
    quarantined[session_id] = {.install = found->second, .last_step = 7};
    installed.erase(found);
    return true;
  }

  std::map<uint64_t, QuarantinedSession> quarantined;
  std::map<uint64_t, SessionInstall> installed;
  uint64_t last_step = 0;  // of every session
  uint64_t leader = 0;     // the greatest token
  int calls = 0;
  std::string advertise;
  std::string own;  // ShardControl::own_address
  std::string ring_device;
  int64_t capacity = int64_t{1} << 40;
  bool down = false;
  bool refuse_installs = false;
  std::function<void()> during_install;
  std::optional<uint64_t> gone;  // what Fence says
  std::vector<uint64_t> fences;  // epochs
  std::function<absl::Status()> during_remove;
  std::function<void()> during_order;
  std::vector<SnapshotOrder> orders;
  absl::Status order_status;
  SnapshotProgress progress;
  uint64_t last_install = 0;
  int installs = 0;
  int removals = 0;
};

// A coordinator's handle of a shard. The shard outlives it, and lets no coordinator in that another one has replaced.
class ShardHandle final : public ShardControl {
 public:
  explicit ShardHandle(std::shared_ptr<FakeShard> shard) : shard_(std::move(shard)) {}
  void BecomeLeader(uint64_t token) override { token_ = token; }
  std::string own_address() const override { return shard_->own; }
  absl::StatusOr<ShardDescription> Describe() override { return Call(&FakeShard::Describe); }
  absl::StatusOr<int64_t> Install(const SessionInstall& install) override { return Call(&FakeShard::Install, install); }
  absl::StatusOr<std::optional<uint64_t>> Fence(const EpochFence& fence) override {
    return Call(&FakeShard::Fence, fence);
  }
  absl::StatusOr<SnapshotProgress> TakeSnapshot(const SnapshotOrder& order) override {
    return Call(&FakeShard::TakeSnapshot, order);
  }
  absl::StatusOr<bool> Remove(uint64_t session_id) override { return Call(&FakeShard::Remove, session_id); }
  absl::StatusOr<bool> Quarantine(uint64_t session_id) override { return Call(&FakeShard::Quarantine, session_id); }

 private:
  template <typename Function, typename... Arguments>
  std::invoke_result_t<Function, FakeShard&, const Arguments&...> Call(Function function,
                                                                       const Arguments&... arguments) {
    PRECONDOR_RETURN_IF_ERROR(shard_->Admit(token_));
    return std::invoke(function, *shard_, arguments...);
  }

  const std::shared_ptr<FakeShard> shard_;
  uint64_t token_ = 0;
};

// A disk in memory. A failed write may have reached it or not, as on a real one.
class FakeJournal final : public CoordinatorJournal {
 public:
  absl::Status Append(const CoordinatorRecord& record) override {
    if (during_append) during_append(record);
    if (!fail || lands) records.push_back(record);
    return fail ? absl::ResourceExhaustedError("no space left") : absl::OkStatus();
  }
  absl::Status Compact(absl::Span<const CoordinatorRecord> live) override {
    if (fail) return absl::ResourceExhaustedError("no space left");
    records.assign(live.begin(), live.end());
    ++compactions;
    return absl::OkStatus();
  }
  bool wants_compaction() const override { return records.size() > compact_above; }
  uint64_t leadership() const override { return elected; }

  uint64_t elected = 0;  // by storage that elects leaders
  std::function<void(const CoordinatorRecord&)> during_append;
  bool fail = false;
  bool lands = false;  // a failed write is there after a crash all the same
  size_t compact_above = 1000;
  int compactions = 0;
  std::vector<CoordinatorRecord> records;
};

class CoordinatorFixture : public ::testing::Test {
 protected:
  CoordinatorFixture() {
    for (int s = 0; s < 2; ++s) shards.push_back(std::make_shared<FakeShard>());
    options.lease_steps = 10;
    options.make_method = [](const MethodConfig& config) -> absl::StatusOr<std::unique_ptr<Method>> {
      if (config.name != "fake") return absl::NotFoundError("known methods: fake");
      return std::make_unique<FakeMethod>(std::make_shared<FakeMethodLog>(), true);
    };
    MakeCoordinator();
    spec.name = "job";
    spec.world_size = 2;
    spec.method.name = "fake";
    for (int i = 0; i < 4; ++i) {
      spec.layers.push_back({.name = "l" + std::to_string(i), .d_out = 4, .d_in = 4, .has_bias = false});
    }
  }
  // Makes a new process with the existing shards and the existing journal.
  void MakeCoordinator() {
    std::vector<ShardEndpoint> endpoints;
    for (size_t s = 0; s < shards.size(); ++s) {
      endpoints.push_back(
          {.address = "shard" + std::to_string(s), .control = std::make_unique<ShardHandle>(shards[s])});
    }
    coordinator =
        std::make_unique<Coordinator>(options, std::move(endpoints), *journal_in_use, clock, logger, observer);
  }
  // Makes one that has read the journal.
  void Restart() {
    MakeCoordinator();
    const absl::Status restored = coordinator->Restore(journal.records);
    ASSERT_TRUE(restored.ok()) << restored;
  }
  uint64_t Open() {
    auto opened = coordinator->OpenSession(spec);
    EXPECT_TRUE(opened.ok()) << opened.status();
    return opened->session_id;
  }
  void JoinAll() {
    for (uint32_t rank = 0; rank < 2; ++rank) {
      const auto joined = coordinator->JoinSession(spec.name, rank, 5, 0);
      ASSERT_TRUE(joined.ok()) << joined.status();
    }
  }
  StepReport Report(uint64_t session, uint64_t epoch, uint32_t rank, uint64_t step, double loss) const {
    return {.session_id = session, .epoch = epoch, .rank = rank, .incarnation = 5, .step = step, .loss = loss};
  }

  // Both ranks report the step; the last answer.
  absl::StatusOr<Directive> ReportAll(uint64_t session, uint64_t step) {
    const uint64_t epoch = coordinator->GetSession(spec.name)->epoch;
    coordinator->ReportStep(Report(session, epoch, 0, step, 1)).IgnoreError();
    return coordinator->ReportStep(Report(session, epoch, 1, step, 1));
  }

  FakeClock clock;
  FakeJournal journal;
  CoordinatorJournal* journal_in_use = &journal;  // by the next MakeCoordinator
  // Keeps the lines about shards that stop answering or answer again.
  struct ShardLineLogger final : public Logger {
    void Log(Severity severity, absl::string_view message, std::initializer_list<LogField> fields) override {
      if (absl::StrContains(message, "answer")) lines.push_back(absl::StrCat(message, " ", fields.begin()->text));
    }
    std::vector<std::string> lines;
  } logger;
  struct Recorder final : public Observer {
    void OnStepReported(absl::string_view, uint64_t step, double loss, Mode) override {
      losses.emplace_back(step, loss);
    }
    void OnCoordinatorSessions(int64_t count) override { sessions = count; }
    void OnUnreachableShards(int64_t count) override { unreachable = count; }
    void OnSessionOpened(absl::string_view name) override { events.push_back(absl::StrCat("opened ", name)); }
    void OnSessionClosed(absl::string_view name) override { events.push_back(absl::StrCat("closed ", name)); }
    void OnEpoch(absl::string_view name, uint64_t epoch, int64_t joined, int64_t world_size) override {
      events.push_back(absl::StrCat(name, " epoch ", epoch, ": ", joined, " of ", world_size));
    }
    void OnSessionSnapshot(absl::string_view, bool complete) override {
      ++(complete ? complete_snapshots : failed_snapshots);
    }
    void OnLastSessionSnapshot(absl::string_view, uint64_t step) override { last_snapshot = step; }
    int64_t complete_snapshots = 0, failed_snapshots = 0;
    std::optional<uint64_t> last_snapshot;
    std::vector<std::string> events;
    std::vector<std::pair<uint64_t, double>> losses;
    int64_t sessions = -1;
    int64_t unreachable = 0;
  } observer;
  std::vector<std::shared_ptr<FakeShard>> shards;
  CoordinatorOptions options;
  std::unique_ptr<Coordinator> coordinator;
  SessionSpec spec;
};

}  // namespace precondor
