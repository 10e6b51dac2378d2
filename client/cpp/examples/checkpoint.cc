// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/examples/checkpoint.h"

#include <cstdio>
#include <fstream>
#include <iterator>
#include <utility>

#include "absl/base/casts.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/byte_codec.h"
#include "kernels/base/status_macros.h"

namespace precondor::digits {
namespace {

constexpr absl::string_view kHeading = "precondor-digits checkpoint 1";

void PutDouble(std::string& out, double value) { PutU64(out, absl::bit_cast<uint64_t>(value)); }
double TakeDouble(Decoder& in) { return absl::bit_cast<double>(in.U64()); }

void PutPoint(std::string& out, const CurvePoint& point) {
  PutU64(out, static_cast<uint64_t>(point.step));
  for (double value : {point.held_out_loss, point.held_out_accuracy, point.training_loss}) PutDouble(out, value);
}

CurvePoint TakePoint(Decoder& in) {
  CurvePoint point;
  point.step = static_cast<int64_t>(in.U64());
  point.held_out_loss = TakeDouble(in);
  point.held_out_accuracy = TakeDouble(in);
  point.training_loss = TakeDouble(in);
  return point;
}

void PutMatrix(std::string& out, const HostMatrix& matrix) {
  PutU64(out, static_cast<uint64_t>(matrix.rows()));
  PutU64(out, static_cast<uint64_t>(matrix.cols()));
  PutBytes(out, absl::string_view(reinterpret_cast<const char*>(matrix.data().data()),
                                  matrix.data().size() * sizeof(float)));
}

std::optional<HostMatrix> TakeMatrix(Decoder& in) {
  const uint64_t rows = in.U64(), cols = in.U64();
  const absl::string_view bytes = in.Bytes();
  constexpr uint64_t kMost = 1 << 20;
  if (rows > kMost || cols > kMost || bytes.size() != rows * cols * sizeof(float)) return std::nullopt;
  HostMatrix matrix(static_cast<int64_t>(rows), static_cast<int64_t>(cols));
  std::copy(bytes.begin(), bytes.end(), reinterpret_cast<char*>(matrix.data().data()));
  return matrix;
}

}  // namespace

std::string EncodeCheckpoint(const Checkpoint& checkpoint) {
  const TrainState& state = checkpoint.state;
  std::string out;
  PutBytes(out, kHeading);
  PutU64(out, static_cast<uint64_t>(checkpoint.run));
  PutU64(out, static_cast<uint64_t>(state.step));
  PutBytes(out, state.optimizer);
  PutU64(out, static_cast<uint64_t>(state.so_far.skipped_steps));
  PutDouble(out, state.so_far.seconds);
  PutU64(out, state.so_far.curve.size());
  for (const CurvePoint& point : state.so_far.curve) PutPoint(out, point);
  PutU64(out, state.so_far.weights.size());
  for (const HostMatrix& weight : state.so_far.weights) PutMatrix(out, weight);
  return out;
}

absl::StatusOr<Checkpoint> DecodeCheckpoint(absl::string_view bytes) {
  const absl::Status damaged =
      absl::InvalidArgumentError(absl::StrCat("checkpoint: damaged or cut short, got ", bytes.size(), " bytes"));
  Decoder in(bytes);
  if (in.Bytes() != kHeading) return damaged;
  Checkpoint checkpoint;
  TrainState& state = checkpoint.state;
  checkpoint.run = static_cast<int64_t>(in.U64());
  state.step = static_cast<int64_t>(in.U64());
  state.optimizer = std::string(in.Bytes());
  state.so_far.skipped_steps = static_cast<int64_t>(in.U64());
  state.so_far.seconds = TakeDouble(in);
  for (uint64_t left = in.U64(); left > 0 && in.ok(); --left) state.so_far.curve.push_back(TakePoint(in));
  for (uint64_t left = in.U64(); left > 0 && in.ok(); --left) {
    std::optional<HostMatrix> weight = TakeMatrix(in);
    if (!weight.has_value()) return damaged;
    state.so_far.weights.push_back(*std::move(weight));
  }
  if (!in.done()) return damaged;
  return checkpoint;
}

absl::Status WriteCheckpoint(const std::string& path, const Checkpoint& checkpoint) {
  const std::string temporary = absl::StrCat(path, ".tmp");
  std::ofstream file(temporary, std::ios::binary | std::ios::trunc);
  const std::string bytes = EncodeCheckpoint(checkpoint);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  file.close();
  if (!file || std::rename(temporary.c_str(), path.c_str()) != 0) {
    return absl::UnknownError(absl::StrCat("checkpoint: cannot write ", path));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::optional<Checkpoint>> ReadCheckpoint(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  const std::string bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  PRECONDOR_ASSIGN_OR_RETURN(Checkpoint checkpoint, DecodeCheckpoint(bytes));
  return checkpoint;
}

}  // namespace precondor::digits
