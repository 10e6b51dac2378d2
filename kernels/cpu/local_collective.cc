// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/local_collective.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "kernels/base/byte_codec.h"
#include "kernels/base/status_macros.h"
#include "kernels/cpu/local_mesh.h"
#include "kernels/cpu/socket.h"

namespace precondor {
namespace {

// Elements that a rank sums at once from each other rank.
constexpr int64_t kPiece = 32768;

// Wire form of a call: kind, dtype, root, count. Fields without meaning for its kind are 0.
constexpr size_t kCallBytes = 16;

std::string Encode(const CollectiveCall& call) {
  const bool moves = call.kind != CollectiveKind::kBarrier;
  const bool rooted = call.kind == CollectiveKind::kReduce || call.kind == CollectiveKind::kBroadcast;
  std::string out;
  PutFixed(out, static_cast<uint64_t>(call.kind), 2);
  PutFixed(out, moves ? static_cast<uint64_t>(call.dtype) : 0, 2);
  PutU32(out, rooted ? static_cast<uint32_t>(call.root) : 0);
  PutU64(out, moves ? static_cast<uint64_t>(call.count) : 0);
  return out;
}

CollectiveCall Decode(absl::string_view bytes) {
  Decoder in(bytes);
  CollectiveCall call;
  call.kind = static_cast<CollectiveKind>(in.Fixed(2));
  call.dtype = static_cast<DType>(in.Fixed(2));
  call.root = static_cast<int>(in.U32());
  call.count = static_cast<int64_t>(in.U64());
  return call;
}

class LocalCollective final : public Collective {
 public:
  LocalCollective(int rank, int size, std::unique_ptr<LocalMesh> mesh)
      : Collective(rank, size),
        mesh_(std::move(mesh)),
        transfers_(size),
        scratch_(static_cast<size_t>(size) * kPiece * sizeof(float)),
        sum_(kPiece),
        term_(kPiece) {}
  absl::string_view name() const override { return "local"; }
  absl::string_view backend_name() const override { return "cpu"; }

 private:
  using Transfer = LocalMesh::Transfer;

  absl::Status DoRun(absl::Span<const CollectiveCall> group, absl::Duration timeout) override;
  void DoFail(const absl::Status& why) override { mesh_->Fail(why, completed_ + 1); }
  void DoInterrupt() override { mesh_->Interrupt(); }

  absl::Status Agree(absl::Span<const CollectiveCall> group);
  absl::Status AgreeOn(absl::string_view mine, std::vector<std::string>& all);
  absl::Status One(const CollectiveCall& call);
  absl::Status AllReduceOrReduce(const CollectiveCall& call);
  absl::Status ReduceScatterPieces(const CollectiveCall& call);
  absl::Status GatherRows(const CollectiveCall& call);
  absl::Status BroadcastFrom(const CollectiveCall& call);
  // out [count] = the sum, in rank order, of `mine` and the elements that the other ranks sent into scratch_.
  void Sum(DType dtype, const char* mine, int64_t count, char* out);
  absl::Span<char> ScratchOf(int rank, size_t bytes) {
    return absl::MakeSpan(scratch_).subspan(static_cast<size_t>(rank) * kPiece * sizeof(float), bytes);
  }
  absl::Status Exchange() { return mesh_->Exchange(operation_, absl::MakeSpan(transfers_), *deadline_); }

  const std::unique_ptr<LocalMesh> mesh_;
  uint64_t completed_ = 0;  // number of completed operations
  // State of the operation under way.
  LocalMesh::Operation operation_;
  const Deadline* deadline_ = nullptr;
  std::vector<Transfer> transfers_;  // by rank; Exchange empties them
  std::vector<char> scratch_;        // [size, kPiece] elements of the widest kind
  std::vector<float> sum_, term_;
};

absl::Status LocalCollective::DoRun(absl::Span<const CollectiveCall> group, absl::Duration timeout) {
  const Deadline deadline(timeout);
  deadline_ = &deadline;
  operation_.number = completed_ + 1;
  operation_.text = absl::StrCat(CollectiveGroupText(group.size(), group[0]), " (operation ", operation_.number, ")");
  PRECONDOR_RETURN_IF_ERROR(Agree(group));
  for (const CollectiveCall& call : group) PRECONDOR_RETURN_IF_ERROR(One(call));
  ++completed_;
  return absl::OkStatus();
}

// Sends the number of calls and the first call, which is usually all, and then the other calls.
absl::Status LocalCollective::Agree(absl::Span<const CollectiveCall> group) {
  std::vector<std::string> all(size());
  std::string mine;
  PutU64(mine, group.size());
  PRECONDOR_RETURN_IF_ERROR(AgreeOn(mine + Encode(group[0]), all));
  const auto differ = [&](int rank, const std::string& ours, const std::string& theirs) {
    return absl::InvalidArgumentError(absl::StrCat("ranks differ in operation ", operation_.number, ": rank 0 called ",
                                                   ours, ", rank ", rank, " ", theirs));
  };
  const auto begin_text = [](absl::string_view bytes) {
    Decoder in(bytes);
    const uint64_t count = in.U64();
    return CollectiveGroupText(count, Decode(in.Take(kCallBytes)));
  };
  for (int rank = 1; rank < size(); ++rank) {
    if (all[rank] != all[0]) return differ(rank, begin_text(all[0]), begin_text(all[rank]));
  }
  if (group.size() == 1) return absl::OkStatus();
  mine.clear();
  for (const CollectiveCall& call : group.subspan(1)) mine += Encode(call);
  PRECONDOR_RETURN_IF_ERROR(AgreeOn(mine, all));
  for (int rank = 1; rank < size(); ++rank) {
    for (size_t i = 0; i < mine.size(); i += kCallBytes) {
      const std::string ours = all[0].substr(i, kCallBytes), theirs = all[rank].substr(i, kCallBytes);
      if (ours == theirs) continue;
      const std::string place = absl::StrCat(" as number ", i / kCallBytes + 2, " of its group");
      return differ(rank, CollectiveCallText(Decode(ours)) + place, CollectiveCallText(Decode(theirs)));
    }
  }
  return absl::OkStatus();
}

// Sets all[r] to what rank r sends, which is as long as `mine`.
absl::Status LocalCollective::AgreeOn(absl::string_view mine, std::vector<std::string>& all) {
  for (int peer = 0; peer < size(); ++peer) {
    all[peer] = std::string(mine);
    if (peer != rank()) transfers_[peer] = {mine, absl::MakeSpan(all[peer].data(), all[peer].size())};
  }
  return Exchange();
}

absl::Status LocalCollective::One(const CollectiveCall& call) {
  switch (call.kind) {
    case CollectiveKind::kAllReduce:
    case CollectiveKind::kReduce:
      return AllReduceOrReduce(call);
    case CollectiveKind::kBroadcast:
      return BroadcastFrom(call);
    case CollectiveKind::kAllGather:
      return GatherRows(call);
    case CollectiveKind::kReduceScatter:
      return ReduceScatterPieces(call);
    case CollectiveKind::kBarrier:
      return absl::OkStatus();  // all ranks have sent their call
  }
  return absl::InternalError("collective: a kind that is none");
}

// Handles one stretch of the buffer after another: rank j sums its share of each, and sends it to the ranks that need
// it.
absl::Status LocalCollective::AllReduceOrReduce(const CollectiveCall& call) {
  const size_t width = ByteSize(call.dtype);
  const bool everyone = call.kind == CollectiveKind::kAllReduce;
  const auto* in = static_cast<const char*>(call.in);
  auto* out = static_cast<char*>(call.out);
  for (int64_t first = 0; first < call.count; first += kPiece * size()) {
    const int64_t length = std::min(call.count - first, kPiece * size());
    const auto begin = [&](int r) { return static_cast<size_t>(first + length * r / size()) * width; };
    const auto bytes = [&](int r) { return begin(r + 1) - begin(r); };
    const int me = rank();
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == me) continue;
      transfers_[peer] = {absl::string_view(in + begin(peer), bytes(peer)), ScratchOf(peer, bytes(me))};
    }
    PRECONDOR_RETURN_IF_ERROR(Exchange());
    char* mine = everyone || me == call.root ? out + begin(me) : ScratchOf(me, bytes(me)).data();
    Sum(call.dtype, in + begin(me), static_cast<int64_t>(bytes(me) / width), mine);
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == me) continue;
      if (everyone || peer == call.root) transfers_[peer].send = absl::string_view(mine, bytes(me));
      if (everyone || me == call.root) transfers_[peer].receive = absl::MakeSpan(out + begin(peer), bytes(peer));
    }
    PRECONDOR_RETURN_IF_ERROR(Exchange());
  }
  return absl::OkStatus();
}

absl::Status LocalCollective::ReduceScatterPieces(const CollectiveCall& call) {
  const size_t width = ByteSize(call.dtype), row = static_cast<size_t>(call.count) * width;
  const auto* in = static_cast<const char*>(call.in);
  auto* out = static_cast<char*>(call.out);
  for (int64_t first = 0; first < call.count; first += kPiece) {
    const int64_t length = std::min(call.count - first, kPiece);
    const size_t begin = static_cast<size_t>(first) * width, bytes = static_cast<size_t>(length) * width;
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank()) continue;
      transfers_[peer] = {absl::string_view(in + static_cast<size_t>(peer) * row + begin, bytes),
                          ScratchOf(peer, bytes)};
    }
    PRECONDOR_RETURN_IF_ERROR(Exchange());
    Sum(call.dtype, in + static_cast<size_t>(rank()) * row + begin, length, out + begin);
  }
  return absl::OkStatus();
}

absl::Status LocalCollective::GatherRows(const CollectiveCall& call) {
  const size_t row = static_cast<size_t>(call.count) * ByteSize(call.dtype);
  auto* out = static_cast<char*>(call.out);
  const absl::string_view mine(static_cast<const char*>(call.in), row);
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank()) transfers_[peer] = {mine, absl::MakeSpan(out + static_cast<size_t>(peer) * row, row)};
  }
  if (row > 0) std::memmove(out + static_cast<size_t>(rank()) * row, mine.data(), row);
  return Exchange();
}

absl::Status LocalCollective::BroadcastFrom(const CollectiveCall& call) {
  const size_t bytes = static_cast<size_t>(call.count) * ByteSize(call.dtype);
  if (rank() != call.root) {
    transfers_[call.root].receive = absl::MakeSpan(static_cast<char*>(call.out), bytes);
    return Exchange();
  }
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank()) transfers_[peer].send = absl::string_view(static_cast<const char*>(call.in), bytes);
  }
  PRECONDOR_RETURN_IF_ERROR(Exchange());
  // If in place, writes nothing, because other threads may be reading the buffer.
  if (bytes > 0 && call.out != call.in) std::memmove(call.out, call.in, bytes);
  return absl::OkStatus();
}

void LocalCollective::Sum(DType dtype, const char* mine, int64_t count, char* out) {
  const absl::Span<float> sum = absl::MakeSpan(sum_).subspan(0, count), term = absl::MakeSpan(term_).subspan(0, count);
  for (int from = 0; from < size(); ++from) {
    const char* piece = from == rank() ? mine : ScratchOf(from, 0).data();
    DecodeElements(dtype, piece, 1.0f, from == 0 ? sum : term);
    for (int64_t i = 0; from > 0 && i < count; ++i) sum[i] += term[i];
  }
  EncodeElements(dtype, sum, 1.0f, out);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Collective>> MakeLocalCollective(absl::string_view unique_id, int rank, int size,
                                                                absl::Duration timeout,
                                                                const std::atomic<bool>* give_up) {
  PRECONDOR_RETURN_IF_ERROR(CheckCommunicator(rank, size, timeout));
  if (size > kMaxLocalRanks) {
    return absl::InvalidArgumentError(
        absl::StrCat("communicator: expected at most ", kMaxLocalRanks, " ranks on a host, got ", size));
  }
  PRECONDOR_ASSIGN_OR_RETURN(const LocalAddress address, ParseLocalId(unique_id));
  PRECONDOR_ASSIGN_OR_RETURN(std::unique_ptr<LocalMesh> mesh,
                             LocalMesh::Join(address, rank, size, Deadline(timeout, give_up)));
  return std::unique_ptr<Collective>(new LocalCollective(rank, size, std::move(mesh)));
}

}  // namespace precondor
