// SPDX-License-Identifier: Apache-2.0
#include "server/app/app.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <fstream>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <map>
#include <optional>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "kernels/base/clock.h"
#include "kernels/base/mutex.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/unix_address.h"
#include "kernels/cuda/cuda_module.h"
#include "proto/wire/channel.h"
#include "proto/wire/channel_security.h"
#include "server/app/coordinator_storage.h"
#include "server/app/local_shard.h"
#include "server/app/memory_budget.h"
#include "server/app/periodic.h"
#include "server/app/shard_backend.h"
#include "server/core/coordinator/coordinator.h"
#include "server/core/executors/thread_pool.h"
#include "server/core/shard/shard.h"
#include "server/http/http_client.h"
#include "server/http/status_pages.h"
#include "server/metrics/metrics_observer.h"
#include "server/net/acceptor.h"
#include "server/net/listeners.h"
#include "server/recovery/layer_uploads.h"
#include "server/recovery/shard_store.h"
#include "server/rpc/precondition_service.h"
#include "server/rpc/server_security.h"
#include "server/rpc/services.h"
#include "server/rpc/shard_client.h"
#include "server/rpc/shared_regions.h"
#include "server/store/posix_file_system.h"
#include "server/trace/tracer.h"

namespace precondor {
namespace {

// Writes `port` and a newline to `path`, atomically, so that a reader never sees part of a number. Does nothing if
// `path` is empty. Returns Unavailable if the file cannot be written.
absl::Status WritePortFile(const std::string& path, absl::string_view port) {
  if (path.empty()) return absl::OkStatus();
  const std::string temporary = absl::StrCat(path, ".tmp");
  std::ofstream file(temporary);
  file << port << "\n";
  file.close();
  if (!file || std::rename(temporary.c_str(), path.c_str()) != 0) {
    return absl::UnavailableError(absl::StrCat("port file: cannot write ", path));
  }
  return absl::OkStatus();
}

constexpr char kLivenessService[] = "liveness";  // stays SERVING during a drain, unlike ""
// Control threads wait for shards, disks and etcd. A session's calls take one or two of them, for any number of ranks.
constexpr int kControlThreads = 32;

v1::Role EncodeRole(ServerRole role) {
  switch (role) {
    case ServerRole::kAll:
      return v1::ROLE_ALL;
    case ServerRole::kShard:
      return v1::ROLE_SHARD;
    case ServerRole::kCoordinator:
      return v1::ROLE_COORDINATOR;
  }
  return v1::ROLE_UNSPECIFIED;
}

v1::SnapshotInfo EncodeSnapshot(const recovery::SnapshotSummary& summary) {
  v1::SnapshotInfo info;
  info.set_snapshot_id(summary.id);
  info.set_session_id(summary.session_id);
  info.set_session(summary.session);
  info.set_step(summary.step);
  info.set_layers(static_cast<uint32_t>(summary.layers));
  info.set_bytes(summary.bytes);
  return info;
}

// Returns null if no collector is configured.
std::unique_ptr<trace::Tracer> MakeTracer(const ServerConfig& config, const Clock& clock, Logger& logger) {
  if (config.trace_endpoint.empty()) return nullptr;
  std::array<char, 256> host = {};
  gethostname(host.data(), host.size() - 1);
  const trace::Resource resource = {.version = PRECONDOR_VERSION,
                                    .role = std::string(ServerRoleName(config.role)),
                                    .instance = absl::StrCat(host.data(), "/", getpid())};
  const auto send = [collector = TraceCollector(config)](const std::string& body) {
    return metrics::PostJson(collector, trace::kOtlpPath, body, absl::Seconds(2));
  };
  return std::make_unique<trace::Tracer>(trace::Tracer::Options{.step_share = config.trace_ratio}, resource, clock,
                                         logger, send);
}

class ServerApp final : public App {
 public:
  ServerApp(const ServerConfig& config, Logger& logger)
      : config_(config),
        logger_(logger),
        metrics_(PRECONDOR_VERSION, ServerRoleName(config.role)),
        tracer_(MakeTracer(config, clock_, logger)),
        control_threads_(kControlThreads, /*tasks_on_fibers=*/0, "control"),
        runner_(
            control_threads_, clock_,
            [this](absl::string_view method, absl::StatusCode code, absl::Duration took) {
              metrics_.OnRpc(method, code, took);
            },
            tracer_.get()) {}

  ~ServerApp() override {
    metrics_.StopServing();
    if (storage_ != nullptr) storage_->Stop();
    if (standby_thread_.joinable()) standby_thread_.join();
    if (coordinator_ != nullptr) coordinator_->CancelShardCalls();
    timers_.StopAll();
    StopListening();
    if (server_ != nullptr) server_->Shutdown(wire::GrpcDeadline(absl::ZeroDuration()));
    server_.reset();
    control_threads_.Drain();
    if (compute_threads_ != nullptr) compute_threads_->Drain();
  }

  absl::Status Init() {
    if (config_.role != ServerRole::kCoordinator) PRECONDOR_RETURN_IF_ERROR(MakeShard());
    if (config_.role != ServerRole::kShard) PRECONDOR_RETURN_IF_ERROR(MakeCoordinator());
    snapshot_service_ = std::make_unique<rpc::SnapshotService>(MakeSnapshotSubject(), runner_);
    PRECONDOR_RETURN_IF_ERROR(StartServer());
    metrics_.SetProbe([this](metrics::MetricsObserver& metrics) {
      metrics.OnDroppedLogLines(logger_.dropped_lines());
      metrics.OnCertificateExpiry(security_->certificate_expiry());
      if (tracer_ != nullptr) {
        const trace::Tracer::Counts spans = tracer_->counts();
        metrics.OnTraceSpans(spans.sent + spans.dropped, spans.dropped);
      }
      std::vector<ShardSessionSummary> sessions;
      if (shard_ != nullptr) sessions = shard_->ListSessions();
      for (const ShardSessionSummary& session : sessions) metrics.OnShardStep(session.spec.name, session.last_step);
      for (const auto& [part, bytes] : Budget(sessions)) metrics.OnMemoryBudget(part, bytes);
    });
    if (!config_.metrics_listen.empty()) {
      PRECONDOR_ASSIGN_OR_RETURN(const TcpSocket socket, ListenTcp(config_.metrics_listen, "metrics_listen"));
      metrics_port_ = socket.port;
      PRECONDOR_RETURN_IF_ERROR(metrics_.Serve(socket.fd, MakePages()));
      PRECONDOR_RETURN_IF_ERROR(WritePortFile(config_.metrics_port_file, absl::StrCat(metrics_port_)));
    }
    CompareWithContainer();
    // The services answer during the replay: liveness probes succeed, readiness probes do not.
    if (shard_store_ != nullptr) PRECONDOR_RETURN_IF_ERROR(shard_store_->Restore(*shard_));
    StartPeriodicWork();
    if (storage_ != nullptr && storage_->standby()) {
      standby_thread_ = std::thread([this] {
        NameThisThread("standby");
        StandBy();
      });
    } else {
      ChangeHealth([](Health& health) { health.begun = true; });
    }
    PRECONDOR_RETURN_IF_ERROR(
        WritePortFile(config_.port_file, port() != 0 ? absl::StrCat(port()) : addresses().front()));
    logger_.Log(Severity::kInfo, "serving",
                {{"role", ServerRoleName(config_.role)},
                 {"listen", absl::StrJoin(addresses(), ",")},
                 {"port", port()},
                 {"metrics_port", metrics_port_},
                 {"version", PRECONDOR_VERSION}});
    return absl::OkStatus();
  }

  int port() const override { return listeners_->port(); }
  const std::vector<std::string>& addresses() const override { return listeners_->addresses(); }
  int metrics_port() const override { return metrics_port_; }
  std::string metrics_text() const override { return metrics_.Render(); }

  void RequestDrain(absl::Duration deadline) override {
    {
      MutexLock lock(mu_);
      if (draining_) return;
      draining_ = true;
      if (deadline <= absl::ZeroDuration()) deadline = absl::Milliseconds(config_.drain_deadline_ms);
      drain_until_ = MonotonicNow() + deadline;
      work_until_ = drain_until_ - deadline / 4;  // the rest is for the factors
      drain_requested_.notify_all();
    }
    logger_.Log(Severity::kInfo, "draining", {{"deadline_ms", absl::ToInt64Milliseconds(deadline)}});
    metrics_.OnDrain();
    ChangeHealth([](Health& health) { health.draining = true; });
    if (coordinator_ != nullptr) coordinator_->BeginDrain();
    if (shard_ != nullptr) shard_->BeginDrain();
  }

  absl::Status Wait() override {
    absl::Time work_until, until;
    {
      MutexLock lock(mu_);
      drain_requested_.wait(mu_, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return draining_; });
      work_until = work_until_;
      until = drain_until_;
    }
    while (shard_ != nullptr && shard_->in_flight() > 0 && MonotonicNow() < work_until) {
      absl::SleepFor(absl::Milliseconds(5));
    }
    const int64_t abandoned = shard_ == nullptr ? 0 : shard_->in_flight();
    // Calls that wait for a silent shard, and streams of workers that stay connected, would delay the shutdown. They
    // are cut when the deadline passes.
    if (coordinator_ != nullptr) coordinator_->CancelShardCalls();
    StopListening();
    server_->Shutdown(wire::GrpcDeadline(std::min(work_until - MonotonicNow(), absl::Milliseconds(500))));
    std::vector<std::string> lost;
    if (shard_store_ != nullptr) lost = shard_->upkeep().WriteFinalSnapshots(until);
    logger_.Log(abandoned == 0 ? Severity::kInfo : Severity::kWarning, "stopped", {{"abandoned", abandoned}});
    if (lost.empty()) return absl::OkStatus();
    return absl::DeadlineExceededError(absl::StrCat(
        "not written within the drain's deadline; sessions come back with older factors: ", absl::StrJoin(lost, ", ")));
  }

  bool draining() const override {
    MutexLock lock(mu_);
    return draining_;
  }

 private:
  absl::Status MakeShard() {
    PRECONDOR_ASSIGN_OR_RETURN(device_, MakeShardBackend(config_, disk_, logger_));
    const DeviceParallelism parallelism = ParallelismOf(config_, device_);
    compute_threads_ = std::make_unique<ThreadPoolExecutor>(parallelism.threads, parallelism.layers);
    ShardOptions options;
    options.device_name = device_.name;
    options.advertise_address = config_.advertise;
    options.capacity_bytes = SessionCapacity(config_, device_, logger_);
    options.window_steps = static_cast<int>(config_.window_steps);
    if (!config_.data_dir.empty()) {
      shard_store_ = std::make_unique<recovery::ShardStore>(
          disk_, config_.data_dir, recovery::ShardLogOptions(), clock_, logger_, metrics_,
          recovery::GradientLogOptions{.snapshot_bytes = static_cast<uint64_t>(config_.gradient_journal_bytes)});
      options.journal = shard_store_.get();
      options.snapshot_interval_steps = static_cast<uint64_t>(config_.snapshot_interval_steps);
      if (config_.quarantine_days > 0) options.quarantine_time = absl::Hours(24 * config_.quarantine_days);
    }
    if (config_.slow_worker_ms > 0) options.slow_worker = absl::Milliseconds(config_.slow_worker_ms);
    PRECONDOR_RETURN_IF_ERROR(MakeDevicePlane());
    if (device_plane_ != nullptr) options.ring_device = device_plane_->device();
    shard_ = std::make_unique<Shard>(options, *device_.backend, *compute_threads_, clock_, logger_, metrics_);
    if (device_plane_ != nullptr) {
      rings_ = std::make_unique<rpc::SharedRegions>(*device_plane_, shard_->memory(), config_.device_plane_bytes,
                                                    clock_, logger_);
    }
    uploads_ = std::make_unique<recovery::LayerUploads>(clock_);
    if (shard_store_ != nullptr) shard_->replay().Begin();
    const uint64_t shard_generation = shard_store_ == nullptr ? 0 : static_cast<uint64_t>(absl::GetCurrentTimeNanos());
    precondition_service_ = std::make_unique<rpc::PreconditionService>(
        shard_->data_plane(), std::string(device_.backend->name()), static_cast<uint64_t>(config_.credit_bytes),
        shard_generation, runner_, metrics_, rings_.get(), config_.shared_memory_bytes);
    // The coordinator of role `all` calls its shard in the process.
    if (config_.role == ServerRole::kShard) shard_service_ = std::make_unique<rpc::ShardService>(*shard_, runner_);
    return absl::OkStatus();
  }

  MemoryBudget Budget(absl::Span<const ShardSessionSummary> sessions) const {
    const bool on_host = device_.backend != nullptr && device_.backend->name() != "cuda";
    return BudgetOf(config_, on_host, sessions);
  }

  // A process that needs more memory than its container has is killed, which nothing else announces.
  void CompareWithContainer() {
    const std::optional<int64_t> container = ContainerMemory();
    metrics_.OnContainerMemory(container.value_or(0));
    const int64_t needed = SumOf(Budget({}));
    if (!container.has_value() || *container >= needed) return;
    logger_.Log(Severity::kWarning, "the container has less memory than the server may need",
                {{"container_bytes", *container},
                 {"needed_bytes", needed},
                 {"memory_limit", config_.memory_limit_bytes},
                 {"transport_memory", config_.transport_memory}});
  }

  absl::Status MakeDevicePlane() {
    if (config_.device_plane_bytes == 0) return absl::OkStatus();
    const auto is_unix = [](const std::string& address) { return UnixPath(address).has_value(); };
    if (std::none_of(config_.listen.begin(), config_.listen.end(), is_unix)) {
      return absl::InvalidArgumentError(
          absl::StrCat("device_plane_bytes: expected a unix: address to listen on, got listen=",
                       absl::StrJoin(config_.listen, ",")));
    }
    if (device_.backend->name() != "cuda") {
      logger_.Log(Severity::kWarning, "no device plane", {{"backend", device_.backend->name()}});
      return absl::OkStatus();
    }
    PRECONDOR_ASSIGN_OR_RETURN(device_plane_, LoadCudaPlane(static_cast<int>(config_.cuda_device)));
    return absl::OkStatus();
  }

  std::map<std::string, metrics::Page> MakePages() {
    const auto status = [this] {
      return StatusPage({.version = PRECONDOR_VERSION,
                         .role = ServerRoleName(config_.role),
                         .draining = draining(),
                         .now = clock_.Now(),
                         .shard = shard_.get(),
                         .coordinator = coordinator_.get()});
    };
    const auto page = [] { return kStatusHtml; };
    return {{"/", {.content_type = "text/html; charset=utf-8", .make = page}},
            {"/status", {.content_type = "application/json", .make = status}}};
  }

  rpc::CallerFn MakeCallerFn() {
    return [this](const grpc::CallbackServerContext& context) { return security_->CallerOf(context); };
  }

  rpc::SnapshotSubject MakeSnapshotSubject() {
    rpc::SnapshotSubject subject;
    subject.coordinator = coordinator_.get();
    subject.caller = MakeCallerFn();
    if (shard_ == nullptr) return subject;
    subject.list = [this]() -> absl::StatusOr<std::vector<v1::SnapshotInfo>> {
      PRECONDOR_RETURN_IF_ERROR(shard_->data_plane().CheckServing());
      std::vector<v1::SnapshotInfo> infos;
      if (shard_store_ == nullptr) return infos;
      PRECONDOR_ASSIGN_OR_RETURN(const std::vector<recovery::SnapshotSummary> found, shard_store_->snapshots().List());
      for (const recovery::SnapshotSummary& summary : found) infos.push_back(EncodeSnapshot(summary));
      return infos;
    };
    subject.verify = [this](uint64_t session_id, uint64_t id) -> absl::StatusOr<v1::SnapshotInfo> {
      PRECONDOR_RETURN_IF_ERROR(shard_->data_plane().CheckServing());
      if (shard_store_ == nullptr) return absl::FailedPreconditionError("snapshot: this shard has no data directory");
      PRECONDOR_ASSIGN_OR_RETURN(const recovery::SnapshotSummary summary,
                                 shard_store_->snapshots().Verify(session_id, id));
      return EncodeSnapshot(summary);
    };
    subject.restore = [this](const v1::RestoreLayerRequest& request) -> absl::StatusOr<bool> {
      PRECONDOR_ASSIGN_OR_RETURN(const uint64_t state_bytes,
                                 shard_->snapshots().RestorableBytes(request.session_id(), request.layer(),
                                                                     SessionCaller::Showing(request.secret())));
      PRECONDOR_ASSIGN_OR_RETURN(const std::optional<LayerImage> image,
                                 uploads_->Add({.session_id = request.session_id(),
                                                .step = request.step(),
                                                .layer = request.layer(),
                                                .offset = request.offset(),
                                                .total_bytes = request.total_bytes(),
                                                .checksum = request.checksum(),
                                                .fetched = request.fetched(),
                                                .data = request.data()},
                                               state_bytes));
      if (image.has_value()) PRECONDOR_RETURN_IF_ERROR(shard_->snapshots().RestoreLayer(*image));
      return image.has_value();
    };
    return subject;
  }

  absl::Status MakeCoordinator() {
    std::vector<ShardEndpoint> endpoints;
    if (shard_ != nullptr) {
      auto local = std::make_unique<LocalShard>(*shard_);
      local_ = local.get();
      endpoints.push_back({kOwnShard, std::move(local)});
    }
    const wire::ChannelSecurity security({.tls_ca = config_.tls_ca,
                                          .tls_cert = config_.tls_ca.empty() ? "" : config_.tls_cert,
                                          .tls_key = config_.tls_ca.empty() ? "" : config_.tls_key,
                                          .token_file = config_.token_file});
    PRECONDOR_RETURN_IF_ERROR(security.status());
    for (const std::string& address : config_.shards) {
      endpoints.push_back(
          {address, rpc::MakeShardClient(address, absl::Milliseconds(config_.shard_timeout_ms), security)});
    }
    CoordinatorOptions options;
    options.lease_steps = static_cast<uint64_t>(config_.lease_steps);
    options.tenant_limits = {.sessions = config_.tenant_max_sessions, .bytes = config_.tenant_max_bytes};
    // With role `all` the shard's reservation has them.
    if (shard_ == nullptr) options.table_bytes = TableBytes(config_);
    options.probe_interval = absl::Milliseconds(config_.reconcile_interval_ms);
    options.snapshot_interval_steps = static_cast<uint64_t>(config_.session_snapshot_steps);
    options.standby = !config_.etcd_endpoints.empty();
    const auto on_waiting = [this](const absl::Status& why) {
      logger_.Log(absl::IsFailedPrecondition(why) ? Severity::kInfo : Severity::kWarning, "waits to lead",
                  {{"reason", absl::string_view(why.message())}});
    };
    const auto on_lost = [this](const absl::Status& why) {
      logger_.Log(Severity::kError, "another coordinator leads", {{"reason", absl::string_view(why.message())}});
      RequestDrain(absl::ZeroDuration());
    };
    storage_ = std::make_unique<CoordinatorStorage>(config_, disk_, on_waiting, on_lost);
    options.on_replaced = [this](const absl::Status& why) { OnReplaced(why); };
    coordinator_ = std::make_unique<Coordinator>(options, std::move(endpoints), *storage_, clock_, logger_, metrics_);
    session_service_ = std::make_unique<rpc::SessionService>(*coordinator_, runner_, MakeCallerFn());
    return absl::OkStatus();
  }

  // A shard has reported another leader. A candidate's process drains and ends; it campaigns again after a restart. A
  // coordinator without candidates keeps running and reports not ready until it is restarted.
  void OnReplaced(const absl::Status& why) {
    storage_->Lose(why);
    ChangeHealth([](Health& health) { health.replaced = true; });
  }

  // Restores the coordinator from the journal. A candidate blocks here until it leads.
  absl::Status BecomeLeader() {
    PRECONDOR_ASSIGN_OR_RETURN(const std::vector<CoordinatorRecord> records, storage_->Recover());
    return coordinator_->Restore(records);
  }

  // Runs on a candidate's thread.
  void StandBy() {
    logger_.Log(Severity::kInfo, "standing by", {{"etcd_prefix", config_.etcd_prefix}});
    if (const absl::Status status = BecomeLeader(); !status.ok()) {
      if (!absl::IsCancelled(status)) {
        logger_.Log(Severity::kError, "cannot lead", {{"reason", absl::string_view(status.message())}});
        RequestDrain(absl::ZeroDuration());
      }
      return;
    }
    logger_.Log(Severity::kInfo, "leading", {{"etcd_prefix", config_.etcd_prefix}});
    StartReconciling();
    ChangeHealth([](Health& health) { health.begun = true; });
  }

  absl::Status StartServer() {
    rpc::AdminSubject subject;
    subject.version = PRECONDOR_VERSION;
    subject.role = EncodeRole(config_.role);
    subject.backend = device_.backend == nullptr ? "" : std::string(device_.backend->name());
    subject.shard = shard_.get();
    subject.coordinator = coordinator_.get();
    subject.uptime = [this, start = clock_.Now()] { return clock_.Now() - start; };
    subject.draining = [this] { return draining(); };
    subject.begin_drain = [this](absl::Duration deadline) { RequestDrain(deadline); };
    admin_service_ = std::make_unique<rpc::AdminService>(std::move(subject), runner_);

    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    PRECONDOR_ASSIGN_OR_RETURN(security_,
                               rpc::ServerSecurity::Make({.cert = config_.tls_cert,
                                                          .key = config_.tls_key,
                                                          .client_ca = config_.tls_client_ca,
                                                          .access_file = config_.access_file},
                                                         config_.tenant_max_calls, logger_, runner_.recorder()));
    grpc::ServerBuilder builder;
    PRECONDOR_ASSIGN_OR_RETURN(listeners_, Listeners::Bind(config_.listen, security_->credentials(), builder));
    if (local_ != nullptr) {
      local_->set_advertise_address(config_.advertise.empty() ? addresses().front() : config_.advertise);
    }
    // The sessions that it restores are on shards whose addresses are known by now.
    if (storage_ != nullptr && !storage_->standby()) PRECONDOR_RETURN_IF_ERROR(BecomeLeader());
    wire::SetKeepalive(builder);
    builder.AddChannelArgument(GRPC_ARG_HTTP2_WRITE_BUFFER_SIZE, wire::kWriteBufferBytes);
    // Beyond it gRPC reads less, and in the end ends streams and calls, any of them.
    builder.SetResourceQuota(grpc::ResourceQuota("server").Resize(static_cast<size_t>(config_.transport_memory)));
    builder.SetMaxReceiveMessageSize(static_cast<int>(config_.max_message_bytes));
    builder.SetMaxSendMessageSize(static_cast<int>(config_.max_message_bytes));
    builder.RegisterService(admin_service_.get());
    if (precondition_service_ != nullptr) builder.RegisterService(precondition_service_.get());
    if (shard_service_ != nullptr) builder.RegisterService(shard_service_.get());
    builder.RegisterService(snapshot_service_.get());
    if (session_service_ != nullptr) builder.RegisterService(session_service_.get());
    server_ = builder.BuildAndStart();
    if (server_ == nullptr) return absl::InternalError("gRPC does not start a server");
    if (const std::string open = OpenAddress(config_); !open.empty()) {
      logger_.Log(Severity::kWarning, "plaintext: every client that reaches the port can read and change everything",
                  {{"address", open}});
    }
    ChangeHealth([](Health&) {});
    Listeners::Options options;
    // Only processes of this user may get memory of the device, even if the socket's mode admits others.
    if (rings_ != nullptr) options.check_unix_peer = [](int fd) { return CheckPeerUser(fd, geteuid()); };
    options.refused = [this](const absl::Status& why) {
      logger_.Log(Severity::kWarning, "connection refused", {{"reason", absl::string_view(why.message())}});
    };
    options.failed = [this](const std::string& why) {
      metrics_.OnAcceptFailure();
      logger_.Log(Severity::kError, "cannot accept a connection", {{"reason", why}});
    };
    listeners_->Start(*server_, std::move(options));
    return absl::OkStatus();
  }

  void StopListening() {
    if (listeners_ != nullptr) listeners_->Stop();
  }

  void StartPeriodicWork() {
    if (shard_store_ != nullptr) {
      timers_.Start("flush-factors", absl::Milliseconds(500), [this] { shard_->upkeep().CompleteQuarantine(); });
    }
    if (!config_.tls_cert.empty()) {
      timers_.Start("reload-tls", absl::Seconds(wire::kReloadSeconds), [this] { security_->Reload(); });
    }
    timers_.Start("connections", absl::Milliseconds(20), [this] { listeners_->CheckConnections(MonotonicNow()); });
    if (shard_ != nullptr && config_.slow_worker_ms > 0) {
      const int64_t pause = std::clamp<int64_t>(config_.slow_worker_ms / 4, 1, 1000);
      timers_.Start("stragglers", absl::Milliseconds(pause), [this] { shard_->upkeep().ReportStragglers(); });
    }
    if (shard_ != nullptr) timers_.Start("check-device", absl::Seconds(1), [this] { CheckDevice(); });
    if (rings_ != nullptr) {
      timers_.Start("collect-rings", absl::Seconds(1), [this] { rings_->Collect(); });
    }
    if (coordinator_ != nullptr && !storage_->standby()) StartReconciling();
  }

  void StartReconciling() {
    const absl::Duration pause = absl::Milliseconds(config_.reconcile_interval_ms);
    timers_.Start("reconcile", pause, [this] {
      const trace::Operation operation = TimerOperation("reconcile");
      coordinator_->Reconcile();
    });
    // One timer for each shard, so that a shard that hangs does not delay the probes of the others.
    for (size_t shard = 0; shard < coordinator_->ShardAddresses().size(); ++shard) {
      timers_.Start("probe-shard", pause, [this, shard] {
        const trace::Operation operation = TimerOperation("probe shard");
        coordinator_->ProbeShard(shard);
      });
    }
  }

  // Keeps the span only if the operation changes something on a shard, for example installs a session there.
  trace::Operation TimerOperation(absl::string_view name) {
    return {tracer_.get(), std::string(name), trace::SpanKind::kInternal, clock_.Now(), std::nullopt, /*keep=*/false};
  }

  // State from which readiness and liveness follow.
  struct Health {
    bool begun = false;
    bool draining = false;
    bool replaced = false;     // a coordinator that another one has replaced
    bool device_lost = false;  // of a shard
  };

  void ChangeHealth(absl::FunctionRef<void(Health&)> change) {
    grpc::HealthCheckServiceInterface* const service = server_->GetHealthCheckService();
    MutexLock lock(health_mu_);
    change(health_);
    if (service == nullptr) return;
    const bool ready = health_.begun && !health_.draining && !health_.replaced && !health_.device_lost;
    // A restart helps a shard without a device, but must not interrupt a process that finishes its work.
    const bool alive = health_.draining || !health_.device_lost;
    if (std::exchange(health_told_, std::pair(ready, alive)) == std::pair(ready, alive)) return;  // already reported
    // SetServingStatus(bool) would change every service, so that liveness would change for a moment.
    service->SetServingStatus("", ready);
    service->SetServingStatus(kLivenessService, alive);
  }

  void CheckDevice() {
    const bool lost = shard_->upkeep().LostDevice();
    ChangeHealth([lost](Health& health) { health.device_lost = lost; });
    // A LocalServer starts a process again when it ends, and asks for no health.
    if (lost && config_.exit_with_pid > 0) RequestDrain(absl::Milliseconds(1));
  }

  const ServerConfig config_;
  Logger& logger_;
  const RealClock clock_;
  metrics::MetricsObserver metrics_;
  const std::unique_ptr<trace::Tracer> tracer_;  // null without traces; outlives all users
  store::PosixFileSystem disk_;
  std::unique_ptr<recovery::ShardStore> shard_store_;  // null without a data directory
  std::unique_ptr<recovery::LayerUploads> uploads_;    // null without a shard
  DeviceBackend device_;                               // empty without a shard
  std::unique_ptr<DevicePlane> device_plane_;          // null unless configured
  std::unique_ptr<rpc::SharedRegions> rings_;          // null without device_plane_; outlives the shard's work
  ThreadPoolExecutor control_threads_;
  rpc::ControlRunner runner_;
  std::unique_ptr<ThreadPoolExecutor> compute_threads_;  // null without a shard
  std::unique_ptr<Shard> shard_;
  LocalShard* local_ = nullptr;  // owned by coordinator_
  std::unique_ptr<CoordinatorStorage> storage_;
  std::unique_ptr<Coordinator> coordinator_;
  std::unique_ptr<rpc::PreconditionService> precondition_service_;
  std::unique_ptr<rpc::ShardService> shard_service_;  // null unless the role is `shard`
  std::unique_ptr<rpc::SnapshotService> snapshot_service_;
  std::unique_ptr<rpc::SessionService> session_service_;
  std::unique_ptr<rpc::AdminService> admin_service_;
  std::unique_ptr<rpc::ServerSecurity> security_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<Listeners> listeners_;  // passes connections to server_
  int metrics_port_ = 0;

  Mutex health_mu_;  // held while health is changed and reported, so that the last report is current
  Health health_ ABSL_GUARDED_BY(health_mu_);
  std::optional<std::pair<bool, bool>> health_told_ ABSL_GUARDED_BY(health_mu_);  // readiness, liveness
  mutable Mutex mu_;
  CondVar drain_requested_;
  bool draining_ ABSL_GUARDED_BY(mu_) = false;
  absl::Time work_until_ ABSL_GUARDED_BY(mu_);   // work in flight is abandoned then
  absl::Time drain_until_ ABSL_GUARDED_BY(mu_);  // the end of the drain's deadline
  PeriodicTimers timers_;
  std::thread standby_thread_;  // used by a candidate only
};

}  // namespace

absl::StatusOr<std::unique_ptr<App>> App::Start(const ServerConfig& config, Logger& logger) {
  PRECONDOR_RETURN_IF_ERROR(CheckAddressSpace(config));  // before the first thread
  auto app = std::make_unique<ServerApp>(config, logger);
  PRECONDOR_RETURN_IF_ERROR(app->Init());
  return std::unique_ptr<App>(std::move(app));
}

}  // namespace precondor
