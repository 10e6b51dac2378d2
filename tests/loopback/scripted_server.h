// SPDX-License-Identifier: Apache-2.0
// A server for tests of the client: the real wire, answers by script. Its shard "preconditions" by doubling, keeps what
// it was sent by key, and can break streams, refuse frames or say nothing at a given place.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <grpcpp/server.h>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"

#include "kernels/base/mutex.h"
#include "kernels/base/session_spec.h"
#include "precondor/client.h"
#include "precondor/v1/admin.grpc.pb.h"
#include "precondor/v1/precondition.grpc.pb.h"
#include "precondor/v1/session.grpc.pb.h"

namespace precondor {

// Thread-safe. The script may be changed while it runs.
class ScriptedServer {
 public:
  struct Script {
    std::string version = PRECONDOR_VERSION;
    // Streams end after that many frames of an answer, counted over all streams; each place is used once.
    std::vector<int> break_after_frames;
    // The answer in place of ACK; OK: nothing special. Called per contribution, under the server's lock.
    std::function<absl::Status(const v1::FrameHeader& header)> refuse = [](const v1::FrameHeader&) {
      return absl::OkStatus();
    };
    bool silent = false;                              // takes everything in and answers nothing
    bool stalled = false;                             // reads no frame of a stream that begins now, until this is false
    bool skip_gradients = false;                      // decides SKIP
    v1::Decision without_tensor = v1::DECISION_SKIP;  // of answers without a tensor
    uint64_t credit_bytes = uint64_t{64} << 20;
    uint64_t chunk_bytes = uint64_t{1} << 20;  // of results
    bool takes_bundles = true;
    bool active = true;  // what JoinSession says
    uint64_t lease_through_step = 100;
    uint32_t report_limit = 1;
    uint64_t rollback_epoch = 0;
    uint64_t resume_step = 0;
    uint64_t snapshot_at = 0;
    uint64_t snapshot_id = 0;
    // The answer in place of taking a rank in; OK: nothing special.
    absl::Status refuse_joins;
    // The answer in place of a directive.
    std::function<absl::Status(const v1::ReportStepRequest& report)> refuse_report = [](const v1::ReportStepRequest&) {
      return absl::OkStatus();
    };
  };

  explicit ScriptedServer(SessionSpec spec);
  ~ScriptedServer();

  // "127.0.0.1:port"; the port stays the same over Stop and Start.
  std::string address() const;
  void Stop();
  void Start();

  void Change(const std::function<void(Script&)>& change);
  // From now on frames of an earlier epoch are refused as STALE_EPOCH.
  void BumpEpoch();

  struct Stored {
    v1::FrameHeader header;
    std::string payload;
    int times = 0;  // repetitions included
    bool conflict = false;
  };
  // The accepted contributions, by (kind, step, layer).
  std::map<std::string, Stored> stored() const;
  int joins() const;
  // first_step of the last JoinSession.
  uint64_t last_first_step() const;
  // Steps whose reports were answered with a directive, in order; and by call, how many it brought.
  std::vector<uint64_t> reported() const;
  std::vector<size_t> report_calls() const;
  // Waits for that many calls of JoinSession; false after 20 seconds.
  bool AwaitJoins(int count) const;
  // Waits until that many reports have been answered, or refused; false after 20 seconds.
  bool AwaitReported(size_t count) const;
  bool AwaitRefusedReports(int count) const;
  int streams() const;
  std::vector<int> bundles() const;  // numbers of frames of the messages with several, in order
  // Waits until `condition` holds; false after 20 seconds.
  bool Await(const std::function<bool(const std::map<std::string, Stored>& stored)>& condition) const;

 private:
  class Session;
  class Shard;
  class Admin;
  using Stream = grpc::ServerReaderWriter<v1::ExchangeResponse, v1::ExchangeRequest>;

  bool Serve(Stream& stream);
  // One whole contribution; false when the stream is to end.
  // Puts one frame to its contribution, which is answered when it is whole; false ends the stream.
  bool Take(Stream& stream, const v1::ExchangeRequest& frame, std::map<std::string, std::string>& open);
  bool Answer(Stream& stream, const v1::FrameHeader& header, const std::string& payload);
  bool Write(Stream& stream, const v1::ExchangeResponse& response);
  bool WriteResult(Stream& stream, const v1::FrameHeader& header, const std::string& payload);

  const SessionSpec spec_;
  std::unique_ptr<Session> session_;
  std::unique_ptr<Shard> shard_;
  std::unique_ptr<Admin> admin_;
  std::unique_ptr<grpc::Server> server_;
  int port_ = 0;

  mutable Mutex mu_;
  mutable CondVar changed_;
  Script script_ ABSL_GUARDED_BY(mu_);
  uint64_t epoch_ ABSL_GUARDED_BY(mu_) = 1;
  int joins_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t last_first_step_ ABSL_GUARDED_BY(mu_) = 0;
  int refused_reports_ ABSL_GUARDED_BY(mu_) = 0;
  std::vector<uint64_t> reported_ ABSL_GUARDED_BY(mu_);
  std::vector<size_t> report_calls_ ABSL_GUARDED_BY(mu_);
  int streams_ ABSL_GUARDED_BY(mu_) = 0;
  std::vector<int> bundles_ ABSL_GUARDED_BY(mu_);
  int frames_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<std::string, Stored> stored_ ABSL_GUARDED_BY(mu_);
};

// For clients of the server.
ClientOptions Options(const ScriptedServer& server);

}  // namespace precondor
