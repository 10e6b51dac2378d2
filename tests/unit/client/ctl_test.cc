// SPDX-License-Identifier: Apache-2.0
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include <nlohmann/json.hpp>

#include "client/cpp/tools/ctl_commands.h"
#include "client/cpp/tools/ctl_render.h"

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
  v1::GetServerInfoResponse info;
  info.set_version("0.1.0");
  info.set_role(v1::ROLE_SHARD);
  info.set_uptime_seconds(90);
  info.set_backend("cpu");
  info.set_capacity_bytes(uint64_t{2} << 30);
  info.set_reserved_bytes(uint64_t{1} << 20);
  info.set_sessions(2);
  info.set_draining(true);
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
  v1::ModeStatus status;
  status.set_mode(v1::MODE_SECOND_ORDER);
  status.set_step(400);
  status.set_rule("LOSS_RATE");
  status.set_reason("the loss falls fast enough");
  status.set_rate(0.5);
  v1::ModeInterval* interval = status.add_schedule();
  interval->set_first_step(417);
  interval->set_mode(v1::MODE_FIRST_ORDER);
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
  v1::SnapshotInfo info;
  info.set_session("bert");
  info.set_step(1200);
  info.set_snapshot_id(3);
  info.set_layers(24);
  info.set_bytes(1536);
  const std::vector<ShardSnapshot> snapshots = {{"a:1", info, ""}, {"b:2", info, "whole"}};
  v1::SessionSnapshot session;
  session.set_session("bert");
  session.set_snapshot_id(7);
  session.set_step(1200);
  session.set_epoch(2);
  session.set_state(v1::SNAPSHOT_STATE_UNDER_WAY);
  session.add_parts()->set_snapshot_id(3);
  session.mutable_parts(0)->set_shard("a:1");
  session.mutable_parts(0)->add_layers(4);
  session.add_parts()->set_shard("b:2");
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
  v1::ListSessionsResponse response;
  v1::SessionSummary* session = response.add_sessions();
  session->mutable_spec()->set_name("bert");
  session->mutable_spec()->set_world_size(4);
  session->mutable_spec()->set_exchange(v1::EXCHANGE_MODE_DELEGATE);
  session->mutable_spec()->set_statistics(v1::STATISTICS_KIND_SIGNED);
  session->mutable_spec()->add_layers();
  session->mutable_spec()->mutable_method()->mutable_identity();
  session->set_joined(3);
  session->set_mode(v1::MODE_SECOND_ORDER);
  session->set_loss(0.25);
  EXPECT_THAT(SessionsTable(response), HasSubstr("bert  identity       1  3/4"));
  const nlohmann::json sessions = SessionsJson(response);
  EXPECT_EQ(sessions["sessions"][0]["exchange"], "delegate");
  EXPECT_EQ(sessions["sessions"][0]["mode"], "second_order");
  EXPECT_EQ(sessions["sessions"][0]["loss"], 0.25);

  v1::LayerStats layer;
  layer.set_layer(3);
  layer.set_name("encoder.3");
  layer.set_input_representation("low_rank");
  layer.set_input_rank(64);
  layer.set_output_representation("dense");
  layer.set_rejected(7);
  layer.set_failed_decompositions(3);
  layer.set_factor_resets(1);
  layer.set_update_seconds(1.5e-3);
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
