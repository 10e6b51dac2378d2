// SPDX-License-Identifier: Apache-2.0
#include "proto/wire/shared_channel.h"

#include <grpcpp/support/slice.h>
#include <optional>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "kernels/base/mutex.h"
#include "kernels/base/status_macros.h"

namespace precondor::wire {
namespace {

absl::StatusOr<bool> WriteTo(PipeWriter& writer, const grpc::ByteBuffer& message) {
  std::vector<grpc::Slice> slices;
  if (message.Valid() && !message.Dump(&slices).ok()) return absl::InternalError("shared memory: a bad message");
  std::vector<absl::string_view> parts;
  parts.reserve(slices.size());
  for (const grpc::Slice& slice : slices)
    parts.emplace_back(reinterpret_cast<const char*>(slice.begin()), slice.size());
  return writer.Write(parts);
}

}  // namespace

SharedChannel::SharedChannel(Side side, std::unique_ptr<SharedMemory> memory, Events events)
    : side_(side),
      memory_(std::move(memory)),
      events_(std::move(events)),
      own_(side == Side::kServer ? memory_->server_doorbell() : memory_->client_doorbell()),
      peer_(side == Side::kServer ? memory_->client_doorbell() : memory_->server_doorbell()),
      reader_(side == Side::kServer ? memory_->ToServer() : memory_->ToClient()),
      writer_(side == Side::kServer ? memory_->ToClient() : memory_->ToServer()) {}

absl::StatusOr<std::unique_ptr<SharedChannel>> SharedChannel::Start(Side side, std::unique_ptr<SharedMemory> memory,
                                                                    Events events) {
  std::unique_ptr<SharedChannel> channel(new SharedChannel(side, std::move(memory), std::move(events)));
  try {
    channel->thread_ = std::thread([channel = channel.get()] {
      NameThisThread("shared-memory");
      channel->Run();
    });
  } catch (const std::system_error& error) {
    return absl::UnavailableError(absl::StrCat("shared memory: no thread: ", error.what()));
  }
  return channel;
}

SharedChannel::~SharedChannel() {
  ends_.store(true, std::memory_order_release);
  own_.RingAlways();
  if (thread_.joinable()) thread_.join();
}

bool SharedChannel::Write(const grpc::ByteBuffer& message) {
  MutexLock lock(mu_);
  if (message.Length() < kLargeBytes) {
    const absl::StatusOr<bool> written = WriteTo(writer_, message);
    if (written.ok() && *written) {
      peer_.Ring();
      return true;
    }
  }
  kept_ = message;  // shares its memory
  keeps_ = true;
  own_.Ring();  // the thread writes it, and reports an error
  return false;
}

void SharedChannel::Resume() {
  resumes_.store(true, std::memory_order_release);
  own_.Ring();
}

void SharedChannel::Run() {
  while (!ends_.load(std::memory_order_acquire)) {
    const uint32_t seen = own_.rings();
    absl::Status status = WriteKept();
    if (status.ok()) status = ReadAll();
    if (!status.ok()) return events_.broken(status);
    own_.Wait(seen);
  }
  if (side_ == Side::kClient) ReadRest();
}

void SharedChannel::ReadRest() {
  for (size_t bytes = 0; bytes < SharedMemory::kPipeBytes;) {  // a hostile server may write on
    const absl::StatusOr<std::optional<absl::string_view>> message = reader_.Front();
    if (!message.ok() || !message->has_value()) return;
    bytes += (*message)->size() + 1;
    events_.read(**message);
    reader_.Pop();
  }
}

absl::Status SharedChannel::WriteKept() {
  grpc::ByteBuffer kept;  // its payload is freed without the lock
  {
    MutexLock lock(mu_);
    if (!keeps_) return absl::OkStatus();
    PRECONDOR_ASSIGN_OR_RETURN(const bool written, WriteTo(writer_, kept_));
    if (!written) return absl::OkStatus();
    kept.Swap(&kept_);
    keeps_ = false;
  }
  peer_.Ring();
  events_.written();
  return absl::OkStatus();
}

absl::Status SharedChannel::ReadAll() {
  if (resumes_.exchange(false, std::memory_order_acquire)) paused_ = false;
  while (!paused_ && !ends_.load(std::memory_order_acquire)) {
    PRECONDOR_ASSIGN_OR_RETURN(const std::optional<absl::string_view> message, reader_.Front());
    if (!message.has_value()) return absl::OkStatus();
    memory_->CloseDescriptor();  // the peer has mapped the memory
    paused_ = !events_.read(*message);
    if (reader_.Pop()) peer_.Ring();
    PRECONDOR_RETURN_IF_ERROR(WriteKept());  // a peer that sends on and on does not hold it up
  }
  return absl::OkStatus();
}

}  // namespace precondor::wire
