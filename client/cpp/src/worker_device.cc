// SPDX-License-Identifier: Apache-2.0
// Sends a worker's gradients in device memory: in a slot of a region shared with the shard, or through the host.
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "client/cpp/src/device_answer.h"
#include "client/cpp/src/worker.h"
#include "client/cpp/src/worker_input.h"
#include "kernels/base/clock.h"
#include "kernels/base/status_macros.h"
#include "proto/wire/tensor_codec.h"

namespace precondor {

struct WorkerImpl::DeviceGradient {
  std::shared_ptr<DevicePlane> plane;
  ConstMatrixView values;
  MatrixView out;
  DType dtype = DType::kF32;
  std::shared_ptr<DeviceAnswer> answer;
  Contribution contribution;  // without payload
};

namespace {

MatrixView ViewOf(const DeviceTensor& tensor) { return {tensor.data, tensor.rows, tensor.cols, tensor.stride}; }

}  // namespace

PreconditionFuture WorkerImpl::Precondition(uint64_t step, int64_t layer, const DeviceTensor& gradient,
                                            const DeviceTensor& out, uint64_t samples) {
  const absl::StatusOr<Mode> mode = CheckStep(step, layer);
  if (!mode.ok()) return FailedFuture(mode.status());
  const std::string what = Describe(step, layer);
  const LayerSpec& shape = spec_.layers[static_cast<size_t>(layer)];
  absl::Status status = CheckWholeGradient(layer);
  status.Update(CheckShape(what, "gradient", ViewOf(gradient), shape.d_out, shape.d_in));
  status.Update(CheckShape(what, "out", ViewOf(out), shape.d_out, shape.d_in));
  status.Update(CheckSamples(what, samples));
  if (status.ok() && gradient.device != out.device) {
    status = absl::InvalidArgumentError(absl::StrCat(what, ": expected gradient and out on one device, got devices ",
                                                     gradient.device, " and ", out.device));
  }
  if (status.ok() && factors_ != nullptr) {
    status = absl::FailedPreconditionError(absl::StrCat(what, ": ", CheckSlots().message()));
  }
  if (!status.ok()) return FailedFuture(status);
  auto pending = std::make_shared<DeviceSendQueue::PendingSend>();
  absl::StatusOr<std::shared_ptr<DevicePlane>> plane = send_queue_.PlaneOf(gradient.device);
  if (!plane.ok()) return FailedFuture(plane.status());
  for (void* stream : {gradient.stream, out.stream}) {
    if (!pending->marks.empty() && out.stream == gradient.stream) break;
    absl::StatusOr<std::unique_ptr<DevicePlane::Mark>> mark = (*plane)->Record(stream);
    if (!mark.ok()) return FailedFuture(mark.status());
    // The plane outlives its marks.
    pending->marks.emplace_back((*mark).release(), [plane = *plane](const DevicePlane::Mark* ended) { delete ended; });
  }
  const auto state = std::make_shared<PreconditionFuture::State>(what, MatrixView(), false, false);
  auto sent = std::make_shared<DeviceGradient>();
  sent->plane = *std::move(plane);
  sent->values = ViewOf(gradient);
  sent->out = ViewOf(out);
  sent->dtype = spec_.gradient_dtype;
  sent->contribution.id = {v1::FRAME_KIND_GRADIENT, step, static_cast<uint32_t>(layer)};
  sent->contribution.mode = *mode;
  sent->contribution.samples = samples;
  sent->contribution.deadline = MonotonicNow() + options_.result_timeout;
  sent->answer = std::make_shared<DeviceAnswer>(what, sent->plane, sent->out, state);
  sent->contribution.result = sent->answer;
  pending->what = what;
  pending->plane = sent->plane;
  pending->answer = sent->answer;
  pending->deadline = sent->contribution.deadline;
  pending->deliver = [this, sent = std::shared_ptr<const DeviceGradient>(std::move(sent))] { Deliver(*sent); };
  send_queue_.Post(std::move(pending));
  return PreconditionFuture(state);
}

DevicePlaneUse WorkerImpl::device_plane() const {
  DevicePlaneUse use;
  {
    MutexLock lock(mu_);
    use = device_plane_;
  }
  for (const ShardRoutes::Link& link : routes_.links()) {
    if (std::string backend = link->backend(); !backend.empty()) use.backends.insert(std::move(backend));
  }
  return use;
}

absl::Status WorkerImpl::DevicePlaneStatus(int64_t layer, int device) {
  PRECONDOR_RETURN_IF_ERROR(CheckLayer(layer));
  PRECONDOR_RETURN_IF_ERROR(CheckWholeGradient(layer));
  PRECONDOR_RETURN_IF_ERROR(CheckSlots());
  const ShardRoutes::Link link = routes_.of_layer(static_cast<size_t>(layer));
  if (link == nullptr) return absl::OkStatus();
  PRECONDOR_RETURN_IF_ERROR(link->path().SlotStatus(RegionKind::kCuda, ""));
  PRECONDOR_ASSIGN_OR_RETURN(const std::shared_ptr<DevicePlane> plane, send_queue_.PlaneOf(device));
  return link->path().SlotStatus(plane->kind(), plane->device());
}

void WorkerImpl::Deliver(const DeviceGradient& gradient) {
  if (NeedsNoShard(gradient.contribution.mode)) return AnswerOnDevice(gradient);
  const absl::Status in_slot = SendInSlot(gradient);
  if (!in_slot.ok()) {
    if (gradient.answer->ready()) return;  // it was late, or the worker has failed
    const absl::Status sent = SendThroughHost(gradient);
    if (!sent.ok()) gradient.answer->Fail(sent);
  }
  MutexLock lock(mu_);
  ++(in_slot.ok() ? device_plane_.in_ring : device_plane_.over_socket);
  if (!in_slot.ok()) device_plane_.reason = std::string(in_slot.message());
}

// Answers a first-order step on the device: the gradient itself, or SKIP if it is not finite.
void WorkerImpl::AnswerOnDevice(const DeviceGradient& gradient) {
  Preconditioned outcome{Decision::kIdentity, 0, 0, "first order"};
  absl::Status status = gradient.answer->WithMemory([&]() -> absl::Status {
    PRECONDOR_ASSIGN_OR_RETURN(const PayloadFacts facts, gradient.plane->Inspect(gradient.values));
    if (!facts.finite) outcome = {Decision::kSkip, 0, 0, "the gradient is not finite"};
    if (!facts.finite || gradient.values.data == gradient.out.data) return absl::OkStatus();
    return gradient.plane->Copy(gradient.values, gradient.out);
  });
  if (status.ok()) {
    gradient.answer->Complete(std::move(outcome));
  } else {
    gradient.answer->Fail(std::move(status));
  }
}

absl::Status WorkerImpl::CheckSlots() const {
  if (factors_ != nullptr) {
    return absl::FailedPreconditionError(absl::StrCat("expected a gradient in the host's memory, where exchange ",
                                                      ExchangeModeName(spec_.exchange),
                                                      " preconditions, got one on a device"));
  }
  if (spec_.exchange != ExchangeMode::kDelegate && spec_.world_size > 1) {
    return absl::UnavailableError("exchange DIRECT of several ranks: the shard adds their gradients up");
  }
  if (spec_.gradient_dtype != DType::kF32) {
    return absl::UnavailableError(absl::StrCat("gradient_dtype: expected F32, got ", DTypeName(spec_.gradient_dtype)));
  }
  return absl::OkStatus();
}

absl::Status WorkerImpl::SendInSlot(const DeviceGradient& gradient) {
  PRECONDOR_RETURN_IF_ERROR(CheckSlots());
  const size_t layer = gradient.contribution.id.layer;
  const ShardRoutes::Link link = routes_.of_layer(layer);
  if (link == nullptr) return absl::UnavailableError("the layer has no shard");
  const auto wanted = [&] {
    uint64_t bytes = 0;
    for (size_t other = 0; other < spec_.layers.size(); ++other) {
      const LayerSpec& shape = spec_.layers[other];
      const bool sends = SendsGradient(static_cast<int64_t>(other)) && routes_.of_layer(other) == link;
      if (sends) bytes += wire::SlotTable::Aligned(static_cast<uint64_t>(shape.d_out * shape.d_in) * sizeof(float));
    }
    return bytes;
  };
  auto contribution = std::make_shared<Contribution>(gradient.contribution);
  const int64_t rows = gradient.values.rows, cols = gradient.values.cols;
  const uint64_t bytes = static_cast<uint64_t>(rows * cols) * sizeof(float);
  PRECONDOR_ASSIGN_OR_RETURN(
      const PayloadPath::Place place,
      link->path().TakeSlot(gradient.plane, wanted, contribution->id.layer, bytes, contribution->deadline));
  contribution->region = place.region;
  contribution->slot = place.slot;
  contribution->tensors.push_back(wire::EncodeTensorHeader({DType::kF32, {rows, cols}, 1.0f}));
  contribution->make_inline = [gradient] { return ContributionOnHost(gradient); };
  absl::Status status = gradient.answer->WithMemory(
      [&] { return gradient.plane->Copy(gradient.values, MatrixView(place.region->at(place.slot), rows, cols)); });
  if (status.ok()) status = routes_.Submit(layer, std::move(contribution));
  if (!status.ok()) place.region->GiveBack(place.slot);
  return status;
}

absl::Status WorkerImpl::SendThroughHost(const DeviceGradient& gradient) {
  PRECONDOR_ASSIGN_OR_RETURN(std::shared_ptr<const Contribution> contribution, ContributionOnHost(gradient));
  return routes_.Submit(gradient.contribution.id.layer, std::move(contribution));
}

absl::StatusOr<std::shared_ptr<const Contribution>> WorkerImpl::ContributionOnHost(const DeviceGradient& gradient) {
  const int64_t rows = gradient.values.rows, cols = gradient.values.cols;
  auto values = std::make_shared<std::vector<float>>(static_cast<size_t>(rows * cols));
  const MatrixView host(values->data(), rows, cols);
  PRECONDOR_RETURN_IF_ERROR(
      gradient.answer->WithMemory([&] { return gradient.plane->Download(gradient.values, host); }));
  auto contribution = std::make_shared<Contribution>(gradient.contribution);
  const absl::Span<const uint8_t> alias = wire::AliasPayload(gradient.dtype, host);
  if (alias.empty()) {
    const auto payload = EncodeTensors(gradient.dtype, {host}, contribution->tensors);
    contribution->payload = *payload;
    contribution->payload_owner = payload;
  } else {
    contribution->tensors.push_back(wire::EncodeTensorHeader({gradient.dtype, {rows, cols}, 1.0f}));
    contribution->payload = alias;
    contribution->payload_owner = values;
  }
  return contribution;
}

}  // namespace precondor
