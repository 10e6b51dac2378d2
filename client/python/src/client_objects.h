// SPDX-License-Identifier: Apache-2.0
// precondor._core.Client, Worker and Future: the C++ client for Python. precondor/_client.py documents them for users.
// Methods need the GIL, which serialises them until they wait; a wait is on locals alone.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <pybind11/numpy.h>
#include <string>
#include <tuple>
#include <vector>

#include "absl/status/statusor.h"

#include "client/python/src/python_call.h"
#include "precondor/client.h"
#include "precondor/statistics.h"

namespace precondor::python {

// One gradient's answer, and the array that it is written to.
class FutureObject {
 public:
  // `gradient` is None for an abstention.
  FutureObject(PreconditionFuture future, pybind11::object gradient, ServerCalls calls)
      : calls_(std::move(calls)), future_(std::move(future)), gradient_(std::move(gradient)) {}

  bool Ready() const;
  bool Wait(double timeout_s) const;
  // (gradient or None, decision, factor_version, inner_product, reason) of each. Waits in order, and raises the first
  // error.
  static pybind11::list Results(const std::vector<const FutureObject*>& futures);

 private:
  const OwnProcess process_;
  const ServerCalls calls_;
  const PreconditionFuture future_;
  const pybind11::object gradient_;
};

class WorkerObject;

// A report that is under way. Its worker outlives it.
class ReportObject {
 public:
  ReportObject(WorkerObject* worker, ReportFuture report) : worker_(worker), report_(std::move(report)) {}
  // (lease_through_step, next_mode, snapshot_at, snapshot_id)
  pybind11::tuple Result() const;
  bool Wait(double timeout_s) const;

 private:
  WorkerObject* const worker_;
  const ReportFuture report_;
};

// A rank of a session. Holds the arrays of every gradient under way.
class WorkerObject {
 public:
  // `first_step` may be started: Join has made sure.
  WorkerObject(std::shared_ptr<Worker> worker, uint64_t first_step, ServerCalls calls)
      : calls_(std::move(calls)), worker_(std::move(worker)), lease_through_step_(first_step) {}
  ~WorkerObject();

  pybind11::dict Spec() const;
  uint32_t Rank() const { return Get()->session().rank; }
  std::optional<uint64_t> RollbackStep() const { return Get()->session().rollback_step; }
  std::string ModeOf(uint64_t step) const;
  bool NeedsStatistics(uint64_t step, int64_t layer) const;
  bool SendsGradient(int64_t layer) const;
  // {"epoch", "traffic", "device_plane", "lost_updates" by layer}
  pybind11::dict Status() const;

  pybind11::array Statistics(uint64_t step, int64_t layer, const std::string& side, const pybind11::object& rows,
                             double row_scale) const;
  // f32 [q, rows] of +1 and -1.
  pybind11::array SketchSigns(uint64_t step, int64_t layer, const std::string& side, uint64_t first_row, int64_t rows,
                              std::optional<uint32_t> rank) const;
  // f32 [q, d], or with `ones` [q, d + 1].
  pybind11::array SketchSums(uint64_t step, int64_t layer, const std::string& side, uint64_t first_row,
                             const pybind11::object& rows, bool ones, std::optional<uint32_t> rank) const;
  void SendStatistics(uint64_t step, int64_t layer, const pybind11::object& a, const pybind11::object& g,
                      uint64_t samples);
  void AbstainStatistics(uint64_t step, int64_t layer);
  // layer, gradient, out
  using GradientTuple = std::tuple<int64_t, pybind11::object, pybind11::object>;
  std::vector<std::unique_ptr<FutureObject>> Precondition(uint64_t step, const std::vector<GradientTuple>& gradients,
                                                          uint64_t samples, bool more);
  // row, rows, col, cols, sent
  using PartTuple = std::tuple<int64_t, int64_t, int64_t, int64_t, bool>;
  std::unique_ptr<FutureObject> PreconditionParts(uint64_t step, int64_t layer, const std::vector<PartTuple>& parts,
                                                  const pybind11::object& gradient, const pybind11::object& out);
  // In place, of a matrix in device memory.
  std::unique_ptr<FutureObject> PreconditionOnDevice(uint64_t step, int64_t layer, const pybind11::object& gradient,
                                                     uint64_t samples, int device, uintptr_t stream);
  // "", or why not.
  pybind11::str DevicePlaneStatus(int64_t layer, int device) const;
  std::unique_ptr<FutureObject> AbstainGradient(uint64_t step, int64_t layer);
  uint64_t FactorsChecksum(int64_t layer) const;
  pybind11::bytes ReadFactors(int64_t layer) const;
  void Flush();
  // See ReportObject::Result.
  pybind11::tuple ReportStep(uint64_t step, double loss, uint64_t samples, bool finite, double learning_rate);
  std::unique_ptr<ReportObject> BeginReport(uint64_t step, double loss, uint64_t samples, bool finite,
                                            double learning_rate);
  void Leave();
  // Ends everything under way. In a forked child it forgets the worker instead: its threads are the parent's.
  void Close();

 private:
  friend class ReportObject;
  struct Sent {
    PreconditionFuture future;
    pybind11::object gradient;
    pybind11::object out;
  };

  // Raises after Close and in a forked child.
  std::shared_ptr<Worker> Get() const;
  void CheckLayer(int64_t layer) const;
  void CheckSketches(int64_t layer, int64_t rows) const;
  // `call` may wait, for the lease of `step`: within the lease that is known it does not.
  void Run(Worker& worker, uint64_t step, const std::function<void()>& call) const;
  void Run(Worker& worker, const std::function<void()>& call) const;
  void ForgetAnswered();
  pybind11::tuple TakeDirective(const absl::StatusOr<StepDirective>& answer);
  // Sends gradients by `call`, which gets their indexes and runs without the GIL, and holds the arrays until the
  // answers.
  std::vector<std::unique_ptr<FutureObject>> Send(uint64_t step, const std::vector<Sent>& sends,
                                                  const std::function<PreconditionFuture(Worker&, size_t)>& call);

  const OwnProcess process_;
  const ServerCalls calls_;
  std::shared_ptr<Worker> worker_;
  uint64_t lease_through_step_;
  uint64_t last_sent_step_ = 0;
  std::deque<std::shared_ptr<Sent>> sent_;
};

class ClientObject {
 public:
  // `watch` is that of ServerCalls.
  ClientObject(const ClientOptions& options, pybind11::object watch);
  ~ClientObject();

  void WaitForServer();
  std::pair<bool, bool> OpenSession(const pybind11::dict& spec);
  std::unique_ptr<WorkerObject> Join(const std::string& session, uint32_t rank, uint64_t incarnation,
                                     uint64_t first_step, const std::vector<uint64_t>& factor_versions);
  void RestoreSession(const pybind11::dict& spec, uint64_t step, const std::vector<std::string>& factors);
  bool CloseSession(const std::string& session);
  void Close();

 private:
  std::shared_ptr<Client> Get() const;

  const OwnProcess process_;
  const ServerCalls calls_;
  std::shared_ptr<Client> client_;
};

}  // namespace precondor::python
