// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <arpa/inet.h>
#include <cstring>
#include <map>
#include <memory>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string>
#include <sys/socket.h>
#include <thread>
#include <time.h>
#include <unistd.h>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

#include "client/cpp/tools/perf.h"
#include "kernels/base/clock.h"
#include "kernels/base/status_macros.h"
#include "precondor/client.h"

namespace precondor {
namespace {

constexpr uint64_t kReportEvery = 32;                  // steps between reports, well within a lease
constexpr int kUnderWay = 4;                           // tensors of one size in flight
constexpr size_t kMostSizes = 8;                       // shapes of a model that are measured
constexpr int64_t kSmall = 16;                         // elements of the latency test: 64 bytes
constexpr int64_t kBytesPerSize = int64_t{512} << 20;  // payload bytes to send for one size, about

struct Size {
  std::string name;
  int64_t rows, cols;  // f32
  int64_t bytes() const { return rows * cols * 4; }
};

// Returns the shapes that most layers have, at most kMostSizes, by ascending size; without layers, five square shapes.
std::vector<Size> Sizes(const std::vector<LayerSpec>& layers) {
  if (layers.empty()) {
    return {
        {"64KiB", 128, 128}, {"1MiB", 512, 512}, {"4MiB", 1024, 1024}, {"16MiB", 2048, 2048}, {"64MiB", 4096, 4096}};
  }
  std::map<std::pair<int64_t, int64_t>, int64_t> counts;
  for (const LayerSpec& layer : layers) ++counts[{layer.d_out, layer.d_in}];
  std::vector<std::pair<int64_t, Size>> by_count;
  by_count.reserve(counts.size());
  for (const auto& [shape, count] : counts) {
    by_count.push_back({count, {absl::StrCat(shape.first, "x", shape.second), shape.first, shape.second}});
  }
  std::stable_sort(by_count.begin(), by_count.end(), [](const auto& x, const auto& y) { return x.first > y.first; });
  if (by_count.size() > kMostSizes) by_count.resize(kMostSizes);
  std::vector<Size> sizes;
  sizes.reserve(by_count.size());
  for (auto& [count, size] : by_count) sizes.push_back(std::move(size));
  std::stable_sort(sizes.begin(), sizes.end(), [](const Size& x, const Size& y) { return x.bytes() < y.bytes(); });
  return sizes;
}

SessionSpec Spec(const std::vector<Size>& sizes) {
  SessionSpec spec;
  spec.name = "perf-gradients";
  spec.inv_freq = 1 << 30;
  spec.warmup_steps = 0;
  spec.method.name = "identity";
  for (const Size& size : sizes) {
    for (int i = 0; i < kUnderWay; ++i) {
      spec.layers.push_back({absl::StrCat(size.name, ".", i), size.rows, size.cols, false});
    }
  }
  spec.layers.push_back({"small", 1, kSmall, false});
  return spec;
}

// Returns a connected pair of TCP sockets on loopback. A socket that could not be opened is -1.
std::pair<int, int> TcpPair() {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  std::pair<int, int> ends = {-1, -1};
  if (bind(listener, generic, size) == 0 && listen(listener, 1) == 0 && getsockname(listener, generic, &size) == 0) {
    ends.first = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(ends.first, generic, size) == 0) ends.second = accept(listener, nullptr, nullptr);
  }
  close(listener);
  const int on = 1;
  setsockopt(ends.first, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  setsockopt(ends.second, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  return ends;
}

bool SendAll(int socket, const char* data, int64_t size) {
  for (int64_t at = 0; at < size;) {
    const ssize_t sent = send(socket, data + at, static_cast<size_t>(size - at), MSG_NOSIGNAL);
    if (sent <= 0) return false;
    at += sent;
  }
  return true;
}

bool ReceiveAll(int socket, char* data, int64_t size) {
  for (int64_t at = 0; at < size;) {
    const ssize_t received = recv(socket, data + at, static_cast<size_t>(size - at), 0);
    if (received <= 0) return false;
    at += received;
  }
  return true;
}

// Returns the seconds in which an echo receives and returns `count` tensors, each whole before the next; 0 if it cannot
// connect.
double TcpSeconds(int64_t bytes, int64_t count) {
  const auto ends = TcpPair();
  const int near = ends.first, far = ends.second;  // Clang 14 captures no structured bindings
  if (far < 0) return 0;
  std::vector<char> sent(static_cast<size_t>(bytes)), echoed(sent.size()), received(sent.size());
  std::thread echo([far, bytes, &echoed] {
    while (ReceiveAll(far, echoed.data(), bytes) && SendAll(far, echoed.data(), bytes)) {
    }
  });
  const absl::Time start = MonotonicNow();
  bool moved = true;
  for (int64_t i = 0; i < count && moved; ++i) {
    moved = SendAll(near, sent.data(), bytes) && ReceiveAll(near, received.data(), bytes);
  }
  const double seconds = absl::ToDoubleSeconds(MonotonicNow() - start);
  shutdown(near, SHUT_RDWR);
  echo.join();
  close(near);
  close(far);
  return moved ? seconds : 0;
}

// Returns the seconds in which `count` tensors are copied there and back within this process.
double CopySeconds(int64_t bytes, int64_t count) {
  std::vector<char> near(static_cast<size_t>(bytes), 1), far(near.size());
  const absl::Time start = MonotonicNow();
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(far.data(), near.data(), far.size());
    // The compiler must not see that the way back changes nothing.
    asm volatile("" : : "r"(far.data()), "r"(near.data()) : "memory");
    std::memcpy(near.data(), far.data(), near.size());
    asm volatile("" : : "r"(far.data()), "r"(near.data()) : "memory");
  }
  return absl::ToDoubleSeconds(MonotonicNow() - start);
}

// Returns the processor time of this process and of a server that it has started.
double ProcessorSeconds(const PerfServer& server) {
  timespec own = {};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &own);
  return server.processor_seconds() + static_cast<double>(own.tv_sec) + 1e-9 * static_cast<double>(own.tv_nsec);
}

absl::Status Report(Worker& worker, uint64_t step) {
  if (step % kReportEvery != 0) return absl::OkStatus();
  return worker.ReportStep(step, 1, 1, true, 0.1).Wait().status();
}

// Returns the seconds of `rounds` rounds of kUnderWay tensors of one size, sent and answered.
absl::StatusOr<double> ServiceSeconds(Worker& worker, const Size& size, size_t size_index, int64_t rounds,
                                      uint64_t& step) {
  std::vector<std::vector<float>> tensors(kUnderWay, std::vector<float>(static_cast<size_t>(size.bytes() / 4), 1.0f));
  std::vector<std::vector<float>> outs = tensors;
  const absl::Time start = MonotonicNow();
  for (int64_t round = 0; round < rounds; ++round, ++step) {
    std::vector<PreconditionFuture> futures;
    for (size_t i = 0; i < kUnderWay; ++i) {
      futures.push_back(worker.Precondition(
          step, static_cast<int64_t>(size_index * kUnderWay + i),
          {ConstMatrixView(tensors[i].data(), size.rows, size.cols), MatrixView(outs[i].data(), size.rows, size.cols)},
          1));
    }
    for (const PreconditionFuture& future : futures) PRECONDOR_RETURN_IF_ERROR(future.Wait().status());
    PRECONDOR_RETURN_IF_ERROR(Report(worker, step));
  }
  return absl::ToDoubleSeconds(MonotonicNow() - start);
}

absl::Status MeasureLatency(Worker& worker, const std::string& family, uint64_t& step, std::vector<PerfRow>& rows) {
  constexpr int kRounds = 2000;
  std::vector<float> tensor(static_cast<size_t>(kSmall), 1.0f), out = tensor;
  std::vector<double> micros;
  const int64_t layer = static_cast<int64_t>(worker.session().spec.layers.size()) - 1;
  for (int round = 0; round < kRounds; ++round, ++step) {
    const absl::Time start = MonotonicNow();
    const auto future = worker.Precondition(
        step, layer, {ConstMatrixView(tensor.data(), 1, kSmall), MatrixView(out.data(), 1, kSmall)}, 1);
    PRECONDOR_RETURN_IF_ERROR(future.Wait().status());
    micros.push_back(absl::ToDoubleMicroseconds(MonotonicNow() - start));
    PRECONDOR_RETURN_IF_ERROR(Report(worker, step));
  }
  rows.push_back({absl::StrCat(family, "latency_64B_p50"), Percentile(micros, 0.5), "us"});
  rows.push_back({absl::StrCat(family, "latency_64B_p99"), Percentile(micros, 0.99), "us"});
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<PerfRow>> MeasureGradients(const PerfOptions& options, const PerfServer& server) {
  PRECONDOR_ASSIGN_OR_RETURN(const std::vector<LayerSpec> layers, PerfLayers(options));
  const std::vector<Size> sizes = Sizes(layers);
  const SessionSpec spec = Spec(sizes);
  ClientOptions client_options;
  client_options.coordinator = server.address();
  client_options.security = options.security;
  const std::string family = options.security.tls_ca.empty() ? "gradients/" : "gradients/tls/";
  PRECONDOR_ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Client::Connect(client_options));
  PRECONDOR_RETURN_IF_ERROR(client->OpenSession(spec).status());
  PRECONDOR_ASSIGN_OR_RETURN(std::unique_ptr<Worker> worker, client->Join(spec.name, {0, 0}));
  std::vector<PerfRow> rows;
  uint64_t step = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const int64_t round_bytes = sizes[i].bytes() * kUnderWay;
    const int64_t rounds = std::clamp<int64_t>(kBytesPerSize / round_bytes, 2, 200);
    PRECONDOR_RETURN_IF_ERROR(ServiceSeconds(*worker, sizes[i], i, 2, step).status());
    const double processor_start = ProcessorSeconds(server);
    PRECONDOR_ASSIGN_OR_RETURN(const double seconds, ServiceSeconds(*worker, sizes[i], i, rounds, step));
    const double processor_seconds = ProcessorSeconds(server) - processor_start;
    const double tcp_seconds = TcpSeconds(sizes[i].bytes(), rounds * kUnderWay);
    if (tcp_seconds <= 0) return absl::InternalError("cannot open a TCP connection on loopback");
    const double moved = 2e-9 * static_cast<double>(rounds * round_bytes);
    rows.push_back(
        {absl::StrCat(family, sizes[i].name), moved / seconds, "GB/s", moved / tcp_seconds, tcp_seconds / seconds});
    const double copy_seconds = CopySeconds(sizes[i].bytes(), rounds * kUnderWay);
    rows.push_back({absl::StrCat(family, sizes[i].name, "_of_memcpy"), moved / seconds, "GB/s", moved / copy_seconds,
                    copy_seconds / seconds});
    if (options.server.empty()) {
      rows.push_back({absl::StrCat(family, sizes[i].name, "_processor"), processor_seconds / moved, "s/GB"});
    }
  }
  PRECONDOR_RETURN_IF_ERROR(MeasureLatency(*worker, family, step, rows));
  worker.reset();
  PRECONDOR_RETURN_IF_ERROR(client->CloseSession(spec.name).status());
  return rows;
}

}  // namespace precondor
