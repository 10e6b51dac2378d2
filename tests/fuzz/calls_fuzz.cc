// SPDX-License-Identifier: Apache-2.0
// Every unary call through the handlers of servers in this process. The first byte of an input chooses the call, the
// second what of it is put right: the session's name, number, secret and member, so that a change goes past the first
// check. The others are the request, also where they are no message.
//
// After each input a job that behaves has its answer, and the shard by itself still describes itself.
#include <google/protobuf/message.h>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

#include "kernels/base/check.h"
#include "precondor/v1/shard.grpc.pb.h"
#include "precondor/v1/snapshot.grpc.pb.h"
#include "tests/fuzz/fuzz.h"
#include "tests/loopback/generic_call.h"
#include "tests/loopback/raw_client.h"

namespace precondor::fuzz {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

constexpr char kJob[] = "job";
constexpr uint64_t kToken = uint64_t{1} << 62;  // of the newest coordinator, for a shard

// With all roles, for what workers and operators call.
RawServer& Service() {
  static RawServer server;
  return server;
}

// A coordinator orders a shard about as it likes, but it does not end it.
RawServer& LoneShard() {
  static RawServer server([] {
    ServerConfig config;
    config.role = ServerRole::kShard;
    return config;
  }());
  return server;
}

struct Call {
  std::string path;
  std::unique_ptr<Message> request;  // of its type
  RawServer& server;
};

std::vector<Call> MakeCalls() {
  std::vector<Call> calls;
  for (const auto* file :
       {v1::OpenSessionRequest::descriptor()->file(), v1::CreateSnapshotRequest::descriptor()->file(),
        v1::GetModeRequest::descriptor()->file(), v1::ListMissingRanksRequest::descriptor()->file(),
        v1::InstallSessionRequest::descriptor()->file()}) {
    for (int s = 0; s < file->service_count(); ++s) {
      const auto* service = file->service(s);
      for (int m = 0; m < service->method_count(); ++m) {
        const auto* method = service->method(m);
        if (method->client_streaming() || method->name() == "Drain") continue;  // which is to end the server
        const Message* prototype =
            google::protobuf::MessageFactory::generated_factory()->GetPrototype(method->input_type());
        calls.push_back({absl::StrCat("/", service->full_name(), "/", method->name()),
                         std::unique_ptr<Message>(prototype->New()),
                         service->name() == "ShardService" ? LoneShard() : Service()});
      }
    }
  }
  return calls;
}

const std::vector<Call>& Calls() {
  static const std::vector<Call> calls = MakeCalls();
  return calls;
}

// Sets the field of this name, in the message and in those that are in it, if there is one of a fitting type.
void PutRight(Message& message, const std::string& name, const std::string& text, uint64_t number, int depth = 0) {
  if (depth > 4) return;
  const google::protobuf::Reflection& reflection = *message.GetReflection();
  for (int i = 0; i < message.GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor* field = message.GetDescriptor()->field(i);
    if (field->is_repeated()) continue;
    if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
      if (reflection.HasField(message, field)) {
        PutRight(*reflection.MutableMessage(&message, field), name, text, number, depth + 1);
      }
      continue;
    }
    if (field->name() != name) continue;
    if (field->cpp_type() == FieldDescriptor::CPPTYPE_STRING) reflection.SetString(&message, field, text);
    if (field->cpp_type() == FieldDescriptor::CPPTYPE_UINT64) reflection.SetUInt64(&message, field, number);
    if (field->cpp_type() == FieldDescriptor::CPPTYPE_UINT32) {
      reflection.SetUInt32(&message, field, static_cast<uint32_t>(number));
    }
  }
}

std::string RequestOf(const Call& call, uint8_t right, absl::string_view bytes, const v1::JoinSessionResponse& joined) {
  const std::unique_ptr<Message> request(call.request->New());
  const bool is_message = request->ParsePartialFromArray(bytes.data(), static_cast<int>(bytes.size()));
  if (!is_message || (right & 1) != 0) return std::string(bytes);
  if ((right & 2) != 0) PutRight(*request, "session_id", "", joined.session_id());
  if ((right & 4) != 0) PutRight(*request, "secret", joined.secret(), 0);
  if ((right & 8) != 0) {
    PutRight(*request, "name", kJob, 0);
    PutRight(*request, "session", kJob, 0);
  }
  if ((right & 16) != 0) {
    PutRight(*request, "incarnation", "", kRawIncarnation);
    PutRight(*request, "epoch", "", joined.epoch());
    PutRight(*request, "rank", "", 0);
    PutRight(*request, "fencing_token", "", kToken);
  }
  return request->SerializePartialAsString();
}

void EndJobs() {
  v1::ListSessionsResponse listed;
  {
    TimedContext context;
    PRECONDOR_CHECK(Service().admin->ListSessions(&context, {}, &listed).ok());
  }
  for (const v1::SessionSummary& session : listed.sessions()) {
    v1::CloseSessionRequest request;
    request.set_name(session.spec().name());
    v1::CloseSessionResponse response;
    TimedContext context;
    Service().sessions->CloseSession(&context, request, &response).error_code();
  }
}

void TrainAsUsual() {
  const v1::JoinSessionResponse joined = Service().OpenAndJoin("another-job");
  v1::ExchangeResponse response;
  PRECONDOR_CHECK(Service().Precondition(RawRequest(joined, 0, 0), &response).ok());
  PRECONDOR_CHECK(response.outcome().decision() == v1::DECISION_PRECONDITIONED);
}

}  // namespace

std::vector<std::string> Seeds() {
  std::vector<std::string> seeds;
  for (size_t i = 0; i < Calls().size(); ++i) {
    for (const char right : {0, 1, 30}) seeds.push_back({static_cast<char>(i), right});
  }
  const auto add = [&](absl::string_view method, char right, const Message& request) {
    for (size_t i = 0; i < Calls().size(); ++i) {
      if (!absl::EndsWith(Calls()[i].path, method)) continue;
      seeds.push_back(std::string({static_cast<char>(i), right}) + request.SerializeAsString());
    }
  };
  v1::OpenSessionRequest open;
  *open.mutable_spec() = RawServer::Spec("opened");
  add("/OpenSession", 0, open);
  v1::RestoreSessionRequest restore;
  *restore.mutable_spec() = RawServer::Spec("restored");
  restore.set_step(3);
  add("/RestoreSession", 0, restore);
  v1::RestoreLayerRequest layer;
  layer.set_step(3);
  layer.set_total_bytes(4);
  layer.set_data("four");
  layer.set_fetched(true);
  add("/RestoreLayer", 30, layer);
  v1::JoinSessionRequest join;
  add("/JoinSession", 30, join);
  v1::ReportStepRequest report;
  report.set_samples(1);
  report.set_finite(true);
  add("/ReportStep", 30, report);
  v1::ListMissingRanksRequest missing;
  missing.mutable_key()->set_layer(1);
  add("/ListMissingRanks", 30, missing);
  v1::InstallSessionRequest install;
  *install.mutable_spec() = RawServer::Spec("installed");
  install.set_session_id(5);
  install.set_epoch(1);
  install.add_layers(0);
  install.set_fencing_token(kToken);
  add("/InstallSession", 0, install);
  return seeds;
}

void Run(absl::string_view input) {
  const Call& call = Calls()[Choose(input, Calls().size())];
  const size_t right = Choose(input, 32);
  EndJobs();
  const v1::JoinSessionResponse joined = Service().OpenAndJoin(kJob);
  {
    GenericCall made(call.server.channel(), call.path, RequestOf(call, static_cast<uint8_t>(right), input, joined));
    made.Read();
    PRECONDOR_CHECK(made.End().error_code() != grpc::StatusCode::DEADLINE_EXCEEDED);
  }
  TrainAsUsual();
  v1::DescribeShardRequest describe;
  describe.set_fencing_token(kToken);
  v1::DescribeShardResponse description;
  TimedContext context;
  const grpc::Status described =
      v1::ShardService::NewStub(LoneShard().channel())->DescribeShard(&context, describe, &description);
  PRECONDOR_CHECK(described.error_code() != grpc::StatusCode::UNAVAILABLE &&
                  described.error_code() != grpc::StatusCode::DEADLINE_EXCEEDED);
}

}  // namespace precondor::fuzz
