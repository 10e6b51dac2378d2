// SPDX-License-Identifier: Apache-2.0
#include "client/python/src/client_objects.h"

#include <algorithm>
#include <cmath>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <string>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

#include "client/python/src/conversions.h"
#include "kernels/base/clock.h"
#include "kernels/base/error_reason.h"

namespace precondor::python {
namespace {

namespace py = pybind11;

// How soon Ctrl-C is noticed, and how long Wait is uninterrupted.
constexpr absl::Duration kSlice = absl::Milliseconds(50);

py::str Text(absl::string_view text) { return py::str(text.data(), text.size()); }

absl::Status CheckLayerExists(const SessionSpec& spec, int64_t layer) {
  const auto count = static_cast<int64_t>(spec.layers.size());
  if (layer >= 0 && layer < count) return absl::OkStatus();
  return ReasonedStatus(absl::StatusCode::kNotFound, ErrorReason::kUnknownLayer,
                        absl::StrCat("session ", spec.name, ": expected a layer in [0, ", count, "), got ", layer));
}

Side SideOf(const std::string& side) {
  if (side == "input") return Side::kInput;
  if (side == "output") return Side::kOutput;
  Raise(absl::InvalidArgumentError(absl::StrCat("side: expected input or output, got ", side)));
}

// What is wrong, "" for nothing.
py::str ReasonOf(const absl::Status& status) { return Text(status.ok() ? "" : status.message()); }

absl::Status Closed(absl::string_view what) {
  return absl::FailedPreconditionError(absl::StrCat("the ", what, " has been closed"));
}

}  // namespace

// --- Future -------------------------------------------------------------------------------------------------------

bool FutureObject::Ready() const {
  process_.Check();
  return future_.ready();
}

bool FutureObject::Wait(double timeout_s) const {
  process_.Check();
  const absl::Time deadline =
      std::isinf(timeout_s) ? absl::InfiniteFuture() : MonotonicNow() + absl::Seconds(timeout_s);
  calls_.Until([&] {
    const absl::Duration left = deadline - MonotonicNow();
    return future_.WaitFor(std::clamp(left, absl::ZeroDuration(), kSlice)) || left <= kSlice;
  });
  return future_.ready();
}

py::list FutureObject::Results(const std::vector<const FutureObject*>& futures) {
  py::list results;
  if (futures.empty()) return results;
  const FutureObject& first = *futures.front();
  first.process_.Check();
  std::vector<Preconditioned> answers;
  absl::Status failed;
  first.calls_.Until([&] {
    const absl::Time until = MonotonicNow() + kSlice;
    while (failed.ok() && answers.size() < futures.size()) {
      const PreconditionFuture& next = futures[answers.size()]->future_;
      if (!next.WaitFor(until - MonotonicNow())) return false;
      absl::StatusOr<Preconditioned> answer = next.Wait();  // a late answer's error takes a call
      failed = answer.status();
      if (answer.ok()) answers.push_back(*std::move(answer));
    }
    return true;
  });
  first.calls_.RaiseUnlessOk(failed);
  for (size_t i = 0; i < futures.size(); ++i) {
    const Preconditioned& answer = answers[i];
    results.append(py::make_tuple(answer.decision == Decision::kSkip ? py::none() : futures[i]->gradient_,
                                  Text(DecisionName(answer.decision)), answer.factor_version, answer.inner_product,
                                  Text(answer.reason)));
  }
  return results;
}

// --- Worker -------------------------------------------------------------------------------------------------------

WorkerObject::~WorkerObject() { Close(); }

void WorkerObject::Close() {
  std::shared_ptr<Worker> worker = std::exchange(worker_, nullptr);
  const std::deque<std::shared_ptr<Sent>> sent = std::exchange(sent_, {});
  if (worker == nullptr) return;
  if (!process_.IsCurrent()) {
    new std::shared_ptr<Worker>(std::move(worker));  // never deleted: its end would wait for threads that are not here
    return;
  }
  {
    py::gil_scoped_release released;
    worker->Cancel();
    worker.reset();
  }
  for (const std::shared_ptr<Sent>& one : sent) {
    if (one->future.ready()) continue;
    // gRPC may still read it: so it is never freed.
    one->gradient.release();
    one->out.release();
  }
}

std::shared_ptr<Worker> WorkerObject::Get() const {
  process_.Check();
  if (worker_ == nullptr) Raise(Closed("worker"));
  return worker_;
}

void WorkerObject::Run(Worker& worker, const std::function<void()>& call) const {
  calls_.Run(call, [&worker] { worker.Cancel(); });
}

void WorkerObject::Run(Worker& worker, uint64_t step, const std::function<void()>& call) const {
  if (step > lease_through_step_) return Run(worker, call);
  py::gil_scoped_release released;
  call();
}

void WorkerObject::CheckLayer(int64_t layer) const { RaiseUnlessOk(CheckLayerExists(Get()->session().spec, layer)); }

py::dict WorkerObject::Spec() const { return SpecToDict(Get()->session().spec); }

std::string WorkerObject::ModeOf(uint64_t step) const { return std::string(ModeName(Get()->ModeOf(step))); }

bool WorkerObject::NeedsStatistics(uint64_t step, int64_t layer) const {
  CheckLayer(layer);
  return Get()->NeedsStatistics(step, layer);
}

bool WorkerObject::SendsGradient(int64_t layer) const {
  CheckLayer(layer);
  return Get()->SendsGradient(layer);
}

py::dict WorkerObject::Status() const {
  const WorkerStatus status = Get()->status();
  py::dict traffic, plane, lost, dict;
  traffic["statistics_bytes"] = status.traffic.statistics_bytes;
  traffic["gradient_bytes"] = status.traffic.gradient_bytes;
  traffic["result_bytes"] = status.traffic.result_bytes;
  traffic["overhead_bytes"] = status.traffic.overhead_bytes;
  traffic["reconnects"] = status.traffic.reconnects;
  const DevicePlaneUse& use = status.device_plane;
  plane["backends"] = std::vector<std::string>(use.backends.begin(), use.backends.end());
  plane["in_ring"] = use.in_ring;
  plane["over_socket"] = use.over_socket;
  plane["reason"] = Text(use.reason);
  for (const auto& [layer, updates] : status.lost_updates) lost[py::int_(layer)] = updates;
  dict["epoch"] = status.epoch;
  dict["traffic"] = traffic;
  dict["device_plane"] = plane;
  dict["lost_updates"] = lost;
  return dict;
}

py::array WorkerObject::Statistics(uint64_t step, int64_t layer, const std::string& side, const py::object& rows,
                                   double row_scale) const {
  CheckLayer(layer);
  const std::shared_ptr<Worker> worker = Get();
  const SessionSpec& spec = worker->session().spec;
  const SketchKey key{spec.seed, step, static_cast<uint32_t>(layer), SideOf(side), worker->session().rank};
  const LayerSpec& shape = spec.layers[static_cast<size_t>(layer)];
  const int64_t d = key.side == Side::kInput ? shape.d_in : shape.d_out;
  const py::array readable = Readable("rows", rows);
  if (readable.shape(0) < 1 || readable.shape(1) != d) {
    Raise(ReasonedStatus(absl::StatusCode::kInvalidArgument, ErrorReason::kShapeMismatch,
                         absl::StrCat("session ", spec.name, " layer ", layer, " ", side, ": rows: expected [n, ", d,
                                      "] with n >= 1, got [", readable.shape(0), ", ", readable.shape(1), "]")));
  }
  const StatisticsShape extents = ShapeOfStatistics(spec, layer, d, readable.shape(0));
  py::array_t<float> out = NewMatrix(extents.rows, extents.cols);
  const ConstMatrixView rows_view = ViewOf(readable);
  const MatrixView out_view = ViewOf(out);
  absl::Status status;
  {
    py::gil_scoped_release released;
    status = ComputeStatistics(spec, key, rows_view, row_scale, out_view);
  }
  RaiseUnlessOk(status);
  return out;
}

void WorkerObject::CheckSketches(int64_t layer, int64_t rows) const {
  CheckLayer(layer);
  const SessionSpec& spec = Get()->session().spec;
  if (StatisticsOf(spec, layer) == StatisticsKind::kSigned && rows >= 1) return;
  Raise(absl::InvalidArgumentError(absl::StrCat("session ", spec.name, " layer ", layer,
                                                ": expected statistics SIGNED and at least one row, got ",
                                                StatisticsKindName(StatisticsOf(spec, layer)), " and ", rows)));
}

py::array WorkerObject::SketchSigns(uint64_t step, int64_t layer, const std::string& side, uint64_t first_row,
                                    int64_t rows, std::optional<uint32_t> rank) const {
  CheckSketches(layer, rows);
  const std::shared_ptr<Worker> worker = Get();
  const SessionSpec& spec = worker->session().spec;
  const SketchKey key{spec.seed, step, static_cast<uint32_t>(layer), SideOf(side),
                      rank.value_or(worker->session().rank)};
  py::array_t<float> out = NewMatrix(VectorsPerWorker(spec, layer), rows);
  precondor::SketchSigns(key, first_row, ViewOf(out));
  return out;
}

py::array WorkerObject::SketchSums(uint64_t step, int64_t layer, const std::string& side, uint64_t first_row,
                                   const py::object& rows, bool ones, std::optional<uint32_t> rank) const {
  const py::array readable = Readable("rows", rows);
  CheckSketches(layer, readable.shape(0));
  const std::shared_ptr<Worker> worker = Get();
  const SessionSpec& spec = worker->session().spec;
  const SketchKey key{spec.seed, step, static_cast<uint32_t>(layer), SideOf(side),
                      rank.value_or(worker->session().rank)};
  py::array_t<float> out = NewMatrix(VectorsPerWorker(spec, layer), readable.shape(1) + (ones ? 1 : 0));
  const ConstMatrixView rows_view = ViewOf(readable);
  const MatrixView out_view = ViewOf(out);
  absl::Status status;
  {
    py::gil_scoped_release released;
    status = precondor::SketchSums(key, first_row, rows_view, out_view);
  }
  RaiseUnlessOk(status);
  return out;
}

void WorkerObject::SendStatistics(uint64_t step, int64_t layer, const py::object& a, const py::object& g,
                                  uint64_t samples) {
  const std::shared_ptr<Worker> worker = Get();
  const py::array input = Readable("a", a);
  const py::array output = Readable("g", g);
  const ConstMatrixView input_view = ViewOf(input);
  const ConstMatrixView output_view = ViewOf(output);
  absl::Status status;
  Run(*worker, step, [&] { status = worker->SendStatistics(step, layer, input_view, output_view, samples); });
  calls_.RaiseUnlessOk(status);
}

void WorkerObject::AbstainStatistics(uint64_t step, int64_t layer) {
  const std::shared_ptr<Worker> worker = Get();
  absl::Status status;
  Run(*worker, step, [&] { status = worker->AbstainStatistics(step, layer); });
  calls_.RaiseUnlessOk(status);
}

void WorkerObject::ForgetAnswered() {
  while (!sent_.empty() && sent_.front()->future.ready()) sent_.pop_front();
}

std::vector<std::unique_ptr<FutureObject>> WorkerObject::Send(
    uint64_t step, const std::vector<Sent>& sends, const std::function<PreconditionFuture(Worker&, size_t)>& call) {
  const std::shared_ptr<Worker> worker = Get();
  // Once a step: the check sends what waits for a next gradient.
  if (std::exchange(last_sent_step_, step) != step) ForgetAnswered();
  // Held from before they are sent, also where a signal ends the call.
  std::vector<std::shared_ptr<Sent>> under_way;
  for (const Sent& one : sends) sent_.push_back(under_way.emplace_back(std::make_shared<Sent>(one)));
  {
    std::vector<PreconditionFuture> sent;  // other threads read those under way
    const auto keep = absl::MakeCleanup([&] {
      for (size_t i = 0; i < sent.size(); ++i) under_way[i]->future = sent[i];
    });
    Run(*worker, step, [&] {
      for (size_t i = 0; i < sends.size(); ++i) sent.push_back(call(*worker, i));
    });
  }
  std::vector<std::unique_ptr<FutureObject>> futures;
  for (const auto& one : under_way) futures.push_back(std::make_unique<FutureObject>(one->future, one->out, calls_));
  return futures;
}

std::vector<std::unique_ptr<FutureObject>> WorkerObject::Precondition(uint64_t step,
                                                                      const std::vector<GradientTuple>& gradients,
                                                                      uint64_t samples, bool more) {
  std::vector<Sent> sends;
  std::vector<GradientBuffers> buffers;
  for (const auto& [layer, gradient, out] : gradients) {
    const py::array sent = Readable("gradient", gradient);
    const py::object answer = out.is_none() ? NewMatrix(sent.shape(0), sent.shape(1)) : out;
    buffers.emplace_back(ViewOf(sent), Writable("out", answer));
    sends.push_back({PreconditionFuture(), sent, answer});
  }
  return Send(step, sends, [&](Worker& worker, size_t i) {
    return worker.Precondition(step, std::get<0>(gradients[i]), buffers[i], samples, more);
  });
}

std::unique_ptr<FutureObject> WorkerObject::PreconditionParts(uint64_t step, int64_t layer,
                                                              const std::vector<PartTuple>& parts,
                                                              const py::object& gradient, const py::object& out) {
  std::vector<GradientPart> rectangles;
  for (const auto& [row, rows, col, cols, sent] : parts) rectangles.push_back({row, rows, col, cols, sent});
  const py::array sent = Readable("gradient", gradient);
  const MatrixView answer_view = Writable("out", out);
  const ConstMatrixView gradient_view = ViewOf(sent);
  return std::move(Send(step, {{PreconditionFuture(), sent, out}}, [&](Worker& worker, size_t) {
                     return worker.Precondition(step, layer, {rectangles, gradient_view, answer_view}, /*samples=*/1);
                   }).front());
}

std::unique_ptr<FutureObject> WorkerObject::PreconditionOnDevice(uint64_t step, int64_t layer,
                                                                 const py::object& gradient, uint64_t samples,
                                                                 int device, uintptr_t stream) {
  const DeviceTensor tensor = OnDevice("gradient", gradient, device, stream);
  return std::move(Send(step, {{PreconditionFuture(), gradient, gradient}}, [&](Worker& worker, size_t) {
                     return worker.Precondition(step, layer, {tensor, tensor}, samples);
                   }).front());
}

py::str WorkerObject::DevicePlaneStatus(int64_t layer, int device) const {
  CheckLayer(layer);
  const std::shared_ptr<Worker> worker = Get();
  absl::Status status;
  {
    py::gil_scoped_release released;  // it may load a library
    status = worker->DevicePlaneStatus(layer, device);
  }
  return ReasonOf(status);
}

std::unique_ptr<FutureObject> WorkerObject::AbstainGradient(uint64_t step, int64_t layer) {
  const std::shared_ptr<Worker> worker = Get();
  PreconditionFuture future;
  Run(*worker, step, [&] { future = worker->AbstainGradient(step, layer); });
  return std::make_unique<FutureObject>(std::move(future), py::none(), calls_);
}

uint64_t WorkerObject::FactorsChecksum(int64_t layer) const {
  const std::shared_ptr<Worker> worker = Get();
  absl::StatusOr<uint64_t> checksum;
  Run(*worker, [&] { checksum = worker->FactorsChecksum(layer); });
  return calls_.ValueOrRaise(checksum);
}

py::bytes WorkerObject::ReadFactors(int64_t layer) const {
  const std::shared_ptr<Worker> worker = Get();
  absl::StatusOr<std::string> factors;
  Run(*worker, [&] { factors = worker->ReadFactors(layer); });
  return py::bytes(calls_.ValueOrRaise(std::move(factors)));
}

void WorkerObject::Flush() {
  const std::shared_ptr<Worker> worker = Get();
  absl::Status status;
  Run(*worker, [&] { status = worker->Flush(); });
  calls_.RaiseUnlessOk(status);
}

py::tuple WorkerObject::ReportStep(uint64_t step, double loss, uint64_t samples, bool finite, double learning_rate) {
  const std::shared_ptr<Worker> worker = Get();
  const ReportFuture report = worker->ReportStep(step, loss, samples, finite, learning_rate);
  absl::StatusOr<StepDirective> answer;
  Run(*worker, [&] { answer = report.Wait(); });
  return TakeDirective(answer);
}

std::unique_ptr<ReportObject> WorkerObject::BeginReport(uint64_t step, double loss, uint64_t samples, bool finite,
                                                        double learning_rate) {
  return std::make_unique<ReportObject>(this, Get()->ReportStep(step, loss, samples, finite, learning_rate));
}

bool ReportObject::Wait(double timeout_s) const {
  py::gil_scoped_release released;
  return report_.WaitFor(absl::Seconds(timeout_s));
}

py::tuple ReportObject::Result() const {
  worker_->process_.Check();
  worker_->calls_.Until([this] { return report_.WaitFor(kSlice); });
  absl::StatusOr<StepDirective> answer;
  {
    py::gil_scoped_release released;  // another report's answer may make it wait after all
    answer = report_.Wait();
  }
  return worker_->TakeDirective(answer);
}

py::tuple WorkerObject::TakeDirective(const absl::StatusOr<StepDirective>& answer) {
  const StepDirective directive = calls_.ValueOrRaise(answer);
  lease_through_step_ = std::max(lease_through_step_, directive.lease_through_step);
  return py::make_tuple(directive.lease_through_step, Text(ModeName(directive.next_mode)), directive.snapshot_at,
                        directive.snapshot_id);
}

void WorkerObject::Leave() {
  const std::shared_ptr<Worker> worker = Get();
  absl::Status status;
  Run(*worker, [&] { status = worker->Leave(); });
  calls_.RaiseUnlessOk(status);
}

// --- Client -------------------------------------------------------------------------------------------------------

ClientObject::ClientObject(const ClientOptions& options, py::object watch) : calls_(std::move(watch)) {
  OwnProcess::CheckNotForked();
  py::gil_scoped_release released;
  client_ = Client::Make(options);
}

ClientObject::~ClientObject() { Close(); }

void ClientObject::Close() {
  std::shared_ptr<Client> client = std::exchange(client_, nullptr);
  if (client == nullptr) return;
  if (!process_.IsCurrent()) {
    new std::shared_ptr<Client>(std::move(client));  // never deleted, as WorkerObject::Close
    return;
  }
  py::gil_scoped_release released;
  client->Cancel();
  client.reset();
}

std::shared_ptr<Client> ClientObject::Get() const {
  process_.Check();
  if (client_ == nullptr) Raise(Closed("client"));
  return client_;
}

void ClientObject::WaitForServer() {
  const std::shared_ptr<Client> client = Get();
  absl::Status status;
  calls_.Run([&] { status = client->WaitForServer(); }, [&] { client->Cancel(); });
  calls_.RaiseUnlessOk(status);
}

std::pair<bool, bool> ClientObject::OpenSession(const py::dict& dict) {
  const std::shared_ptr<Client> client = Get();
  const SessionSpec spec = ValueOrRaise(SpecFromDict(dict));
  absl::StatusOr<Opened> opened;
  calls_.Run([&] { opened = client->OpenSession(spec); }, [&] { client->Cancel(); });
  const Opened session = calls_.ValueOrRaise(std::move(opened));
  return {session.created, session.unused};
}

std::unique_ptr<WorkerObject> ClientObject::Join(const std::string& session, uint32_t rank, uint64_t incarnation,
                                                 uint64_t first_step, const std::vector<uint64_t>& factor_versions) {
  const std::shared_ptr<Client> client = Get();
  absl::StatusOr<std::unique_ptr<Worker>> worker;
  const WorkerOptions options{
      .rank = rank, .incarnation = incarnation, .first_step = first_step, .factor_versions = factor_versions};
  calls_.Run([&] { worker = client->Join(session, options); }, [&] { client->Cancel(); });
  return std::make_unique<WorkerObject>(calls_.ValueOrRaise(std::move(worker)), first_step, calls_);
}

void ClientObject::RestoreSession(const py::dict& dict, uint64_t step, const std::vector<std::string>& factors) {
  const std::shared_ptr<Client> client = Get();
  const SessionSpec spec = ValueOrRaise(SpecFromDict(dict));
  absl::Status restored;
  calls_.Run([&] { restored = client->RestoreSession(spec, step, factors); }, [&] { client->Cancel(); });
  calls_.RaiseUnlessOk(restored);
}

bool ClientObject::CloseSession(const std::string& session) {
  const std::shared_ptr<Client> client = Get();
  absl::StatusOr<bool> existed;
  calls_.Run([&] { existed = client->CloseSession(session); }, [&] { client->Cancel(); });
  return calls_.ValueOrRaise(std::move(existed));
}

}  // namespace precondor::python
