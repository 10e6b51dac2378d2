// SPDX-License-Identifier: Apache-2.0
// A worker's connection to one shard: one Exchange stream at a time, made again when it breaks, over an Outbox that
// knows what has to be sent again. A PayloadPath knows how the payloads travel.
//
// Life of a stream: kNone -> kOpening (call started, no credit yet) -> kOpen -> kClosing (broken or cancelled, its end
// not yet reported) -> kNone. A new one is begun by Tick only, so that there are never two and each result's chunks
// come from one reader.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"

#include "client/cpp/src/outbox.h"
#include "client/cpp/src/payload_path.h"
#include "client/cpp/src/traffic.h"
#include "client/cpp/src/worker_collective_session.h"
#include "kernels/base/mutex.h"
#include "proto/wire/channel_security.h"
#include "proto/wire/frame_codec.h"

namespace grpc {
class ByteBuffer;
class Status;
}  // namespace grpc

namespace precondor {

// Thread-safe. Hooks are called on gRPC's threads or in Tick, never after the link's end; all but `wake`, which must
// not call back, without its lock.
class ShardLink {
 public:
  struct Options {
    std::string address;
    std::shared_ptr<const wire::ChannelSecurity> security;
    std::string traceparent;
    std::string session;  // its name, for messages
    uint64_t session_id = 0;
    uint32_t rank = 0;
    uint64_t incarnation = 0;
    std::string secret;  // the session's
    uint64_t epoch = 0;
    absl::Duration connect_timeout;  // until a new stream's first frame
    absl::Duration result_timeout;   // that contributions' deadlines were made with, for messages
    bool keep_gradients = false;     // other ranks may need this one's again when the shard is lost
    bool may_lose_shard = false;     // its layers may go to other shards
    std::optional<WorkerCollectiveSession::Options> plane;  // see PayloadPath::Options::collective
  };
  struct Hooks {
    std::function<void()> wake;                        // Tick has something to do
    std::function<void(uint64_t epoch)> stale_epoch;   // join again
    std::function<uint64_t()> drop_unanswered_before;  // see Outbox; null: every RESUME stays
    std::function<void()> forgotten;                   // the shard does not know the session: is there one?
    std::function<void(const absl::Status&)> fatal;    // the worker is done for
    std::function<void(const absl::Status&)> refused_statistics;
    // See WorkerCollectiveSession; on a thread of the link.
    std::function<absl::StatusOr<PlaneRendezvous>(uint64_t epoch)> ask_plane;
    std::function<void(uint64_t epoch, const absl::Status& why)> decline_plane;
  };

  // `traffic` outlives the link.
  ShardLink(Options options, Hooks hooks, TrafficCounters& traffic);
  // Ends the stream: at once when something is outstanding, in order otherwise. Whatever is left fails as Cancelled.
  ~ShardLink();

  const std::string& address() const { return options_.address; }

  // How this link's payloads travel, for callers that place one themselves before they submit it.
  PayloadPath& path() { return path_; }

  // AlreadyExists for a key not yet answered; Unavailable for one in a slot whose region is gone; after Fail, its
  // status.
  absl::Status Submit(Outbox::Item item);
  // Connects when due, gives up what is past its deadline; returns when to be called again at the latest.
  absl::Time Tick(absl::Time now);
  // The session has a new epoch: everything unanswered is sent again under it, on a new stream.
  void ChangeEpoch(uint64_t epoch);
  // Layers go to another shard in the epoch that ChangeEpoch has named. Waits for the stream to end, which cancelling
  // it makes certain, so that no result is written twice; a new one begins with Tick.
  Outbox::Moved TakeLayers(const std::set<uint32_t>& layers);
  // Sends what another link has not been answered.
  void Adopt(Outbox::Moved moved);
  // See Outbox.
  void BeginAt(uint32_t layer, uint64_t step);
  std::optional<uint64_t> answered_through() const;
  // Answers everything with `status`, now and from now on.
  void Fail(const absl::Status& status);
  // False when something was still unacknowledged at the deadline.
  bool WaitAcknowledged(absl::Time deadline);
  size_t unacknowledged() const;

 private:
  class Stream;
  enum class StreamState : uint8_t { kNone, kOpening, kOpen, kClosing };
  static constexpr absl::Duration kFirstBackoff = absl::Milliseconds(20);

  void ToStream(const std::vector<ContributionId>& ids);

  // From the stream.
  void OnRead(const grpc::ByteBuffer& buffer);
  void OnFrame(const v1::ExchangeResponse& message, const wire::ReceivedBytes& payload);
  void OnWriteDone(bool ok);
  void OnBroken();
  void OnStreamDone(const grpc::Status& status);

  void OnCredit(const v1::ExchangeResponse& credit);
  void OnAck(const ContributionId& id);
  void OnResult(const ContributionId& id, const v1::ExchangeResponse& message, const wire::ReceivedBytes& payload);
  void OnRefused(const ContributionId& id, const absl::Status& status);
  void OnProtocolError(const absl::Status& status);
  // Null when the frame is not of the current epoch.
  std::optional<ContributionId> MatchKey(const v1::FrameHeader& header, v1::FrameKind kind) const;
  // The region is gone: what lies in its slots goes inline. Before the next stream may begin.
  void SendSlotsInline();
  // One gradient, pull or fetch has its whole answer; or an error, that of `complete`.
  void Answer(Outbox::Item item, const absl::Status& complete, Preconditioned outcome);
  absl::Status LateError(const ContributionId& id) const;
  void Connect(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void CancelStream() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Pump() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::optional<Outbox::Frame> NextFrame(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // What the frame takes in a bundle; too much for any when it may not be in one.
  static size_t BundledBytes(const Outbox::Frame& frame);
  // One message: the frame, or a bundle of several.
  void WriteFrames(const std::vector<Outbox::Frame>& frames, bool more) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void WriteRegionRequest(v1::Ring wanted) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // All but what PayloadPath::Describe sets.
  v1::FrameHeader MakeHeader(const Contribution& item) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void NotifyIfAcknowledged() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const Options options_;
  const Hooks hooks_;
  TrafficCounters& traffic_;

  mutable Mutex mu_;
  CondVar changed_;
  class Channel;
  std::unique_ptr<Channel> channel_ ABSL_GUARDED_BY(mu_);
  bool renew_channel_ ABSL_GUARDED_BY(mu_) = false;
  std::unique_ptr<Stream> stream_ ABSL_GUARDED_BY(mu_);  // in state kNone: none, or one that has ended
  StreamState state_ ABSL_GUARDED_BY(mu_) = StreamState::kNone;
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool showed_secret_ ABSL_GUARDED_BY(mu_) = false;          // on this stream
  std::optional<Outbox::Frame> ahead_ ABSL_GUARDED_BY(mu_);  // taken from the outbox, to be written next
  absl::Time opening_deadline_ ABSL_GUARDED_BY(mu_);
  absl::Time connect_at_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
  absl::Duration backoff_ ABSL_GUARDED_BY(mu_);
  bool closing_ ABSL_GUARDED_BY(mu_) = false;
  bool moving_ ABSL_GUARDED_BY(mu_) = false;  // TakeLayers is under way: no new stream
  uint64_t epoch_ ABSL_GUARDED_BY(mu_);
  absl::Status failed_ ABSL_GUARDED_BY(mu_);
  Outbox outbox_ ABSL_GUARDED_BY(mu_);

  PayloadPath path_;  // last: its hooks use all of the above
};

}  // namespace precondor
