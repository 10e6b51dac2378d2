// SPDX-License-Identifier: Apache-2.0
// Whole streams and calls on a server in this process: an input is what two ranks of a job and an intruder do, one
// after the other. Each action is three bytes: who, what, and what with. The intruder has seen the session's numbers
// and not its secret.
//
// After each input both ranks have had the same answers, the intruder has had none, the session can be closed, and
// another job gets its answers.
#include <algorithm>
#include <array>
#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "kernels/base/check.h"
#include "kernels/base/mutex.h"
#include "tests/fuzz/fuzz.h"
#include "tests/loopback/raw_client.h"

namespace precondor::fuzz {
namespace {

constexpr int kRanks = 2;
constexpr int kIntruder = kRanks;
constexpr size_t kMaxActions = 64;

RawServer& TheServer() {
  static RawServer server([] {
    ServerConfig config;
    config.window_steps = 3;
    return config;
  }());
  return server;
}

// A stream, and a thread that reads it until it ends.
class Stream {
 public:
  Stream() : call_(TheServer().data->Exchange(&context_)), reader_([this] { Read(); }) {}
  ~Stream() {
    context_.TryCancel();
    reader_.join();
    call_->Finish().error_code();
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // Nothing after the half-close, which gRPC's client does not allow.
  void Write(const v1::ExchangeRequest& frame) {
    if (!half_closed_) call_->Write(frame);
  }
  void HalfClose() {
    if (!std::exchange(half_closed_, true)) call_->WritesDone();
  }
  void Cancel() {
    half_closed_ = true;
    context_.TryCancel();
  }
  // Waits until all that was written before has been acknowledged or refused, or the stream has ended.
  void Settle() {
    if (half_closed_) return;
    v1::ExchangeRequest last;  // of no session
    last.mutable_header()->set_layer(kLast);
    call_->Write(last);
    MutexLock lock(mu_);
    PRECONDOR_CHECK(changed_.wait_for(mu_, std::chrono::seconds(20),
                                      [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return settled_; }));
  }

  // All that has come but CREDIT, and bundles taken apart.
  std::vector<v1::ExchangeResponse> answers() const {
    MutexLock lock(mu_);
    return answers_;
  }

 private:
  void Read() {
    v1::ExchangeResponse frame;
    while (call_->Read(&frame)) {
      MutexLock lock(mu_);
      for (const v1::ExchangeResponse& one : FramesOf(frame)) Take(one);
    }
    MutexLock lock(mu_);
    settled_ = true;
    changed_.notify_all();
  }
  void Take(const v1::ExchangeResponse& frame) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (frame.header().layer() == kLast) {
      settled_ = true;
      changed_.notify_all();
    } else if (frame.header().kind() != v1::FRAME_KIND_CREDIT) {
      answers_.push_back(frame);
    }
  }

  static constexpr uint32_t kLast = 0xFFFF;

  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::ExchangeRequest, v1::ExchangeResponse>> call_;
  bool half_closed_ = false;
  mutable Mutex mu_;
  CondVar changed_;
  bool settled_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<v1::ExchangeResponse> answers_ ABSL_GUARDED_BY(mu_);
  std::thread reader_;
};

class Actor {
 public:
  Actor(int number, std::string session, v1::JoinSessionResponse joined)
      : number_(number), session_(std::move(session)), joined_(std::move(joined)) {
    if (number_ == kIntruder) joined_.set_secret("");
  }

  void Act(uint8_t what, uint8_t with) {
    const uint64_t step = with & 7;
    const int layer = (with >> 3) & 1;
    switch (what % 16) {
      case 0:
        return Send(Contribution(v1::FRAME_KIND_STATISTICS, step, layer));
      case 1:
        return Send(Contribution(v1::FRAME_KIND_GRADIENT, step, layer));
      case 2:  // both as one message, as clients do
        return SendTogether(step, layer);
      case 3: {
        v1::ExchangeRequest frame = Contribution(v1::FRAME_KIND_GRADIENT, step, layer);
        Spoil(frame, with >> 4);
        return Send(frame);
      }
      case 4:  // a part of one that ends later, or never
        return SendChunk(step, layer, (with >> 4) & 3);
      case 5: {
        v1::ExchangeRequest frame = Contribution(v1::FRAME_KIND_GRADIENT, step, layer);
        Abstain(frame);
        return Send(frame);
      }
      case 6: {
        v1::ExchangeRequest frame = Contribution(v1::FRAME_KIND_RESUME, step, layer);
        Abstain(frame);
        frame.mutable_header()->set_abstain((with & 16) != 0);
        frame.mutable_header()->set_factor_version(with >> 5);
        return Send(frame);
      }
      case 7: {
        v1::ExchangeRequest frame =
            Contribution((with & 16) != 0 ? v1::FRAME_KIND_FETCH : v1::FRAME_KIND_PULL, step, layer);
        Abstain(frame);
        frame.mutable_header()->set_abstain(false);
        frame.mutable_header()->set_samples(0);
        return Send(frame);
      }
      case 8:
        current_ = with & 1;
        return Begin();
      case 9:
        return stream().HalfClose();
      case 10:
        return stream().Cancel();
      case 11:
        return Join(step, (with & 16) != 0);
      case 12:
        return Report(step);
      case 13:
        current_ = with & 1;
        return;
      case 14:
        if ((with & 0xF0) == 0) Leave();
        return;
      default: {
        v1::ExchangeRequest frame;  // of no session
        frame.mutable_header()->set_kind(static_cast<v1::FrameKind>(with & 15));
        frame.set_payload(std::string(with, 'x'));
        return Send(frame);
      }
    }
  }

  void Settle() const {
    for (const std::unique_ptr<Stream>& stream : streams_) {
      if (stream != nullptr) stream->Settle();
    }
  }

  std::vector<v1::ExchangeResponse> answers() const {
    std::vector<v1::ExchangeResponse> all = ended_;
    for (const std::unique_ptr<Stream>& stream : streams_) {
      if (stream == nullptr) continue;
      const std::vector<v1::ExchangeResponse> its = stream->answers();
      all.insert(all.end(), its.begin(), its.end());
    }
    return all;
  }

  // The job has gone back, as far as this actor knows.
  bool rolled_back() const { return joined_.directive().rollback_epoch() > 0; }

 private:
  // Another stream in place of the current one.
  void Begin() {
    std::unique_ptr<Stream>& stream = streams_[current_];
    if (stream != nullptr) {
      for (v1::ExchangeResponse& answer : stream->answers()) ended_.push_back(std::move(answer));
    }
    stream = std::make_unique<Stream>();
  }
  Stream& stream() {
    if (streams_[current_] == nullptr) Begin();
    return *streams_[current_];
  }
  void Send(const v1::ExchangeRequest& frame) { stream().Write(frame); }
  uint32_t rank() const { return static_cast<uint32_t>(number_ == kIntruder ? 0 : number_); }

  v1::ExchangeRequest Contribution(v1::FrameKind kind, uint64_t step, int layer) const {
    v1::ExchangeRequest frame;
    const bool gradient = kind != v1::FRAME_KIND_STATISTICS;
    *frame.mutable_header() =
        RawHeader(joined_, gradient ? v1::FRAME_KIND_GRADIENT : v1::FRAME_KIND_STATISTICS, step, layer);
    frame.mutable_header()->set_kind(kind);
    frame.mutable_header()->set_rank(rank());
    frame.mutable_header()->set_incarnation(incarnation_);
    const int elements = gradient ? kRawRows[layer] * kRawCols[layer] : kRawRows[layer] + kRawCols[layer];
    frame.set_payload(RawFloats(elements, step * 4 + rank() + 1));
    return frame;
  }

  static void Abstain(v1::ExchangeRequest& frame) {
    frame.mutable_header()->set_abstain(true);
    frame.mutable_header()->clear_tensors();
    frame.mutable_header()->set_payload_bytes(0);
    frame.clear_payload();
  }

  static void Spoil(v1::ExchangeRequest& frame, int how) {
    v1::FrameHeader& header = *frame.mutable_header();
    switch (how) {
      case 0:
        return header.set_epoch(header.epoch() + 1);
      case 1:
        return header.set_rank(header.rank() + kRanks);
      case 2:
        return header.set_layer(7);
      case 3:
        return header.set_payload_bytes(uint64_t{1} << 40);
      case 4:
        return header.set_step(uint64_t{1} << 47);
      case 5:
        return header.set_mode(v1::MODE_FIRST_ORDER);
      case 6:
        return header.set_samples(0);
      case 7:
        return header.set_incarnation(1);
      case 8:
        return header.set_chunk_offset(8);
      case 9:
        return header.set_ring_offset(64);
      case 10:
        return header.mutable_tensors(0)->set_dims(0, 0);
      case 11:
        return header.mutable_tensors(0)->set_data_type(v1::DATA_TYPE_BF16);
      case 12:
        return frame.set_payload(std::string(frame.payload().size(), '\xff'));  // no finite numbers
      case 13:
        return header.set_session_id(header.session_id() + 1);
      case 14:
        return header.add_parts()->set_rows(1);
      default:
        return header.set_secret("a guess");
    }
  }

  void SendTogether(uint64_t step, int layer) {
    Send(BundleOf<v1::ExchangeRequest>(
        {Contribution(v1::FRAME_KIND_STATISTICS, step, layer), Contribution(v1::FRAME_KIND_GRADIENT, step, layer)}));
  }

  void SendChunk(uint64_t step, int layer, int quarter) {
    v1::ExchangeRequest frame = Contribution(v1::FRAME_KIND_GRADIENT, step, layer);
    const size_t whole = frame.payload().size(), begin = whole * quarter / 4;
    frame.mutable_header()->set_chunk_offset(begin);
    frame.set_payload(frame.payload().substr(begin, whole / 4));
    Send(frame);
  }

  // Calls the coordinator, which answers in time and refuses the intruder.
  template <typename Request, typename Response>
  grpc::Status Ask(grpc::Status (v1::SessionService::Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                   const Request& request, Response& response) const {
    TimedContext context;
    const grpc::Status status = (*TheServer().sessions.*method)(&context, request, &response);
    PRECONDOR_CHECK(status.error_code() != grpc::StatusCode::DEADLINE_EXCEEDED);
    PRECONDOR_CHECK(number_ != kIntruder || !status.ok());
    return status;
  }

  void Join(uint64_t first_step, bool as_another) {
    v1::JoinSessionRequest request;
    request.set_name(session_);
    request.set_rank(rank());
    request.set_incarnation(incarnation_ + (as_another ? 1 : 0));
    request.set_first_step(first_step);
    request.set_secret(number_ == kIntruder ? "a guess" : joined_.secret());
    v1::JoinSessionResponse response;
    const grpc::Status status = Ask(&v1::SessionService::Stub::JoinSession, request, response);
    if (!status.ok()) return;
    incarnation_ = request.incarnation();
    joined_ = std::move(response);
  }

  void Report(uint64_t step) {
    v1::ReportStepRequest request;
    request.set_session_id(joined_.session_id());
    request.set_epoch(joined_.epoch());
    request.set_rank(rank());
    request.set_incarnation(incarnation_);
    request.set_step(step);
    request.set_samples(1);
    request.set_finite(true);
    request.set_secret(joined_.secret());
    v1::ReportStepResponse response;
    const grpc::Status status = Ask(&v1::SessionService::Stub::ReportStep, request, response);
    if (status.ok()) *joined_.mutable_directive() = response.directive();
  }

  void Leave() {
    v1::LeaveSessionRequest request;
    request.set_session_id(joined_.session_id());
    request.set_rank(rank());
    request.set_incarnation(incarnation_);
    request.set_secret(joined_.secret());
    v1::LeaveSessionResponse response;
    Ask(&v1::SessionService::Stub::LeaveSession, request, response);
  }

  const int number_;
  const std::string session_;
  v1::JoinSessionResponse joined_;
  uint64_t incarnation_ = kRawIncarnation;
  std::array<std::unique_ptr<Stream>, 2> streams_;
  std::vector<v1::ExchangeResponse> ended_;
  size_t current_ = 0;
};

v1::JoinSessionResponse OpenAndJoin(const std::string& name) {
  v1::JoinSessionResponse joined = TheServer().OpenAndJoin(name, kRanks);
  PRECONDOR_CHECK(joined.active());
  return joined;
}

void Close(const std::string& name, const v1::JoinSessionResponse& joined) {
  v1::CloseSessionRequest request;
  request.set_name(name);
  request.set_secret(joined.secret());
  v1::CloseSessionResponse response;
  TimedContext context;
  PRECONDOR_CHECK(TheServer().sessions->CloseSession(&context, request, &response).ok());
}

// Each rank of a job that behaves has its answer, whatever others have done.
void TrainAsUsual() {
  const std::string name = "another-job";
  const v1::JoinSessionResponse joined = OpenAndJoin(name);
  std::array<v1::ExchangeResponse, kRanks> answers;
  const auto step = [&](uint32_t rank) {
    RawStep request = RawRequest(joined, 0, 0);
    request.gradient.set_rank(rank);
    request.statistics.set_rank(rank);
    PRECONDOR_CHECK(TheServer().Precondition(request, &answers[rank]).ok());
  };
  std::thread other([&] { step(1); });
  step(0);
  other.join();
  PRECONDOR_CHECK(answers[0].outcome().decision() == v1::DECISION_PRECONDITIONED);
  PRECONDOR_CHECK(answers[0].payload() == answers[1].payload());
  Close(name, joined);
}

void CheckAnswers(const std::vector<std::unique_ptr<Actor>>& actors) {
  for (const v1::ExchangeResponse& answer : actors[kIntruder]->answers()) {
    PRECONDOR_CHECK(answer.header().kind() == v1::FRAME_KIND_ERROR);
  }
  if (actors[0]->rolled_back() || actors[1]->rolled_back()) return;           // a step may then have another answer
  std::map<std::pair<uint64_t, uint32_t>, std::pair<int, std::string>> seen;  // by step and layer
  for (int rank = 0; rank < kRanks; ++rank) {
    for (const v1::ExchangeResponse& answer : actors[static_cast<size_t>(rank)]->answers()) {
      const v1::FrameHeader& header = answer.header();
      if (header.kind() != v1::FRAME_KIND_RESULT || answer.contribution() == v1::FRAME_KIND_FETCH) continue;
      const std::pair<int, std::string> said = {answer.outcome().decision(), answer.payload()};
      const auto [found, is_new] = seen.try_emplace({header.step(), header.layer()}, said);
      PRECONDOR_CHECK(found->second == said);
    }
  }
}

}  // namespace

std::vector<std::string> Seeds() {
  const auto program = [](const std::vector<std::array<int, 3>>& actions) {
    std::string bytes;
    for (const std::array<int, 3>& action : actions) {
      for (const int byte : action) bytes.push_back(static_cast<char>(byte));
    }
    return bytes;
  };
  return {
      program({{0, 2, 0}, {1, 2, 0}, {0, 2, 8}, {1, 2, 8}, {0, 12, 0}, {1, 12, 0}, {0, 1, 1}, {1, 1, 1}}),  // two steps
      program({{0, 2, 0}, {2, 1, 0}, {1, 2, 0}, {2, 3, 0xF0}, {2, 11, 16}, {2, 12, 0}}),           // an intruder
      program({{0, 2, 0}, {0, 8, 1}, {0, 2, 0}, {1, 2, 0}, {0, 10, 0}, {0, 8, 0}, {0, 1, 0}}),     // repetitions
      program({{0, 2, 0}, {1, 2, 0}, {1, 11, 17}, {0, 11, 0}, {1, 6, 17}, {0, 1, 1}, {1, 1, 1}}),  // another process
      program({{0, 4, 0}, {0, 4, 16}, {0, 9, 0}, {0, 8, 1}, {0, 4, 0}, {0, 10, 0}, {1, 5, 0}, {0, 5, 0}}),  // parts
  };
}

void Run(absl::string_view input) {
  static uint64_t runs = 0;
  const std::string name = absl::StrCat("job-", ++runs);
  const v1::JoinSessionResponse joined = OpenAndJoin(name);
  {
    std::vector<std::unique_ptr<Actor>> actors;
    for (int number = 0; number <= kIntruder; ++number) actors.push_back(std::make_unique<Actor>(number, name, joined));
    for (size_t i = 0; i + 3 <= std::min(input.size(), 3 * kMaxActions); i += 3) {
      actors[static_cast<uint8_t>(input[i]) % actors.size()]->Act(static_cast<uint8_t>(input[i + 1]),
                                                                  static_cast<uint8_t>(input[i + 2]));
    }
    for (const std::unique_ptr<Actor>& actor : actors) actor->Settle();
    CheckAnswers(actors);
  }
  Close(name, joined);
  TrainAsUsual();
  PRECONDOR_CHECK(Metric(TheServer(), "precondor_shard_sessions") == 0);
  PRECONDOR_CHECK(Metric(TheServer(), "precondor_reserved_bytes") == 0);
}

}  // namespace precondor::fuzz
