// SPDX-License-Identifier: Apache-2.0
// A worker's connection to one shard: one Exchange stream at a time, which is replaced when it breaks. An Outbox
// decides what is sent and sent again, and a PayloadPath how the payloads travel.
//
// States of a stream: kNone -> kOpening (call started, no credit yet) -> kOpen -> kClosing (broken or cancelled, its
// end not yet reported) -> kNone. Only Tick begins a stream, so that there are never two, and one reader receives all
// chunks of a result.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <grpcpp/generic/generic_stub.h>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/time/time.h"

#include "client/cpp/src/exchange_stream.h"
#include "client/cpp/src/outbox.h"
#include "client/cpp/src/payload_path.h"
#include "kernels/base/mutex.h"
#include "precondor/client.h"
#include "proto/wire/channel_security.h"
#include "proto/wire/frame_codec.h"
#include "proto/wire/shared_memory.h"

namespace precondor {

// Thread-safe. Read does not return a consistent snapshot of all counters.
struct TrafficCounters {
  std::atomic<int64_t> statistics_bytes{0};
  std::atomic<int64_t> gradient_bytes{0};
  std::atomic<int64_t> result_bytes{0};
  std::atomic<int64_t> overhead_bytes{0};
  std::atomic<int64_t> reconnects{0};

  Traffic Read() const {
    Traffic traffic;
    traffic.statistics_bytes = statistics_bytes.load(std::memory_order_relaxed);
    traffic.gradient_bytes = gradient_bytes.load(std::memory_order_relaxed);
    traffic.result_bytes = result_bytes.load(std::memory_order_relaxed);
    traffic.overhead_bytes = overhead_bytes.load(std::memory_order_relaxed);
    traffic.reconnects = reconnects.load(std::memory_order_relaxed);
    return traffic;
  }
};

// Sends contributions to one shard, and completes them with the shard's answers. Thread-safe. Hooks are called on
// gRPC's threads or in Tick, and never after the link's destruction. All hooks except `wake` are called without the
// link's lock; `wake` must not call the link.
class ShardLink : private ExchangeEvents {
 public:
  struct Options {
    std::string address;
    std::shared_ptr<const wire::ChannelSecurity> security;
    std::string traceparent;
    std::string session;  // name of the session, for messages
    uint64_t session_id = 0;
    uint32_t rank = 0;
    uint64_t incarnation = 0;
    std::string secret;  // secret of the session
    uint64_t epoch = 0;
    absl::Duration connect_timeout;  // until the first frame of a new stream
    absl::Duration result_timeout;   // timeout from which deadlines were computed, for messages
    bool keep_gradients = false;     // other ranks may need this rank's again if the shard is lost
  };
  struct Hooks {
    std::function<void()> wake;                       // there is work for Tick
    std::function<void(uint64_t epoch)> stale_epoch;  // `epoch` is over: join again
    // The first step of the last first-order run; 0: none. Null for a worker that has factors itself.
    std::function<uint64_t()> last_first_order;
    std::function<void()> forgotten;                 // the shard does not know the session: ask the coordinator
    std::function<void(const absl::Status&)> fatal;  // the worker cannot continue
    std::function<void(const absl::Status&)> refused_statistics;
    std::function<void(uint32_t layer, uint64_t updates)> updates_lost;  // the shard goes on with older factors
  };

  // `traffic` must outlive the link.
  ShardLink(Options options, Hooks hooks, TrafficCounters& traffic);
  // Ends the stream: cancels it if anything is outstanding, and half-closes it otherwise. Remaining contributions fail
  // as CANCELLED.
  ~ShardLink() override;

  const std::string& address() const { return options_.address; }
  // The shard's backend, as its last stream said; empty before the first one.
  std::string backend() const {
    MutexLock lock(mu_);
    return backend_;
  }

  // For callers that place a payload themselves before they submit it.
  PayloadPath& path() { return path_; }

  // Sends a contribution. Returns ALREADY_EXISTS for a key without its answer, UNAVAILABLE for a contribution in a slot
  // whose region has ended, and after Fail its status.
  absl::Status Submit(Outbox::Item item);
  // Sends what Submit has held back because it may wait.
  void SendHeld();
  // Connects if it is time, and fails contributions past their deadlines. Returns the time by which to call it again.
  absl::Time Tick(absl::Time now);
  // Enters a new epoch: unanswered contributions are sent again under it, on a new stream.
  void ChangeEpoch(uint64_t epoch);
  // Removes and returns the state of layers that move to another shard in the epoch that ChangeEpoch has set. Cancels
  // the stream and waits for its end, so that no other stream writes into a result's memory. Tick begins a new stream.
  Outbox::Moved TakeLayers(const std::set<uint32_t>& layers);
  // Takes over the state of layers from another link, and sends what is unanswered.
  void Adopt(Outbox::Moved moved);
  // See Outbox.
  void BeginAt(uint32_t layer, uint64_t step, uint64_t factor_version);
  std::optional<uint64_t> answered_through() const;
  // Fails all current and later contributions with `status`.
  void Fail(const absl::Status& status);
  // Waits until all contributions are acknowledged. Returns false if the deadline passes first.
  bool WaitAcknowledged(absl::Time deadline);
  size_t unacknowledged() const;

 private:
  enum class StreamState : uint8_t { kNone, kOpening, kOpen, kClosing };
  static constexpr absl::Duration kFirstBackoff = absl::Milliseconds(20);

  void OnRead(absl::StatusOr<wire::Received<v1::ExchangeResponse>> message, size_t bytes) override;
  void OnWriteDone(bool ok) override;
  void OnBroken() override;
  // Later streams use gRPC.
  void OnMemoryBroken(const absl::Status& status) override;
  void OnStreamDone(const grpc::Status& status) override;
  void OnFrame(const v1::ExchangeResponse& message, const wire::ReceivedBytes& payload);

  // Opens the stream, or first asks for shared memory if the shard offers it to this process.
  void OnCredit(const v1::ExchangeResponse& credit);
  bool AskForSharedMemory(const v1::ExchangeResponse& credit);
  // Take the shard's answer to a request for a ring.
  void OnRing(const v1::Ring& ring);
  void OnRingRefused(const absl::Status& status);
  // Opens the stream if it waits for shared memory. Returns false if it does not. A null `memory` means that messages
  // travel by gRPC.
  bool OpenWith(std::unique_ptr<wire::SharedMemory> memory);
  void Open(const v1::ExchangeResponse& credit, std::unique_ptr<wire::SharedMemory> memory);
  void OnAck(const ContributionId& id, uint64_t epoch, uint64_t updates_lost);
  void OnResult(const ContributionId& id, const v1::ExchangeResponse& message, const wire::ReceivedBytes& payload);
  // Takes an answer from the contribution's slot, and then calls Answer.
  void TakeFromSlot(Outbox::Item item, const v1::ExchangeResponse& message, const wire::ReceivedBytes& payload,
                    Preconditioned outcome);
  void OnRefused(const ContributionId& id, uint64_t epoch, const absl::Status& status);
  void OnProtocolError(const absl::Status& status);
  // Returns the key of a frame; nullopt if the frame is of another session or epoch.
  std::optional<ContributionId> MatchKey(const v1::FrameHeader& header, v1::FrameKind kind) const;
  // After the end of a region, replaces contributions in its slots by inline ones. Call before the next stream may
  // begin.
  void SendSlotsInline();
  // Completes one gradient, pull or fetch with `outcome`, or fails it if `complete` is an error.
  void Answer(Outbox::Item item, const absl::Status& complete, Preconditioned outcome);
  // `broken`: why the last connection failed, OK if one is there.
  absl::Status LateError(const ContributionId& id, const absl::Status& broken) const;
  void Connect(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void CancelStream() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Writes what is ready, until a write has to wait.
  void Pump() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Writes one message. Returns false if there is none.
  bool WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Write(const grpc::ByteBuffer& message, bool more) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::optional<Outbox::Frame> NextFrame(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Writes one message: one frame, or a bundle of several.
  void WriteFrames(const std::vector<Outbox::Frame>& frames, bool more) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void WriteRegionRequest(v1::Ring wanted) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Sets all fields except those of PayloadPath::Describe.
  v1::FrameHeader MakeHeader(const Contribution& item) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void NotifyIfAcknowledged() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const Options options_;
  const Hooks hooks_;
  TrafficCounters& traffic_;

  mutable Mutex mu_;
  CondVar changed_;
  std::unique_ptr<grpc::GenericStub> stub_
      ABSL_GUARDED_BY(mu_);  // has the channel; null before a stream and after Fail
  bool renew_channel_ ABSL_GUARDED_BY(mu_) = false;
  std::unique_ptr<ExchangeStream> stream_ ABSL_GUARDED_BY(mu_);  // in state kNone: null, or a stream that has ended
  StreamState state_ ABSL_GUARDED_BY(mu_) = StreamState::kNone;
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  int held_ ABSL_GUARDED_BY(mu_) = 0;                // contributions that Submit has not sent, because they may wait
  bool bundles_ ABSL_GUARDED_BY(mu_) = false;        // this stream's shard takes bundles
  bool showed_secret_ ABSL_GUARDED_BY(mu_) = false;  // on this stream
  std::optional<Outbox::Frame> ahead_ ABSL_GUARDED_BY(mu_);  // taken from the outbox, to be written next
  absl::Time opening_deadline_ ABSL_GUARDED_BY(mu_);
  // In kOpening: the shard's first frame, while this link waits for shared memory.
  std::optional<v1::ExchangeResponse> opening_ ABSL_GUARDED_BY(mu_);
  absl::Time connect_at_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
  absl::Duration backoff_ ABSL_GUARDED_BY(mu_);
  bool closing_ ABSL_GUARDED_BY(mu_) = false;
  bool moving_ ABSL_GUARDED_BY(mu_) = false;  // TakeLayers is running: no new stream begins
  uint64_t epoch_ ABSL_GUARDED_BY(mu_);
  absl::Status failed_ ABSL_GUARDED_BY(mu_);
  std::string backend_ ABSL_GUARDED_BY(mu_);
  absl::Status memory_broken_ ABSL_GUARDED_BY(mu_);
  absl::Status broken_ ABSL_GUARDED_BY(mu_);  // end of the last stream; OK once the next one is open
  Outbox outbox_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_set<ContributionId> taking_ ABSL_GUARDED_BY(mu_);  // answers that are being taken from their slots

  PayloadPath path_;  // last, because its hook uses the members above
};

}  // namespace precondor
