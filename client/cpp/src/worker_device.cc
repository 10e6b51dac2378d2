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

struct WorkerImpl::DeviceGradient final : DeviceSendQueue::PendingSend {
  ConstMatrixView values;
  MatrixView out;
  DType dtype = DType::kF32;
  std::shared_ptr<DeviceAnswer> device_answer;  // `answer`
  Contribution contribution;                    // without payload
};

namespace {

MatrixView ViewOf(const DeviceTensor& tensor) { return {tensor.data, tensor.rows, tensor.cols, tensor.stride}; }

}  // namespace

PreconditionFuture WorkerImpl::PreconditionOnDevice(uint64_t step, int64_t layer,
                                                    const GradientBuffers::DeviceMatrix& matrix, uint64_t samples) {
  const auto& [gradient, out] = matrix;
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
  const absl::StatusOr<WorkerPlane*> plane = planes_.Of(gradient.device);
  if (!plane.ok()) return FailedFuture(plane.status());
  auto sent = std::make_shared<DeviceGradient>();
  for (void* stream : {gradient.stream, out.stream}) {
    if (!sent->marks.empty() && out.stream == gradient.stream) break;
    absl::StatusOr<std::unique_ptr<DevicePlane::Mark>> mark = (*plane)->plane->Record(stream);
    if (!mark.ok()) return FailedFuture(mark.status());
    sent->marks.push_back(*std::move(mark));
  }
  const auto state = std::make_shared<PreconditionFuture::State>(what, MatrixView(), false, false, held_);
  sent->what = what;
  sent->plane = *plane;
  sent->values = ViewOf(gradient);
  sent->out = ViewOf(out);
  sent->dtype = spec_.gradient_dtype;
  sent->deadline = MonotonicNow() + options_.result_timeout;
  sent->contribution.id = {v1::FRAME_KIND_GRADIENT, step, static_cast<uint32_t>(layer)};
  sent->contribution.mode = *mode;
  sent->contribution.samples = samples;
  sent->contribution.deadline = sent->deadline;
  sent->device_answer = std::make_shared<DeviceAnswer>(what, **plane, sent->out, state);
  sent->answer = sent->device_answer;
  sent->contribution.result = sent->answer;
  send_queue_.Post(std::move(sent));
  return PreconditionFuture(state);
}

absl::Status WorkerImpl::DevicePlaneStatus(int64_t layer, int device) {
  PRECONDOR_RETURN_IF_ERROR(CheckLayer(layer));
  PRECONDOR_RETURN_IF_ERROR(CheckWholeGradient(layer));
  PRECONDOR_RETURN_IF_ERROR(CheckSlots());
  const ShardRoutes::Link link = routes_.of_layer(static_cast<size_t>(layer));
  if (link == nullptr) return absl::OkStatus();
  PRECONDOR_RETURN_IF_ERROR(link->path().SlotStatus(""));
  PRECONDOR_ASSIGN_OR_RETURN(WorkerPlane* const plane, planes_.Of(device));
  return link->path().SlotStatus(plane->plane->device());
}

void WorkerImpl::Deliver(absl::Span<const DeviceSendQueue::Item> sends) {
  std::vector<DeviceGradientPtr> first_order, others;
  for (const DeviceSendQueue::Item& item : sends) {
    auto gradient = std::static_pointer_cast<const DeviceGradient>(item);
    (NeedsNoShard(gradient->contribution.mode) ? first_order : others).push_back(std::move(gradient));
  }
  AnswerOnDevice(first_order);
  SendOnDevice(others);
}

// Answers first-order steps on the device: with the gradient itself, or SKIP if it is not finite.
void WorkerImpl::AnswerOnDevice(absl::Span<const DeviceGradientPtr> gradients) {
  std::vector<DeviceGradientPtr> used;
  std::vector<ConstMatrixView> values;
  for (const DeviceGradientPtr& gradient : gradients) {
    if (!gradient->device_answer->BeginUse()) continue;
    used.push_back(gradient);
    values.push_back(gradient->values);
  }
  if (used.empty()) return;
  DevicePlane& plane = *used.front()->plane->plane;
  const absl::StatusOr<std::vector<PayloadFacts>> facts = plane.Inspect(values);
  absl::Status status = facts.status();
  std::vector<RegionCopy> copies;
  for (size_t i = 0; i < used.size() && status.ok(); ++i) {
    if ((*facts)[i].finite && used[i]->out.data != values[i].data) copies.push_back({values[i], used[i]->out});
  }
  if (!copies.empty()) status = plane.Copy(copies);
  for (size_t i = 0; i < used.size(); ++i) {
    DeviceAnswer& answer = *used[i]->device_answer;
    answer.EndUse();
    if (!status.ok()) {
      answer.Fail(status);
    } else if ((*facts)[i].finite) {
      answer.Complete({Decision::kIdentity, 0, 0, "first order"});
    } else {
      answer.Complete({Decision::kSkip, 0, 0, "the gradient is not finite"});
    }
  }
}

void WorkerImpl::SendOnDevice(absl::Span<const DeviceGradientPtr> gradients) {
  std::vector<absl::StatusOr<std::shared_ptr<Contribution>>> placed;
  std::vector<RegionCopy> copies;
  std::vector<DeviceAnswer*> used;
  for (const DeviceGradientPtr& gradient : gradients) placed.push_back(TakeSlot(gradient));
  // TakeSlot may have waited for a shard's ring, and meanwhile another shard's may have ended.
  for (size_t i = 0; i < gradients.size(); ++i) {
    absl::StatusOr<std::shared_ptr<Contribution>>& one = placed[i];
    if (!one.ok()) continue;
    if (!(*one)->region->Holds((*one)->slot)) {
      one = absl::UnavailableError("the ring has ended");
      continue;
    }
    if (!gradients[i]->device_answer->BeginUse()) {
      (*one)->region->GiveBack((*one)->slot);
      one = absl::CancelledError(gradients[i]->what + ": there is an outcome already");
      continue;
    }
    used.push_back(gradients[i]->device_answer.get());
    const ConstMatrixView values = gradients[i]->values;
    copies.push_back({values, MatrixView((*one)->region->at((*one)->slot), values.rows, values.cols)});
  }
  const absl::Status copied = copies.empty() ? absl::OkStatus() : gradients.front()->plane->plane->Copy(copies);
  for (DeviceAnswer* const answer : used) answer->EndUse();
  // A layer's next gradient may be one that goes through the host, because the layer's slot is taken: it follows.
  std::vector<absl::Status> in_slot;
  for (const absl::StatusOr<std::shared_ptr<Contribution>>& one : placed) {
    absl::Status& status = in_slot.emplace_back(one.status());
    if (!one.ok()) continue;
    status = copied.ok() ? routes_.Submit((*one)->id.layer, *one) : copied;
    if (!status.ok()) (*one)->region->GiveBack((*one)->slot);
  }
  held_->NoteHeld();
  held_->Send();
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (!in_slot[i].ok()) {
      if (gradients[i]->answer->ready()) continue;  // it was late, or the worker has failed
      const absl::Status sent = SendThroughHost(*gradients[i]);
      if (!sent.ok()) gradients[i]->answer->Fail(sent);
    }
    MutexLock lock(mu_);
    ++(in_slot[i].ok() ? device_plane_.in_ring : device_plane_.over_socket);
    if (!in_slot[i].ok()) device_plane_.reason = std::string(in_slot[i].message());
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

absl::StatusOr<std::shared_ptr<Contribution>> WorkerImpl::TakeSlot(const DeviceGradientPtr& gradient) {
  PRECONDOR_RETURN_IF_ERROR(CheckSlots());
  const size_t layer = gradient->contribution.id.layer;
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
  auto contribution = std::make_shared<Contribution>(gradient->contribution);
  const int64_t rows = gradient->values.rows, cols = gradient->values.cols;
  const uint64_t bytes = static_cast<uint64_t>(rows * cols) * sizeof(float);
  PRECONDOR_ASSIGN_OR_RETURN(
      const PayloadPath::Place place,
      link->path().TakeSlot(gradient->plane->plane, wanted, contribution->id.layer, bytes, contribution->deadline));
  contribution->region = place.region;
  contribution->may_wait = true;
  contribution->slot = place.slot;
  contribution->tensors.push_back(wire::EncodeTensorHeader({DType::kF32, {rows, cols}, 1.0f}));
  contribution->make_inline = [gradient] { return ContributionOnHost(*gradient); };
  return contribution;
}

absl::Status WorkerImpl::SendThroughHost(const DeviceGradient& gradient) {
  PRECONDOR_ASSIGN_OR_RETURN(std::shared_ptr<const Contribution> contribution, ContributionOnHost(gradient));
  return routes_.Submit(gradient.contribution.id.layer, std::move(contribution));
}

absl::StatusOr<std::shared_ptr<const Contribution>> WorkerImpl::ContributionOnHost(const DeviceGradient& gradient) {
  const int64_t rows = gradient.values.rows, cols = gradient.values.cols;
  auto values = std::make_shared<std::vector<float>>(static_cast<size_t>(rows * cols));
  const MatrixView host(values->data(), rows, cols);
  if (!gradient.device_answer->BeginUse()) return absl::CancelledError(gradient.what + ": there is an outcome already");
  const absl::Status copied = gradient.plane->plane->Download(gradient.values, host);
  gradient.device_answer->EndUse();
  PRECONDOR_RETURN_IF_ERROR(copied);
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
