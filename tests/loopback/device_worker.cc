// SPDX-License-Identifier: Apache-2.0
// A worker process that a test kills: joins the session NAME at ADDRESS, hands one gradient of layer LAYER [ROWS,
// COLS], all 0.5, over in device memory, and waits for an answer that does not come. Says "in ring" once it is
// acknowledged.
#include <iostream>
#include <vector>

#include "precondor/client.h"

int main(int argc, char** argv) {
  if (argc != 6) return 2;
  precondor::ClientOptions options;
  options.coordinator = argv[1];
  auto client = precondor::Client::Connect(options);
  if (!client.ok()) return 1;
  auto worker = (*client)->Join(argv[2], {});
  if (!worker.ok()) return 1;
  const int64_t rows = std::atoll(argv[4]), cols = std::atoll(argv[5]);
  std::vector<float> gradient(static_cast<size_t>(rows * cols), 0.5f);
  const precondor::DeviceTensor tensor{.data = gradient.data(), .rows = rows, .cols = cols, .stride = cols};
  const auto answer = (*worker)->Precondition(0, std::atoll(argv[3]), {tensor, tensor}, 10);
  if (!(*worker)->Flush().ok()) return 1;
  std::cout << ((*worker)->status().device_plane.in_ring == 1 ? "in ring" : (*worker)->status().device_plane.reason)
            << std::endl;
  return answer.Wait().ok() ? 0 : 1;
}
