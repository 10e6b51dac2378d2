// SPDX-License-Identifier: Apache-2.0
// The messages of sessions and shards: decoded, checked and, where that is right, installed on a shard.
#include "kernels/base/check.h"
#include "kernels/base/trace_context.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/methods/registry.h"
#include "precondor/v1/shard.pb.h"
#include "proto/wire/decoded_size.h"
#include "proto/wire/slot_table.h"
#include "proto/wire/spec_codec.h"
#include "server/core/shard/shard.h"
#include "server/rpc/convert.h"
#include "tests/fuzz/fuzz.h"
#include "tests/support/fake_clock.h"
#include "tests/support/inline_executor.h"

namespace precondor::fuzz {
namespace {

template <typename Message>
Message Parsed(absl::string_view bytes) {
  Message message;
  message.ParsePartialFromArray(bytes.data(), static_cast<int>(bytes.size()));
  return message;
}

// A decoded message is encoded as bytes that decode to an equal one.
void Spec(absl::string_view bytes) {
  const auto spec = wire::DecodeSessionSpec(Parsed<v1::SessionSpec>(bytes));
  if (!spec.ok() || !ValidateSessionSpec(*spec).ok()) return;
  MakeMethod(spec->method).IgnoreError();
  const auto encoded = wire::EncodeSessionSpec(*spec);
  if (!encoded.ok()) return;  // an option that decodes and has no encoding: the smallest int32
  const auto again = wire::DecodeSessionSpec(*encoded);
  PRECONDOR_CHECK(again.ok() && wire::EncodeSessionSpec(*again)->SerializeAsString() == encoded->SerializeAsString());
}

// On a shard of its own, with a memory that refuses what is large.
void Install(absl::string_view bytes) {
  const auto install = rpc::DecodeInstall(Parsed<v1::InstallSessionRequest>(bytes));
  if (!install.ok()) return;
  static const std::unique_ptr<Backend> backend = MakeCpuBackend({}).value();
  FakeClock clock;
  NullLogger logger;
  Observer observer;
  InlineExecutor executor;
  ShardOptions options;
  options.capacity_bytes = 1 << 20;
  Shard shard(options, *backend, executor, clock, logger, observer);
  if (!shard.Install(*install).ok()) {
    PRECONDOR_CHECK(shard.memory()->reserved() == 0);
    return;
  }
  PRECONDOR_CHECK(shard.Install(*install).ok());
  PRECONDOR_CHECK(shard.Remove(install->session_id).value());
  PRECONDOR_CHECK(shard.memory()->reserved() == 0);
}

void ShardMessages(absl::string_view bytes) {
  rpc::DecodeFence(Parsed<v1::FenceSessionRequest>(bytes)).IgnoreError();
  rpc::DecodeOrder(Parsed<v1::TakeSnapshotRequest>(bytes));
  const ShardDescription description = rpc::DecodeDescription(Parsed<v1::DescribeShardResponse>(bytes));
  rpc::EncodeDescription(description);
  wire::CheckRegion(Parsed<v1::Ring>(bytes), "device").IgnoreError();
  ParseTraceparent(bytes);
}

// The bytes that a server counts for a request before it decodes it are at least those that protobuf then uses.
template <typename Message>
void HoldSize(absl::string_view bytes) {
  Message message;
  if (!message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) return;
  const grpc::Slice slice(bytes.data(), bytes.size());
  PRECONDOR_CHECK(wire::DecodedSize(*Message::descriptor(), grpc::ByteBuffer(&slice, 1)) >= message.SpaceUsedLong());
}

void Sizes(absl::string_view bytes) {
  HoldSize<v1::InstallSessionRequest>(bytes);
  HoldSize<v1::SessionSpec>(bytes);
  HoldSize<v1::DescribeShardResponse>(bytes);
}

constexpr void (*kDecoders[])(absl::string_view) = {Spec, Install, ShardMessages, Sizes};

SessionSpec SpecOf(absl::string_view method) {
  SessionSpec spec;
  spec.name = "job";
  spec.world_size = 2;
  spec.method.name = std::string(method);
  spec.layers = {{.name = "first", .d_out = 2, .d_in = 3}, {.name = "second", .d_out = 3, .d_in = 2}};
  return spec;
}

}  // namespace

std::vector<std::string> Seeds() {
  std::vector<std::string> seeds;
  for (const absl::string_view method : MethodNames()) {
    const SessionSpec spec = SpecOf(method);
    seeds.push_back(std::string(1, 0) + wire::EncodeSessionSpec(spec)->SerializeAsString());
    const SessionInstall install{
        .session_id = 7, .epoch = 1, .spec = spec, .layers = {0, 1}, .members = {{.rank = 0, .incarnation = 1}}};
    const std::string encoded = rpc::EncodeInstall(install)->SerializeAsString();
    for (const char decoder : {1, 3}) seeds.push_back(std::string(1, decoder) + encoded);
  }
  const EpochFence fence{.session_id = 7, .epoch = 2, .members = {{.rank = 1, .incarnation = 3}}};
  seeds.push_back(std::string(1, 2) + rpc::EncodeFence(fence).SerializeAsString());
  return seeds;
}

void Run(absl::string_view input) { kDecoders[Choose(input, std::size(kDecoders))](input); }

}  // namespace precondor::fuzz
