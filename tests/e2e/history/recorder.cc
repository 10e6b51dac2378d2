// SPDX-License-Identifier: Apache-2.0
// A program that has this file writes down what it tells the service and what the service tells it, for checker.py: an
// event for each session call, its answer, and each frame, if the environment's PRECONDOR_HISTORY names a file. Each
// line is a JSON object, and in the file before the event takes effect; a process that comes later appends. Times are
// nanoseconds of CLOCK_MONOTONIC, which processes of a machine share.
//
//   {"t": 0, "event": "begin"}                                                         a process
//   {"t": 1, "event": "call", "id": 1, "method": "JoinSession", "body": {...}}         the request, as protobuf's JSON
//   {"t": 2, "event": "return", "id": 1, "method": "JoinSession", "code": 0, "body": {...}}
//   {"t": 3, "event": "send", "kind": "GRADIENT", "step": 1, "layer": 0, ...}          the first chunk of a
//   contribution
//   {"t": 4, "event": "receive", "kind": "RESULT", ..., "decision": "PRECONDITIONED", "hash": 1}   its last chunk
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <google/protobuf/util/json_util.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/support/client_interceptor.h>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>
#include <zlib.h>

#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include <nlohmann/json.hpp>

#include "kernels/base/mutex.h"
#include "precondor/v1/precondition.pb.h"
#include "precondor/v1/session.pb.h"
#include "tests/support/bundles.h"

namespace precondor::e2e {
namespace {

using Json = nlohmann::ordered_json;
using grpc::experimental::InterceptionHookPoints;

int64_t Now() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

class HistoryFile {
 public:
  explicit HistoryFile(const std::string& path) : file_(path, std::ios::app) {
    file_ << "\n";  // ends the line that a process was killed in
    Write({{"event", "begin"}});
  }

  void Write(const Json& event) {
    MutexLock lock(mu_);
    Json line = {{"t", Now()}};
    line.update(event);
    file_ << line.dump() << std::endl;
  }
  int64_t NextId() {
    MutexLock lock(mu_);
    return ++last_id_;
  }

 private:
  Mutex mu_;
  std::ofstream file_ ABSL_GUARDED_BY(mu_);
  int64_t last_id_ ABSL_GUARDED_BY(mu_) = 0;
};

std::string BytesOf(const grpc::ByteBuffer& buffer) {
  std::string bytes;
  std::vector<grpc::Slice> slices;
  if (!buffer.Dump(&slices).ok()) return bytes;
  for (const grpc::Slice& slice : slices) bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  return bytes;
}

Json BodyOf(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  options.always_print_primitive_fields = true;
  std::string text;
  if (!google::protobuf::util::MessageToJsonString(message, &text, options).ok()) return nullptr;
  return Json::parse(text, nullptr, false);
}

std::unique_ptr<google::protobuf::Message> RequestOf(absl::string_view method) {
  if (method == "OpenSession") return std::make_unique<v1::OpenSessionRequest>();
  if (method == "JoinSession") return std::make_unique<v1::JoinSessionRequest>();
  if (method == "ReportStep") return std::make_unique<v1::ReportStepRequest>();
  if (method == "LeaveSession") return std::make_unique<v1::LeaveSessionRequest>();
  return std::make_unique<v1::CloseSessionRequest>();
}

class SessionCall final : public grpc::experimental::Interceptor {
 public:
  SessionCall(HistoryFile& file, absl::string_view method) : file_(file), method_(method), id_(file.NextId()) {}

  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_MESSAGE)) {
      const std::unique_ptr<google::protobuf::Message> request = RequestOf(method_);
      request->ParseFromString(BytesOf(*methods->GetSerializedSendMessage()));
      file_.Write({{"event", "call"}, {"id", id_}, {"method", method_}, {"body", BodyOf(*request)}});
    }
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::POST_RECV_MESSAGE) &&
        methods->GetRecvMessage() != nullptr) {
      // Generated stubs receive into this base of their messages.
      auto* received = static_cast<google::protobuf::MessageLite*>(methods->GetRecvMessage());
      answer_ = BodyOf(*static_cast<google::protobuf::Message*>(received));
    }
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::POST_RECV_STATUS)) {
      const int code = methods->GetRecvStatus()->error_code();
      file_.Write({{"event", "return"}, {"id", id_}, {"method", method_}, {"code", code}, {"body", answer_}});
    }
    methods->Proceed();
  }

 private:
  HistoryFile& file_;
  const std::string method_;
  const int64_t id_;
  Json answer_;
};

std::string ShortName(absl::string_view name) {
  for (const absl::string_view prefix : {"FRAME_KIND_", "DECISION_", "MODE_"}) {
    if (absl::ConsumePrefix(&name, prefix)) break;
  }
  return std::string(name);
}

Json FrameEvent(absl::string_view event, const v1::FrameHeader& header) {
  return {{"event", event},         {"kind", ShortName(v1::FrameKind_Name(header.kind()))},
          {"step", header.step()},  {"layer", header.layer()},
          {"rank", header.rank()},  {"incarnation", header.incarnation()},
          {"epoch", header.epoch()}};
}

class ExchangeStream final : public grpc::experimental::Interceptor {
 public:
  explicit ExchangeStream(HistoryFile& file) : file_(file) {}

  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_MESSAGE)) {
      v1::ExchangeRequest frame;
      if (frame.ParseFromString(BytesOf(*methods->GetSerializedSendMessage()))) Send(frame);
    }
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::POST_RECV_MESSAGE) &&
        methods->GetRecvMessage() != nullptr) {
      v1::ExchangeResponse frame;
      if (frame.ParseFromString(BytesOf(*static_cast<grpc::ByteBuffer*>(methods->GetRecvMessage())))) Receive(frame);
    }
    methods->Proceed();
  }

 private:
  void Send(const v1::ExchangeRequest& frame) {
    if (frame.bundle_size() > 0) {
      for (const v1::ExchangeRequest& one : FramesOf(frame)) Send(one);
      return;
    }
    if (!frame.has_header() || frame.header().chunk_offset() > 0) return;
    Json event = FrameEvent("send", frame.header());
    event["mode"] = ShortName(v1::Mode_Name(frame.header().mode()));
    event["abstain"] = frame.header().abstain();
    file_.Write(event);
  }

  void Receive(const v1::ExchangeResponse& frame) {
    if (frame.bundle_size() > 0) {
      for (const v1::ExchangeResponse& one : FramesOf(frame)) Receive(one);
      return;
    }
    const v1::FrameHeader& header = frame.header();
    if (header.kind() == v1::FRAME_KIND_CREDIT) return;
    Json event = FrameEvent("receive", header);
    event["contribution"] = ShortName(v1::FrameKind_Name(frame.contribution()));
    if (header.kind() == v1::FRAME_KIND_ACK && frame.updates_lost() > 0) event["updates_lost"] = frame.updates_lost();
    if (header.kind() == v1::FRAME_KIND_ERROR) {
      event["reason"] = v1::ErrorReason_Name(frame.error().reason());
    } else if (header.kind() == v1::FRAME_KIND_RESULT) {
      uint64_t& hash = hashes_[{header.epoch(), header.step(), header.layer(), frame.contribution()}];
      if (header.chunk_offset() == 0) hash = 0;
      hash = crc32_z(hash, reinterpret_cast<const Bytef*>(frame.payload().data()), frame.payload().size());
      if (header.chunk_offset() + frame.payload().size() < header.payload_bytes()) return;
      event["decision"] = ShortName(v1::Decision_Name(frame.outcome().decision()));
      event["factor_version"] = frame.outcome().factor_version();
      event["hash"] = hash;
    }
    file_.Write(event);
  }

  HistoryFile& file_;
  // The hashes of answers of which chunks have come, by epoch, step, layer and kind of the contribution.
  std::map<std::tuple<uint64_t, uint64_t, uint32_t, int>, uint64_t> hashes_;
};

// Lets a call through as it is.
class Unrecorded final : public grpc::experimental::Interceptor {
 public:
  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override { methods->Proceed(); }
};

class Recorder final : public grpc::experimental::ClientInterceptorFactoryInterface {
 public:
  explicit Recorder(const std::string& path) : file_(path) {}

  grpc::experimental::Interceptor* CreateClientInterceptor(grpc::experimental::ClientRpcInfo* info) override {
    absl::string_view method = info->method();
    if (absl::ConsumePrefix(&method, "/precondor.v1.SessionService/")) return new SessionCall(file_, method);
    if (method == "/precondor.v1.PreconditionService/Exchange") return new ExchangeStream(file_);
    return new Unrecorded();
  }

 private:
  HistoryFile file_;
};

// Before main, and so before the first channel.
const bool kRecords = [] {
  const char* path = std::getenv("PRECONDOR_HISTORY");
  if (path == nullptr) return false;
  // Calls can end after main has.
  grpc::experimental::RegisterGlobalClientInterceptorFactory(new Recorder(path));
  return true;
}();

}  // namespace
}  // namespace precondor::e2e
