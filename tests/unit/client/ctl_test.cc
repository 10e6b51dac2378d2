// SPDX-License-Identifier: Apache-2.0
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include <nlohmann/json.hpp>

#include "client/cpp/tools/ctl_commands.h"
#include "client/cpp/tools/ctl_render.h"
#include "tests/support/text_proto.h"

namespace precondor {
namespace {

using ::testing::HasSubstr;

TEST(CtlOptionsTest, TakesFlagsAnywhereAndInBothForms) {
  const auto options = ParseCtlOptions({"--server=host:1", "layers", "--timeout", "250ms", "bert", "--json"});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->command->name, "layers");
  EXPECT_EQ(options->argument, "bert");
  EXPECT_EQ(options->server, "host:1");
  EXPECT_EQ(options->timeout, absl::Milliseconds(250));
  EXPECT_TRUE(options->json);
  EXPECT_EQ(ParseCtlOptions({"drain", "--deadline=30s"})->drain_deadline, absl::Seconds(30));
  EXPECT_EQ(ParseCtlOptions({"health"})->argument, "");
  EXPECT_EQ(ParseCtlOptions({"mode", "bert"})->mode, "");
  EXPECT_EQ(ParseCtlOptions({"mode", "bert", "first-order"})->mode, "first-order");
  EXPECT_EQ(ParseCtlOptions({"snapshot", "create", "bert"})->argument, "bert");
  EXPECT_EQ(ParseCtlOptions({"snapshot", "list"})->command->action, "list");
  EXPECT_EQ(ParseCtlOptions({"session", "close", "bert"})->argument, "bert");
  const auto restore = ParseCtlOptions({"snapshot", "restore", "bert", "--snapshot-path=a", "--snapshot-path", "b",
                                        "--snapshot=3", "--replace", "--world-size=4"});
  ASSERT_TRUE(restore.ok()) << restore.status();
  EXPECT_EQ(restore->snapshot_paths, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(restore->snapshot, 3u);
  EXPECT_TRUE(restore->replace);
  EXPECT_EQ(restore->world_size, 4);
  EXPECT_EQ(ParseCtlOptions({"status", "--help"})->command->name, "help");
}

TEST(CtlOptionsTest, SaysWhatIsWrong) {
  const auto message = [](const std::vector<std::string>& arguments) {
    const auto options = ParseCtlOptions(arguments);
    EXPECT_EQ(options.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(options.status().message());
  };
  EXPECT_THAT(message({}), HasSubstr("expected a command"));
  EXPECT_THAT(message({"stop"}), HasSubstr("got \"stop\""));
  EXPECT_THAT(message({"layers"}), HasSubstr("name of a session"));
  EXPECT_THAT(message({"layers", "a", "b"}), HasSubstr("unexpected argument \"b\""));
  EXPECT_THAT(message({"mode"}), HasSubstr("mode: expected the name of a session"));
  EXPECT_THAT(message({"mode", "a", "slow"}), HasSubstr("expected second-order, first-order, auto, got \"slow\""));
  EXPECT_THAT(message({"mode", "a", "auto", "b"}), HasSubstr("unexpected argument \"b\""));
  EXPECT_THAT(message({"session"}), HasSubstr("expected close, got \"\""));
  EXPECT_THAT(message({"session", "adopt", "bert"}), HasSubstr("expected close, got \"adopt\""));
  EXPECT_THAT(message({"session", "close"}), HasSubstr("session close: expected the name of a session"));
  EXPECT_THAT(message({"status", "--token-file=a"}), HasSubstr("--token-file: expected --tls-ca"));
  EXPECT_THAT(message({"status", "--tls-ca=a", "--tls-cert=b"}), HasSubstr("--tls-cert: expected --tls-key"));
  EXPECT_THAT(message({"status", "--tls-ca=a", "--tls-key=b"}), HasSubstr("--tls-key: expected --tls-cert"));
  EXPECT_THAT(message({"status", "--server=host"}), HasSubstr("--server: expected host:port"));
  EXPECT_THAT(message({"snapshot"}), HasSubstr("expected create, list, verify, restore, got \"\""));
  EXPECT_THAT(message({"snapshot", "drop"}), HasSubstr("expected create, list, verify, restore, got \"drop\""));
  EXPECT_THAT(message({"snapshot", "create"}), HasSubstr("create: expected the name of a session"));
  EXPECT_THAT(message({"snapshot", "restore", "bert"}), HasSubstr("expected --snapshot-path"));
  EXPECT_THAT(message({"snapshot", "restore", "--snapshot-path=a"}), HasSubstr("expected the name of a session"));
  EXPECT_THAT(message({"snapshot", "list", "--replace"}), HasSubstr("for the command snapshot restore only"));
  EXPECT_THAT(message({"snapshot", "restore", "bert", "--world-size=0"}),
              HasSubstr("expected a number of ranks, 1 ..."));
  EXPECT_THAT(message({"snapshot", "list", "--world-size=2"}), HasSubstr("for the command snapshot restore only"));
  EXPECT_THAT(message({"snapshot", "restore", "bert", "--snapshot=x"}), HasSubstr("got \"x\""));
  EXPECT_THAT(message({"snapshot", "list", "a", "b"}), HasSubstr("unexpected argument \"b\""));
  EXPECT_THAT(message({"snapshot", "list", "--deadline=1s"}), HasSubstr("for the command drain only"));
  EXPECT_THAT(message({"status", "x"}), HasSubstr("unexpected argument \"x\""));
  EXPECT_THAT(message({"status", "--verbose"}), HasSubstr("unknown flag --verbose"));
  EXPECT_THAT(message({"status", "--json=1"}), HasSubstr("unknown flag --json=1"));
  EXPECT_THAT(message({"status", "--server"}), HasSubstr("expected a value"));
  EXPECT_THAT(message({"status", "--server="}), HasSubstr("host:port"));
  EXPECT_THAT(message({"status", "--timeout=soon"}), HasSubstr("got \"soon\""));
  EXPECT_THAT(message({"status", "--timeout=-1s"}), HasSubstr("got \"-1s\""));
  EXPECT_THAT(message({"status", "--deadline=1s"}), HasSubstr("for the command drain only"));
}

// Layers of a server that took any name.
TEST(CtlRenderTest, ATableHasNothingThatATerminalWouldObey) {
  EXPECT_EQ(FormatTable({{"NAME"}, {"a\x1b[2J\r\n\u202eb"}}), "NAME\na\\u001b[2J\\u000d\\u000a\\u202eb\n");
}

TEST(CtlRenderTest, AlignsColumns) {
  EXPECT_EQ(FormatTable({{"NAME", "COUNT", "NOTE"}, {"a", "5", "x"}, {"long", "1234", ""}, {"b", "-", "y"}}),
            "NAME  COUNT  NOTE\n"
            "a         5  x\n"
            "long   1234\n"
            "b         -  y\n");
}

TEST(CtlRenderTest, FormatsBytes) {
  EXPECT_EQ(FormatBytes(0), "0 B");
  EXPECT_EQ(FormatBytes(1023), "1023 B");
  EXPECT_EQ(FormatBytes(1536), "1.5 KiB");
  EXPECT_EQ(FormatBytes(uint64_t{3} << 30), "3.0 GiB");
}

TEST(CtlRenderTest, ShowsServersThatAnswerAndThoseThatDoNot) {
  const auto info = FromText<v1::GetServerInfoResponse>(R"(
    version: "0.1.0" role: ROLE_SHARD uptime_seconds: 90 backend: "cpu" capacity_bytes: 2147483648
    reserved_bytes: 1048576 sessions: 2 draining: true)");
  const std::vector<ServerStatus> servers = {{"a:1", info, ""}, {"b:2", {}, "no answer within 1s"}};
  const std::string table = StatusTable(servers);
  EXPECT_THAT(table, HasSubstr("a:1      shard  0.1.0    1m30s   cpu      1.0 MiB   2.0 GiB          2  draining"));
  EXPECT_THAT(table, HasSubstr("no answer within 1s"));
  const nlohmann::json document = StatusJson(servers);
  EXPECT_EQ(document["servers"][0]["role"], "shard");
  EXPECT_EQ(document["servers"][0]["reserved_bytes"], 1 << 20);
  EXPECT_EQ(document["servers"][1]["error"], "no answer within 1s");
}

TEST(CtlRenderTest, SaysThatADeviceIsLost) {
  v1::GetServerInfoResponse info;
  info.set_role(v1::ROLE_SHARD);
  info.add_devices()->set_name("cuda:0");
  EXPECT_THAT(StatusTable({{"a:1", info, ""}}), testing::Not(HasSubstr("lost")));
  info.mutable_devices(0)->set_fault("an illegal address");
  EXPECT_THAT(StatusTable({{"a:1", info, ""}}), testing::ContainsRegex("0 +device lost\n"));
  EXPECT_EQ(StatusJson({{"a:1", info, ""}})["servers"][0]["devices"][0]["fault"], "an illegal address");
}

TEST(CtlRenderTest, ShowsTheModeAndWhy) {
  auto status = FromText<v1::ModeStatus>(R"(
    mode: MODE_SECOND_ORDER step: 400 rule: "LOSS_RATE" reason: "the loss falls fast enough" rate: 0.5
    schedule { first_step: 417 mode: MODE_FIRST_ORDER })");
  EXPECT_THAT(ModeTable("bert", status), HasSubstr("bert: second_order at step 400, by policy\nLOSS_RATE: the loss"));
  EXPECT_THAT(ModeTable("bert", status), HasSubstr("417  first_order"));
  EXPECT_TRUE(ModeJson("bert", status)["forced"].is_null());
  status.set_forced(v1::MODE_FIRST_ORDER);
  EXPECT_THAT(ModeTable("bert", status), HasSubstr("by an operator"));
  const nlohmann::json json = ModeJson("bert", status);
  EXPECT_EQ(json["forced"], "first_order");
  EXPECT_EQ(json["rate"], 0.5);
  EXPECT_EQ(json["schedule"][0]["first_step"], 417);
}

TEST(CtlRenderTest, ShowsSnapshots) {
  const auto info = FromText<v1::SnapshotInfo>(R"(session: "bert" step: 1200 snapshot_id: 3 layers: 24 bytes: 1536)");
  const std::vector<ShardSnapshot> snapshots = {{"a:1", info, ""}, {"b:2", info, "whole"}};
  const auto session = FromText<v1::SessionSnapshot>(R"(
    session: "bert" snapshot_id: 7 step: 1200 epoch: 2 state: SNAPSHOT_STATE_UNDER_WAY
    parts { snapshot_id: 3 shard: "a:1" layers: 4 } parts { shard: "b:2" })");
  const std::string table = SnapshotsTable({session}, snapshots);
  EXPECT_THAT(table, HasSubstr("bert      7  1200      2  under_way  1/2 shards       -\n"));
  EXPECT_THAT(table, HasSubstr("bert     1200  a:1     3      24  1.5 KiB  -\n"));
  EXPECT_THAT(table, HasSubstr("whole"));
  const nlohmann::json json = SnapshotsJson({session}, snapshots);
  EXPECT_EQ(json["snapshots"][0]["step"], 1200);
  EXPECT_EQ(json["session_snapshots"][0]["state"], "under_way");
  EXPECT_EQ(json["session_snapshots"][0]["shards"][0]["layers"][0], 4);
  EXPECT_FALSE(json["snapshots"][0].contains("state"));
  EXPECT_EQ(json["snapshots"][1]["state"], "whole");
}

TEST(CtlRenderTest, ShowsSessionsAndLayers) {
  const auto response = FromText<v1::ListSessionsResponse>(R"(
    sessions { joined: 3 mode: MODE_SECOND_ORDER loss: 0.25
               spec { name: "bert" world_size: 4 exchange: EXCHANGE_MODE_DELEGATE statistics: STATISTICS_KIND_SIGNED
                      layers {} method { identity {} } } })");
  EXPECT_THAT(SessionsTable(response), HasSubstr("bert  identity       1  3/4"));
  const nlohmann::json sessions = SessionsJson(response);
  EXPECT_EQ(sessions["sessions"][0]["exchange"], "delegate");
  EXPECT_EQ(sessions["sessions"][0]["mode"], "second_order");
  EXPECT_EQ(sessions["sessions"][0]["loss"], 0.25);

  const auto layer = FromText<v1::LayerStats>(R"(
    layer: 3 name: "encoder.3" input_representation: "low_rank" input_rank: 64 output_representation: "dense"
    rejected: 7 failed_decompositions: 3 factor_resets: 1 update_seconds: 1.5e-3)");
  EXPECT_THAT(LayersTable({layer}), HasSubstr("low_rank(64)  dense"));
  EXPECT_THAT(LayersTable({layer}), HasSubstr("1500.0"));
  const nlohmann::json layers = LayersJson("bert", {layer});
  EXPECT_EQ(layers["session"], "bert");
  EXPECT_EQ(layers["layers"][0]["rejected"], 7);
  EXPECT_EQ(layers["layers"][0]["failed_decompositions"], 3);
  EXPECT_EQ(layers["layers"][0]["factor_resets"], 1);
}

}  // namespace
}  // namespace precondor
