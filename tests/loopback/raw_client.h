// SPDX-License-Identifier: Apache-2.0
// A server in this process and a worker made of generated stubs alone: nothing of the client library, so that it can
// also say what the library never would.
#pragma once

#include <chrono>
#include <cstring>
#include <functional>
#include <grpcpp/grpcpp.h>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "gtest/gtest.h"

#include "kernels/base/log.h"
#include "precondor/v1/admin.grpc.pb.h"
#include "precondor/v1/precondition.grpc.pb.h"
#include "precondor/v1/session.grpc.pb.h"
#include "server/app/app.h"
#include "tests/support/bundles.h"

namespace precondor {

inline constexpr int kRawRows[] = {3, 2};
inline constexpr int kRawCols[] = {4, 5};
inline constexpr uint64_t kRawIncarnation = 7;

// The deadline of a call that nothing holds up.
struct TimedContext : grpc::ClientContext {
  TimedContext() { set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60)); }
};

inline v1::ErrorDetail DetailOf(const grpc::Status& status) {
  v1::ErrorDetail detail;
  detail.ParseFromString(status.error_details());
  return detail;
}

// One worker's contributions to a step of a layer.
struct RawStep {
  v1::FrameHeader statistics;  // without a kind: none
  std::string statistics_payload;
  v1::FrameHeader gradient;
  std::string payload;
};

class RawServer {
 public:
  explicit RawServer(ServerConfig config = {}) {
    if (config.listen == ServerConfig().listen) config.listen = {"127.0.0.1:0"};
    config.threads = 2;
    auto app = App::Start(config, logger_);
    EXPECT_TRUE(app.ok()) << app.status();
    app_ = *std::move(app);
    grpc::ChannelArguments arguments;
    arguments.SetMaxSendMessageSize(-1);
    arguments.SetMaxReceiveMessageSize(-1);
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    channel_ = grpc::CreateCustomChannel(app_->addresses().front(), grpc::InsecureChannelCredentials(), arguments);
    sessions = v1::SessionService::NewStub(channel_);
    data = v1::PreconditionService::NewStub(channel_);
    admin = v1::AdminService::NewStub(channel_);
  }
  App& app() { return *app_; }
  std::unique_ptr<App>& owned_app() { return app_; }
  std::string address() const { return absl::StrCat("127.0.0.1:", app_->port()); }
  const std::shared_ptr<grpc::Channel>& channel() const { return channel_; }

  static v1::SessionSpec Spec(const std::string& name, int world_size = 1) {
    v1::SessionSpec spec;
    spec.set_name(name);
    spec.set_seed(11);
    spec.set_world_size(world_size);
    spec.set_exchange(v1::EXCHANGE_MODE_DIRECT);
    spec.set_statistics(v1::STATISTICS_KIND_PER_WORKER_MEAN);
    spec.set_statistics_dtype(v1::DATA_TYPE_F32);
    spec.set_gradient_dtype(v1::DATA_TYPE_F32);
    spec.mutable_method()->mutable_mkor()->set_rank(4);
    for (int i = 0; i < 2; ++i) {
      v1::Layer& layer = *spec.add_layers();
      layer.set_name(absl::StrCat("layer", i));
      layer.set_d_out(kRawRows[i]);
      layer.set_d_in(kRawCols[i]);
    }
    return spec;
  }

  grpc::Status Open(const v1::SessionSpec& spec, v1::OpenSessionResponse* response = nullptr) {
    v1::OpenSessionRequest request;
    *request.mutable_spec() = spec;
    v1::OpenSessionResponse ignored;
    TimedContext context;
    return sessions->OpenSession(&context, request, response == nullptr ? &ignored : response);
  }

  grpc::Status Join(const std::string& name, uint32_t rank, uint64_t incarnation, v1::JoinSessionResponse* response) {
    v1::JoinSessionRequest request;
    request.set_name(name);
    request.set_rank(rank);
    request.set_incarnation(incarnation);
    TimedContext context;
    return sessions->JoinSession(&context, request, response);
  }

  v1::JoinSessionResponse OpenAndJoin(const std::string& name, int world_size = 1) {
    return OpenAndJoin(Spec(name, world_size));
  }
  v1::JoinSessionResponse OpenAndJoin(const v1::SessionSpec& spec) {
    const grpc::Status opened = Open(spec);
    EXPECT_TRUE(opened.ok()) << opened.error_message();
    v1::JoinSessionResponse joined;
    for (int rank = 0; rank < spec.world_size(); ++rank) {
      const grpc::Status status = Join(spec.name(), static_cast<uint32_t>(rank), kRawIncarnation, &joined);
      EXPECT_TRUE(status.ok()) << status.error_message();
    }
    EXPECT_TRUE(joined.active());
    return joined;
  }

  // Sends the contributions on a stream of their own, and waits for the RESULT. Returns the first ERROR as a status.
  grpc::Status Precondition(const RawStep& step, v1::ExchangeResponse* result);

  std::vector<v1::LayerStats> Stats(const std::string& session) {
    v1::GetLayerStatsRequest request;
    request.set_session(session);
    v1::GetLayerStatsResponse response;
    TimedContext context;
    const grpc::Status status = admin->GetLayerStats(&context, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return {response.layers().begin(), response.layers().end()};
  }

  v1::GetServerInfoResponse Info() {
    v1::GetServerInfoResponse info;
    TimedContext context;
    const grpc::Status status = admin->GetServerInfo(&context, {}, &info);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return info;
  }

  std::unique_ptr<v1::SessionService::Stub> sessions;
  std::unique_ptr<v1::PreconditionService::Stub> data;
  std::unique_ptr<v1::AdminService::Stub> admin;

 private:
  NullLogger logger_;
  std::unique_ptr<App> app_;
  std::shared_ptr<grpc::Channel> channel_;
};

// `count` different floats around 0, as payload bytes.
inline std::string RawFloats(int count, uint64_t salt) {
  std::string bytes(static_cast<size_t>(count) * 4, '\0');
  for (int i = 0; i < count; ++i) {
    const float value = static_cast<float>((static_cast<uint64_t>(i) * 37 + salt * 101) % 64) / 32.0f - 1.0f;
    std::memcpy(bytes.data() + size_t{4} * static_cast<size_t>(i), &value, 4);
  }
  return bytes;
}

inline v1::FrameHeader RawHeader(const v1::JoinSessionResponse& joined, v1::FrameKind kind, uint64_t step, int layer) {
  v1::FrameHeader header;
  header.set_session_id(joined.session_id());
  header.set_epoch(joined.epoch());
  header.set_step(step);
  header.set_layer(static_cast<uint32_t>(layer));
  header.set_incarnation(kRawIncarnation);
  header.set_secret(joined.secret());
  header.set_kind(kind);
  header.set_mode(v1::MODE_SECOND_ORDER);
  header.set_samples(4);
  const auto add = [&header](int rows, int cols) {
    v1::TensorHeader& tensor = *header.add_tensors();
    tensor.set_data_type(v1::DATA_TYPE_F32);
    tensor.add_dims(rows);
    tensor.add_dims(cols);
    tensor.set_scale(1);
    header.set_payload_bytes(header.payload_bytes() + static_cast<uint64_t>(rows) * cols * 4);
  };
  if (kind == v1::FRAME_KIND_GRADIENT) {
    add(kRawRows[layer], kRawCols[layer]);
  } else {
    add(1, kRawCols[layer]);
    add(1, kRawRows[layer]);
  }
  return header;
}

// A stream of frames. It has read the server's credit.
class RawStream {
 public:
  explicit RawStream(RawServer& server) {
    call_ = server.data->Exchange(&context_);
    EXPECT_TRUE(call_->Read(&answer));
    EXPECT_EQ(answer.header().kind(), v1::FRAME_KIND_CREDIT);
    credit = answer.credit_bytes();
  }

  void Send(const v1::ExchangeRequest& frame) { EXPECT_TRUE(call_->Write(frame)); }
  void Send(const v1::FrameHeader& header, const std::string& payload = "") {
    v1::ExchangeRequest frame;
    *frame.mutable_header() = header;
    frame.set_payload(payload);
    Send(frame);
  }
  // Reads into `answer`.
  v1::FrameKind Read() {
    EXPECT_TRUE(call_->Read(&answer));
    return answer.header().kind();
  }
  v1::FrameKind Ask(const v1::FrameHeader& header, const std::string& payload = "") {
    Send(header, payload);
    return Read();
  }
  void Cancel() { context_.TryCancel(); }
  // The status of the whole stream. `take` gets all answers that were left.
  grpc::Status Finish(const std::function<void(const v1::ExchangeResponse& answer)>& take = nullptr) {
    call_->WritesDone();
    return End(take);
  }
  // That of a stream that the server ends, while the client could still write.
  grpc::Status End(const std::function<void(const v1::ExchangeResponse& answer)>& take = nullptr) {
    while (call_->Read(&answer)) {
      if (take == nullptr) continue;
      for (const v1::ExchangeResponse& one : FramesOf(answer)) take(one);
    }
    return call_->Finish();
  }

  v1::ExchangeResponse answer;
  uint64_t credit = 0;

 private:
  TimedContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::ExchangeRequest, v1::ExchangeResponse>> call_;
};

inline grpc::Status RawServer::Precondition(const RawStep& step, v1::ExchangeResponse* result) {
  TimedContext context;
  const auto call = data->Exchange(&context);
  const auto send = [&call](const v1::FrameHeader& header, const std::string& payload) {
    v1::ExchangeRequest frame;
    *frame.mutable_header() = header;
    frame.set_payload(payload);
    call->Write(frame);
  };
  if (step.statistics.kind() != v1::FRAME_KIND_UNSPECIFIED) send(step.statistics, step.statistics_payload);
  send(step.gradient, step.payload);
  while (call->Read(result)) {
    if (result->header().kind() == v1::FRAME_KIND_ERROR) {
      context.TryCancel();
      const v1::ErrorDetail& error = result->error();
      return grpc::Status(static_cast<grpc::StatusCode>(error.code()), error.message(), error.SerializeAsString());
    }
    if (result->header().kind() != v1::FRAME_KIND_RESULT) continue;
    call->WritesDone();
    v1::ExchangeResponse more;
    EXPECT_FALSE(call->Read(&more)) << more.DebugString();
    break;
  }
  return call->Finish();
}

// Correct contributions of rank 0.
inline RawStep RawRequest(const v1::JoinSessionResponse& joined, uint64_t step, int layer) {
  return {.statistics = RawHeader(joined, v1::FRAME_KIND_STATISTICS, step, layer),
          .statistics_payload = RawFloats(kRawRows[layer] + kRawCols[layer], step * 2 + layer + 1),
          .gradient = RawHeader(joined, v1::FRAME_KIND_GRADIENT, step, layer),
          .payload = RawFloats(kRawRows[layer] * kRawCols[layer], step * 2 + layer + 50)};
}

// A value of /metrics; -1 when it is missing.
inline double Metric(RawServer& server, absl::string_view series) {
  for (const absl::string_view line : absl::StrSplit(server.app().metrics_text(), '\n')) {
    const std::vector<absl::string_view> parts = absl::StrSplit(line, ' ');
    double value = 0;
    if (parts.size() == 2 && parts[0] == series && absl::SimpleAtod(parts[1], &value)) return value;
  }
  return -1;
}

}  // namespace precondor
