// SPDX-License-Identifier: Apache-2.0
// precondor._core: what the package precondor is made of. Not for users: _client.py has the documented classes.
#include <cstdint>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <string>
#include <vector>

#include "absl/time/time.h"

#include "client/python/src/client_objects.h"
#include "client/python/src/conversions.h"
#include "client/python/src/python_call.h"
#include "kernels/base/process_setup.h"
#include "precondor/statistics.h"

namespace py = pybind11;
using precondor::python::ClientObject;
using precondor::python::FutureObject;
using precondor::python::ReportObject;
using precondor::python::WorkerObject;

PYBIND11_MODULE(_core, m) {
#ifdef PRECONDOR_HAVE_OWN_OPENBLAS  // NumPy's threads may be at work in a shared one
  precondor::UseBestBlasCore();
#endif
  // pybind11 before 2.12 loads NumPy at the first array, under a lock with which two threads' first arrays wait for
  // each other and the GIL.
  py::array_t<float>(0);

  py::class_<FutureObject>(m, "Future")
      .def("ready", &FutureObject::Ready)
      .def("wait", &FutureObject::Wait, py::arg("timeout_s"));
  m.def("results", &FutureObject::Results);

  py::class_<ReportObject>(m, "Report").def("result", &ReportObject::Result).def("wait", &ReportObject::Wait);

  py::class_<WorkerObject>(m, "Worker")
      .def("spec", &WorkerObject::Spec)
      .def("rank", &WorkerObject::Rank)
      .def("rollback_step", &WorkerObject::RollbackStep)
      .def("mode_of", &WorkerObject::ModeOf)
      .def("needs_statistics", &WorkerObject::NeedsStatistics)
      .def("sends_gradient", &WorkerObject::SendsGradient)
      .def("status", &WorkerObject::Status)
      .def("statistics", &WorkerObject::Statistics)
      .def("sketch_signs", &WorkerObject::SketchSigns)
      .def("sketch_sums", &WorkerObject::SketchSums)
      .def("send_statistics", &WorkerObject::SendStatistics)
      .def("abstain_statistics", &WorkerObject::AbstainStatistics)
      .def("precondition", &WorkerObject::Precondition)
      .def("precondition_parts", &WorkerObject::PreconditionParts)
      .def("precondition_on_device", &WorkerObject::PreconditionOnDevice)
      .def("device_plane_status", &WorkerObject::DevicePlaneStatus)
      .def("abstain_gradient", &WorkerObject::AbstainGradient)
      .def("factors_checksum", &WorkerObject::FactorsChecksum)
      .def("read_factors", &WorkerObject::ReadFactors)
      .def("flush", &WorkerObject::Flush)
      .def("report_step", &WorkerObject::ReportStep)
      .def("begin_report", &WorkerObject::BeginReport, py::keep_alive<0, 1>())
      .def("leave", &WorkerObject::Leave)
      .def("close", &WorkerObject::Close);

  py::class_<ClientObject>(m, "Client")
      .def(py::init([](std::string coordinator, double connect_s, double rpc_s, double result_s, double join_s,
                       double lease_s, std::string tls_ca, std::string tls_cert, std::string tls_key,
                       std::string token_file, std::string traceparent, std::vector<py::bytes> rank_devices,
                       py::object watch) {
        return std::make_unique<ClientObject>(
            precondor::ClientOptions{.coordinator = std::move(coordinator),
                                     .connect_timeout = absl::Seconds(connect_s),
                                     .rpc_timeout = absl::Seconds(rpc_s),
                                     .result_timeout = absl::Seconds(result_s),
                                     .join_timeout = absl::Seconds(join_s),
                                     .lease_timeout = absl::Seconds(lease_s),
                                     .security = {.tls_ca = std::move(tls_ca),
                                                  .tls_cert = std::move(tls_cert),
                                                  .tls_key = std::move(tls_key),
                                                  .token_file = std::move(token_file)},
                                     .traceparent = std::move(traceparent),
                                     .rank_devices = {rank_devices.begin(), rank_devices.end()}},
            std::move(watch));
      }))
      .def("wait_for_server", &ClientObject::WaitForServer)
      .def("open_session", &ClientObject::OpenSession)
      .def("join", &ClientObject::Join)
      .def("restore_session", &ClientObject::RestoreSession)
      .def("close_session", &ClientObject::CloseSession)
      .def("close", &ClientObject::Close);

  py::class_<precondor::MethodTraits>(m, "MethodTraits")
      .def_property_readonly("name", [](const precondor::MethodTraits& traits) { return std::string(traits.name); })
      .def_property_readonly(
          "takes_statistics",
          [](const precondor::MethodTraits& traits) { return traits.statistics != precondor::StatisticsForm::kNone; })
      .def_property_readonly("default_statistics",
                             [](const precondor::MethodTraits& traits) {
                               return std::string(precondor::StatisticsKindName(traits.default_statistics));
                             })
      .def_property_readonly(
          "default_scaling",
          [](const precondor::MethodTraits& traits) {
            return std::string(precondor::kScalingNames[static_cast<size_t>(traits.default_scaling)]);
          })
      .def_readonly("whole_updates", &precondor::MethodTraits::whole_updates);
  m.def("known_methods", &precondor::KnownMethods);
  m.def("cuda_device_id",
        [](int device) { return py::bytes(precondor::python::ValueOrRaise(precondor::CudaDeviceId(device))); });

  m.def("kl_clip_scale", [](const std::vector<double>& inner_products, double learning_rate, double clip) {
    return precondor::KlClipScale(inner_products, learning_rate, clip);
  });
}
