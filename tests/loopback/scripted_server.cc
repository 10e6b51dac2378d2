// SPDX-License-Identifier: Apache-2.0
#include "tests/loopback/scripted_server.h"

#include <algorithm>
#include <chrono>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/check.h"
#include "kernels/base/dtype.h"
#include "kernels/base/error_reason.h"
#include "proto/wire/spec_codec.h"
#include "proto/wire/status_codec.h"
#include "tests/support/bundles.h"

namespace precondor {
namespace {

constexpr uint64_t kSessionId = 77;

std::string KeyText(const v1::FrameHeader& header) {
  return absl::StrCat(header.kind() == v1::FRAME_KIND_GRADIENT ? "G" : "S", header.step(), ".", header.layer());
}

// Twice each element, in the tensor's own type.
std::string Doubled(const v1::FrameHeader& header, const std::string& payload) {
  const auto dtype = wire::DecodeDType(header.tensors(0).data_type(), "data_type");
  PRECONDOR_CHECK(dtype.ok());
  std::vector<float> values(payload.size() / ByteSize(*dtype));
  DecodeElements(*dtype, payload.data(), 1.0f, absl::MakeSpan(values));
  for (float& value : values) value *= 2;
  std::string out(payload.size(), '\0');
  EncodeElements(*dtype, values, 1.0f, out.data());
  return out;
}

}  // namespace

class ScriptedServer::Session final : public v1::SessionService::Service {
 public:
  explicit Session(ScriptedServer* owner) : owner_(owner) {}
  grpc::Status OpenSession(grpc::ServerContext*, const v1::OpenSessionRequest* request,
                           v1::OpenSessionResponse* response) override {
    response->set_session_id(kSessionId);
    *response->mutable_spec() = request->spec();
    return grpc::Status::OK;
  }
  grpc::Status JoinSession(grpc::ServerContext*, const v1::JoinSessionRequest* request,
                           v1::JoinSessionResponse* response) override {
    MutexLock lock(owner_->mu_);
    ++owner_->joins_;
    owner_->last_first_step_ = request->first_step();
    owner_->changed_.notify_all();
    if (!owner_->script_.refuse_joins.ok()) return wire::ToGrpcStatus(owner_->script_.refuse_joins);
    response->set_session_id(kSessionId);
    response->set_epoch(owner_->epoch_);
    response->set_active(owner_->script_.active);
    *response->mutable_spec() = *wire::EncodeSessionSpec(owner_->spec_);
    v1::ShardAssignment* shard = response->mutable_shard_map()->add_assignments();
    shard->set_address(owner_->address());
    for (uint32_t i = 0; i < owner_->spec_.layers.size(); ++i) shard->add_layers(i);
    FillDirective(response->mutable_directive());
    return grpc::Status::OK;
  }
  grpc::Status ReportStep(grpc::ServerContext*, const v1::ReportStepRequest* request,
                          v1::ReportStepResponse* response) override {
    MutexLock lock(owner_->mu_);
    if (request->epoch() != owner_->epoch_) {
      return wire::ToGrpcStatus(
          ReasonedStatus(absl::StatusCode::kFailedPrecondition, ErrorReason::kStaleEpoch, "stale epoch"));
    }
    if (const absl::Status refusal = owner_->script_.refuse_report(*request); !refusal.ok()) {
      ++owner_->refused_reports_;
      owner_->changed_.notify_all();
      return wire::ToGrpcStatus(refusal);
    }
    const size_t before = owner_->reported_.size();
    if (owner_->script_.report_limit > 1) {
      for (const v1::StepReport& earlier : request->earlier()) owner_->reported_.push_back(earlier.step());
    }
    owner_->reported_.push_back(request->step());
    owner_->report_calls_.push_back(owner_->reported_.size() - before);
    owner_->changed_.notify_all();
    FillDirective(response->mutable_directive());
    return grpc::Status::OK;
  }

 private:
  void FillDirective(v1::Directive* directive) ABSL_EXCLUSIVE_LOCKS_REQUIRED(owner_->mu_) {
    directive->set_lease_through_step(owner_->script_.lease_through_step);
    directive->set_epoch(owner_->epoch_);
    directive->set_rollback_epoch(owner_->script_.rollback_epoch);
    directive->set_resume_step(owner_->script_.resume_step);
    directive->set_snapshot_at(owner_->script_.snapshot_at);
    directive->set_snapshot_id(owner_->script_.snapshot_id);
    directive->set_report_limit(owner_->script_.report_limit);
    v1::ModeInterval* second = directive->add_modes();
    second->set_mode(v1::MODE_SECOND_ORDER);
    v1::ModeInterval* first = directive->add_modes();
    first->set_first_step(50);
    first->set_mode(v1::MODE_FIRST_ORDER);
  }
  ScriptedServer* const owner_;
};

class ScriptedServer::Shard final : public v1::PreconditionService::Service {
 public:
  explicit Shard(ScriptedServer* owner) : owner_(owner) {}
  grpc::Status Exchange(grpc::ServerContext*, Stream* stream) override {
    return owner_->Serve(*stream) ? grpc::Status::OK
                                  : grpc::Status(grpc::StatusCode::UNAVAILABLE, "broken by the script");
  }

 private:
  ScriptedServer* const owner_;
};

class ScriptedServer::Admin final : public v1::AdminService::Service {
 public:
  explicit Admin(ScriptedServer* owner) : owner_(owner) {}

  grpc::Status GetServerInfo(grpc::ServerContext*, const v1::GetServerInfoRequest*,
                             v1::GetServerInfoResponse* response) override {
    response->set_role(v1::ROLE_ALL);
    MutexLock lock(owner_->mu_);
    response->set_version(owner_->script_.version);
    return grpc::Status::OK;
  }

 private:
  ScriptedServer* const owner_;
};

ScriptedServer::ScriptedServer(SessionSpec spec)
    : spec_(std::move(spec)),
      session_(std::make_unique<Session>(this)),
      shard_(std::make_unique<Shard>(this)),
      admin_(std::make_unique<Admin>(this)) {
  Start();
}

ScriptedServer::~ScriptedServer() { Stop(); }

std::string ScriptedServer::address() const { return absl::StrCat("127.0.0.1:", port_); }

void ScriptedServer::Start() {
  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(-1);
  int port = 0;
  builder.AddListeningPort(absl::StrCat("127.0.0.1:", port_), grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(session_.get());
  builder.RegisterService(shard_.get());
  builder.RegisterService(admin_.get());
  server_ = builder.BuildAndStart();
  PRECONDOR_CHECK(server_ != nullptr);
  port_ = port;
}

void ScriptedServer::Stop() {
  if (server_ == nullptr) return;
  server_->Shutdown(std::chrono::system_clock::now());
  server_->Wait();
  server_.reset();
}

void ScriptedServer::Change(const std::function<void(Script&)>& change) {
  MutexLock lock(mu_);
  change(script_);
  changed_.notify_all();
}

void ScriptedServer::BumpEpoch() {
  MutexLock lock(mu_);
  ++epoch_;
}

std::map<std::string, ScriptedServer::Stored> ScriptedServer::stored() const {
  MutexLock lock(mu_);
  return stored_;
}

int ScriptedServer::joins() const {
  MutexLock lock(mu_);
  return joins_;
}

uint64_t ScriptedServer::last_first_step() const {
  MutexLock lock(mu_);
  return last_first_step_;
}

std::vector<uint64_t> ScriptedServer::reported() const {
  MutexLock lock(mu_);
  return reported_;
}

std::vector<size_t> ScriptedServer::report_calls() const {
  MutexLock lock(mu_);
  return report_calls_;
}

bool ScriptedServer::AwaitJoins(int count) const {
  MutexLock lock(mu_);
  return changed_.wait_for(mu_, std::chrono::seconds(20),
                           [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return joins_ >= count; });
}

bool ScriptedServer::AwaitReported(size_t count) const {
  MutexLock lock(mu_);
  return changed_.wait_for(mu_, std::chrono::seconds(20),
                           [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return reported_.size() >= count; });
}

bool ScriptedServer::AwaitRefusedReports(int count) const {
  MutexLock lock(mu_);
  return changed_.wait_for(mu_, std::chrono::seconds(20),
                           [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return refused_reports_ >= count; });
}

int ScriptedServer::streams() const {
  MutexLock lock(mu_);
  return streams_;
}

std::vector<int> ScriptedServer::bundles() const {
  MutexLock lock(mu_);
  return bundles_;
}

bool ScriptedServer::Await(const std::function<bool(const std::map<std::string, Stored>& stored)>& condition) const {
  MutexLock lock(mu_);
  return changed_.wait_for(mu_, std::chrono::seconds(20),
                           [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return condition(stored_); });
}

bool ScriptedServer::Serve(Stream& stream) {
  v1::ExchangeResponse credit;
  credit.mutable_header()->set_kind(v1::FRAME_KIND_CREDIT);
  {
    MutexLock lock(mu_);
    ++streams_;
    credit.set_credit_bytes(script_.credit_bytes);
    credit.set_shard_generation(1);
    credit.set_takes_bundles(script_.takes_bundles);
  }
  if (!stream.Write(credit)) return false;
  {
    MutexLock lock(mu_);
    changed_.wait(mu_, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !script_.stalled; });
  }
  std::map<std::string, std::string> open;
  v1::ExchangeRequest request;
  while (stream.Read(&request)) {
    if (request.bundle_size() > 0) {
      MutexLock lock(mu_);
      bundles_.push_back(request.bundle_size());
    }
    for (const v1::ExchangeRequest& frame : FramesOf(request)) {
      if (!Take(stream, frame, open)) return false;
    }
  }
  return true;
}

bool ScriptedServer::Take(Stream& stream, const v1::ExchangeRequest& frame, std::map<std::string, std::string>& open) {
  const std::string key = KeyText(frame.header());
  std::string& payload = open[key];
  if (payload.size() != frame.header().chunk_offset()) return false;
  payload += frame.payload();
  if (payload.size() < frame.header().payload_bytes()) return true;
  if (!Answer(stream, frame.header(), payload)) return false;
  open.erase(key);
  return true;
}

bool ScriptedServer::Answer(Stream& stream, const v1::FrameHeader& header, const std::string& payload) {
  v1::ExchangeResponse answer;
  *answer.mutable_header() = header;
  answer.mutable_header()->clear_tensors();
  answer.set_contribution(header.kind());
  bool skip;
  v1::Decision decision;
  {
    MutexLock lock(mu_);
    absl::Status refusal = script_.refuse(header);
    if (header.epoch() != epoch_) {
      refusal = ReasonedStatus(absl::StatusCode::kFailedPrecondition, ErrorReason::kStaleEpoch, "stale epoch");
    }
    if (!refusal.ok()) {
      answer.mutable_header()->set_kind(v1::FRAME_KIND_ERROR);
      *answer.mutable_error() = wire::ToErrorDetail(refusal);
    } else {
      Stored& stored = stored_[KeyText(header)];
      stored.conflict |= stored.times > 0 && stored.payload != payload;
      stored.header = header;
      stored.payload = payload;
      answer.set_duplicate(stored.times++ > 0);
      answer.mutable_header()->set_kind(v1::FRAME_KIND_ACK);
      changed_.notify_all();
    }
    if (script_.silent) return true;
    skip = script_.skip_gradients || header.abstain();
    decision = script_.without_tensor;
  }
  if (!Write(stream, answer)) return false;
  if (answer.header().kind() == v1::FRAME_KIND_ERROR || header.kind() != v1::FRAME_KIND_GRADIENT) return true;
  if (!skip) return WriteResult(stream, header, Doubled(header, payload));
  v1::ExchangeResponse result;
  *result.mutable_header() = header;
  result.mutable_header()->set_kind(v1::FRAME_KIND_RESULT);
  result.mutable_header()->clear_tensors();
  result.mutable_header()->set_payload_bytes(0);
  result.mutable_outcome()->set_decision(decision);
  result.mutable_outcome()->set_reason("by the script");
  return Write(stream, result);
}

bool ScriptedServer::WriteResult(Stream& stream, const v1::FrameHeader& header, const std::string& payload) {
  uint64_t chunk_bytes;
  {
    MutexLock lock(mu_);
    chunk_bytes = script_.chunk_bytes;
  }
  for (uint64_t at = 0; at < payload.size(); at += chunk_bytes) {
    v1::ExchangeResponse result;
    *result.mutable_header() = header;
    result.mutable_header()->set_kind(v1::FRAME_KIND_RESULT);
    result.mutable_header()->set_chunk_offset(at);
    result.mutable_header()->set_payload_bytes(payload.size());
    result.mutable_outcome()->set_decision(v1::DECISION_PRECONDITIONED);
    result.mutable_outcome()->set_factor_version(header.step() + 1);
    result.set_payload(payload.substr(at, chunk_bytes));
    if (!Write(stream, result)) return false;
  }
  return true;
}

bool ScriptedServer::Write(Stream& stream, const v1::ExchangeResponse& response) {
  {
    MutexLock lock(mu_);
    auto& places = script_.break_after_frames;
    const auto place = std::find(places.begin(), places.end(), frames_);
    if (place != places.end()) {
      places.erase(place);
      return false;
    }
    ++frames_;
  }
  return stream.Write(response);
}

ClientOptions Options(const ScriptedServer& server) {
  ClientOptions options;
  options.coordinator = server.address();
  options.connect_timeout = absl::Seconds(20);
  return options;
}

}  // namespace precondor
