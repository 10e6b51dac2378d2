// SPDX-License-Identifier: Apache-2.0
// Reports of shards, and the actions of a coordinator that follow.
#include "server/core/coordinator/reconcile.h"

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "server/core/coordinator/coordinator_session.h"

namespace precondor {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

// Sessions of one rank and two layers, on shards 0 and 1; shard 2 has no layers.
class ReconcileTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kOpen = 10, kOpening = 11, kEnding = 12, kAbandoned = 13, kUnknown = 14;

  ReconcileTest() {
    AddSession(kOpen, "open");
    state.counted[kOpening] = {};
    AddSession(kEnding, "ending");
    state.BeginEnding(kEnding, 3);
    state.Abandon(kAbandoned);
  }
  void AddSession(uint64_t id, const std::string& name) {
    SessionSpec spec;
    spec.name = name;
    state.Open(std::make_shared<CoordinatorSession>(
        SessionRecord{.session_id = id,
                      .spec = spec,
                      .placement = {{.shard = "a", .address = "a:1", .layers = {0}},
                                    {.shard = "b", .address = "b:1", .layers = {1}},
                                    {.shard = "c", .address = "c:1", .layers = {}}},
                      .membership = SessionMembers::First(spec),
                      .lease = StepLeases::First(spec, kLeaseSteps)},
        kLeaseSteps));
    state.counted[id] = {};
  }
  CoordinatorSession& Session(uint64_t id = kOpen) { return *state.Find(id); }
  // A worker takes the session's rank; the shards are told, or not.
  void Join(uint64_t incarnation, bool told = true) {
    Session().Adopt(MembershipRecord{.session_id = kOpen, .membership = **Session().PlanJoin(0, incarnation, 0)});
    if (told) Session().NoteShardsTold(Session().members().membership());
  }
  void ReportStep(uint64_t step) {
    const SessionMembers& members = Session().members();
    ASSERT_TRUE(
        Session()
            .Report({.epoch = members.epoch(), .incarnation = members.membership().incarnations[0], .step = step},
                    absl::UnixEpoch())
            .ok());
  }
  void SetSnapshots(std::vector<SnapshotEntry> snapshots) {
    Session().Adopt(SnapshotsRecord{.session_id = kOpen, .snapshots = std::move(snapshots)});
  }
  static HeldSession Held(uint64_t id, const std::string& name = "") {
    return {.session_id = id, .name = name, .reserved_bytes = 3};
  }
  // The report of a shard that holds the session as it should.
  HeldSession Current(uint64_t id = kOpen) {
    const SessionMembers& members = Session(id).members();
    return {.session_id = id, .name = Session(id).spec.name, .epoch = members.epoch(), .joined = members.joined()};
  }

  static std::vector<std::string> Texts(const std::vector<CoordinatorAction>& actions) {
    static const char* const kNames[] = {"remove ending", "remove abandoned", "quarantine",   "install",
                                         "close",         "begin snapshot",   "ask for parts"};
    std::vector<std::string> texts;
    for (const CoordinatorAction& action : actions) {
      texts.push_back(absl::StrCat(kNames[static_cast<size_t>(action.kind)], " ", action.session_id, " on ",
                                   action.shard, " ", action.name));
    }
    return texts;
  }
  std::vector<std::string> Shard(size_t shard, const std::vector<HeldSession>& held) {
    ShardDescription observed;
    observed.sessions = held;
    Observe(state, shard, observed);
    return Texts(ReconcileShard(state, shard, observed));
  }
  std::vector<std::string> Sessions(uint64_t interval_steps = 0) {
    return Texts(ReconcileSessions(state, interval_steps));
  }

  static constexpr uint64_t kLeaseSteps = 10;
  CoordinatorState state;
};

TEST_F(ReconcileTest, AShardThatHoldsWhatItShouldHasNothingToDo) {
  Join(5);
  state.ending.at(kEnding).removed = {true, true, true};
  EXPECT_THAT(Shard(0, {Current()}), IsEmpty());
  EXPECT_THAT(Shard(2, {}), IsEmpty()) << "it has no layers";
  EXPECT_THAT(Shard(0, {Current(), Held(kOpening)}), IsEmpty());
}

TEST_F(ReconcileTest, EachSessionByHowFarItHasCome) {
  Join(5);
  EXPECT_THAT(Shard(0, {Held(kUnknown, "lost"), Held(kAbandoned, "late"), Held(kEnding), Held(kOpening), Current()}),
              ElementsAre("remove ending 12 on 0 ", "quarantine 14 on 0 lost", "remove abandoned 13 on 0 late"));
  ShardDescription observed;
  observed.sessions = {Held(kUnknown, "lost")};
  EXPECT_THAT(ClearUnknown(state, 1, observed),
              ElementsAre(CoordinatorAction{ActionKind::kQuarantine, 1, kUnknown, "lost", 3}));
}

TEST_F(ReconcileTest, WithoutItsJournalEverythingGoesToQuarantineAndNothingIsRemoved) {
  const std::vector<HeldSession> held = {Current(), Held(kEnding, "ending")};
  state = {};
  EXPECT_THAT(Shard(0, held), ElementsAre("quarantine 10 on 0 open", "quarantine 12 on 0 ending"));
}

TEST_F(ReconcileTest, AnEndingSessionIsRemovedFromEveryShardAndAgainWhereAnInstallCameLate) {
  Join(5);
  EXPECT_THAT(Shard(2, {}), ElementsAre("remove ending 12 on 2 ")) << "also where it has no layers";
  for (size_t shard = 0; shard < 3; ++shard) {
    EXPECT_THAT(Sessions(), IsEmpty());
    state.ending.at(kEnding).removed[shard] = true;
    EXPECT_THAT(Shard(shard, shard < 2 ? std::vector{Current()} : std::vector<HeldSession>()), IsEmpty());
  }
  EXPECT_THAT(Sessions(), ElementsAre("close 12 on 0 "));
  EXPECT_THAT(Shard(0, {Current(), Held(kEnding)}), ElementsAre("remove ending 12 on 0 "));
  EXPECT_THAT(Sessions(), IsEmpty());
}

// The report of shard 0 on the open session, whose epoch is 2 and whose rank is held.
TEST_F(ReconcileTest, AShardThatLacksASessionOrItsMembersGetsItAgain) {
  state.ending.clear();
  Join(5);
  Join(6);
  const HeldSession current = Current();
  HeldSession earlier = current, without_rank = current, with_layers = current, of_another_shard = current;
  earlier.epoch = 1;
  without_rank.joined = 0;
  with_layers.layers = Session().placement[0].layers;
  of_another_shard.layers = {99};
  EXPECT_THAT(Shard(0, {current}), IsEmpty());
  EXPECT_THAT(Shard(0, {with_layers}), IsEmpty());
  for (const std::vector<HeldSession>& held :
       {std::vector<HeldSession>(), {earlier}, {without_rank}, {of_another_shard}}) {
    EXPECT_THAT(Shard(0, held), ElementsAre("install 10 on 0 open"));
    EXPECT_THAT(Shard(2, held), IsEmpty());
  }
  Join(7, /*told=*/false);
  EXPECT_THAT(Shard(0, {Current()}), ElementsAre("install 10 on 0 open")) << "another shard may lack it";
}

TEST_F(ReconcileTest, ASessionThatHasLostItsRestoredFactorsIsNotInstalledAgain) {
  state.ending.clear();
  Join(5);
  SetSnapshots({{.number = 1, .state = SnapshotState::kFailed, .reason = "lost", .parts = {}, .restores = true}});
  EXPECT_THAT(Shard(0, {}), IsEmpty());
}

TEST_F(ReconcileTest, StepsOfShardsAreNotedIfTheirReportIsUpToDate) {
  Join(5);
  HeldSession held = Current();
  held.last_step = 12;
  Shard(0, {held});
  held.epoch = 0;
  held.last_step = 99;
  Shard(1, {held});
  EXPECT_THAT(Session().progress().shard_steps(), ElementsAre(testing::Pair("a:1", 12)));
}

TEST_F(ReconcileTest, ASnapshotIsBegunWhenItIsDueAndAskedForWhileItIsUnderWay) {
  AddSession(9, "zebra");
  Session(9).Adopt(
      SnapshotsRecord{.session_id = 9, .snapshots = {{.number = 1, .step = 3, .reason = "", .parts = {}}}});
  EXPECT_THAT(Sessions(5), ElementsAre("ask for parts 9 on 0 zebra")) << "no rank has joined the other";
  Join(5);
  EXPECT_THAT(Sessions(5), ElementsAre("ask for parts 9 on 0 zebra")) << "no step has ended";
  ReportStep(1);
  EXPECT_THAT(Sessions(5), ElementsAre("begin snapshot 10 on 0 open", "ask for parts 9 on 0 zebra")) << "by name";
  EXPECT_THAT(Sessions(0), ElementsAre("ask for parts 9 on 0 zebra")) << "only on request";
  SetSnapshots({{.number = 1, .step = 11, .reason = "", .parts = {}}});
  EXPECT_THAT(Sessions(5), ElementsAre("ask for parts 10 on 0 open", "ask for parts 9 on 0 zebra"));
  SetSnapshots({{.number = 1, .step = 11, .state = SnapshotState::kComplete, .reason = "", .parts = {}}});
  EXPECT_THAT(Sessions(5), ElementsAre("ask for parts 9 on 0 zebra"));
}

}  // namespace
}  // namespace precondor
