// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/staged_collective.h"

#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

#include "kernels/base/deadline.h"
#include "kernels/base/dtype.h"
#include "kernels/base/status_macros.h"
#include "kernels/cpu/local_collective.h"

namespace precondor {
namespace {

constexpr uintptr_t kWord = sizeof(float);

// A buffer on the device, and a host copy of the words that contain it.
class Staged {
 public:
  Staged() = default;
  Staged(const void* device, int64_t bytes) : bytes_(bytes) {
    const auto begin = reinterpret_cast<uintptr_t>(device);
    skipped_ = begin % kWord;
    words_.resize((skipped_ + static_cast<uintptr_t>(bytes) + kWord - 1) / kWord);
    device_ = reinterpret_cast<float*>(begin - skipped_);  // NOLINT(performance-no-int-to-ptr): the word's beginning
  }
  void* data() { return words_.empty() ? nullptr : reinterpret_cast<char*>(words_.data()) + skipped_; }
  absl::Status Download(Backend& backend) {
    return backend.Download(ConstMatrixView(device_, 1, size()), MatrixView(words_.data(), 1, size()));
  }
  // Keeps the other bytes of its words.
  absl::Status Upload(Backend& backend) {
    const auto bytes = static_cast<size_t>(bytes_);
    if (words_.size() * kWord != bytes) {
      const std::vector<char> own(static_cast<char*>(data()), static_cast<char*>(data()) + bytes);
      PRECONDOR_RETURN_IF_ERROR(Download(backend));
      std::memcpy(data(), own.data(), bytes);
    }
    return backend.Upload(ConstMatrixView(words_.data(), 1, size()), MatrixView(device_, 1, size()));
  }

 private:
  int64_t size() const { return static_cast<int64_t>(words_.size()); }

  float* device_ = nullptr;
  int64_t bytes_ = 0;
  uintptr_t skipped_ = 0;
  std::vector<float> words_;
};

class StagedCollective final : public Collective {
 public:
  StagedCollective(std::unique_ptr<Collective> ranks, Backend& backend)
      : Collective(ranks->rank(), ranks->size()), ranks_(std::move(ranks)), backend_(backend) {}
  absl::string_view name() const override { return ranks_->name(); }
  absl::string_view backend_name() const override { return backend_.name(); }

 private:
  absl::Status DoRun(absl::Span<const CollectiveCall> group, absl::Duration timeout) override {
    const Deadline deadline(timeout);
    std::vector<CollectiveCall> calls(group.begin(), group.end());
    std::vector<Staged> ins(calls.size()), outs(calls.size());
    for (size_t i = 0; i < calls.size(); ++i) {
      CollectiveCall& call = calls[i];
      const int64_t row = call.kind == CollectiveKind::kBarrier ? 0 : call.count * ByteSize(call.dtype);
      if (call.kind != CollectiveKind::kBroadcast || call.root == rank()) {
        ins[i] = Staged(call.in, row * (call.kind == CollectiveKind::kReduceScatter ? size() : 1));
        PRECONDOR_RETURN_IF_ERROR(ins[i].Download(backend_));
      }
      if (call.kind != CollectiveKind::kReduce || call.root == rank()) {
        outs[i] = Staged(call.out, row * (call.kind == CollectiveKind::kAllGather ? size() : 1));
      }
      call.in = ins[i].data();
      call.out = outs[i].data();
    }
    const absl::Duration left = deadline.left();
    if (left <= absl::ZeroDuration()) {
      return absl::DeadlineExceededError(
          absl::StrCat(CollectiveGroupText(group.size(), group[0]), ": copying to the host took its whole time-out"));
    }
    PRECONDOR_RETURN_IF_ERROR(ranks_->Run(calls, left));
    // one by one, because they may share a word
    for (Staged& out : outs) PRECONDOR_RETURN_IF_ERROR(out.Upload(backend_));
    return absl::OkStatus();
  }
  void DoFail(const absl::Status& why) override {
    ranks_->Abort(absl::StripPrefix(why.message(), absl::StrCat("rank ", rank(), " aborted: ")));
  }
  void DoInterrupt() override { ranks_->Abort("the operation was interrupted"); }

  const std::unique_ptr<Collective> ranks_;
  Backend& backend_;
};

}  // namespace

std::unique_ptr<Collective> MakeStagedCollective(std::unique_ptr<Collective> ranks, Backend& backend) {
  return std::make_unique<StagedCollective>(std::move(ranks), backend);
}

DeviceGroup::Connect ConnectLocally(absl::Duration timeout) {
  return [timeout](const std::vector<Backend*>& backends) -> absl::StatusOr<std::vector<std::unique_ptr<Collective>>> {
    PRECONDOR_ASSIGN_OR_RETURN(const std::unique_ptr<LocalRendezvous> rendezvous, LocalRendezvous::Start());
    const int size = static_cast<int>(backends.size());
    const auto join = [&](int rank, const std::atomic<bool>* give_up) -> absl::StatusOr<std::unique_ptr<Collective>> {
      PRECONDOR_ASSIGN_OR_RETURN(std::unique_ptr<Collective> ranks,
                                 MakeLocalCollective(rendezvous->unique_id(), rank, size, timeout, give_up));
      if (backends[rank]->name() == ranks->backend_name()) return ranks;
      return MakeStagedCollective(std::move(ranks), *backends[rank]);
    };
    return JoinTogether(size, join);
  };
}

}  // namespace precondor
