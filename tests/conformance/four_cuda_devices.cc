// SPDX-License-Identifier: Apache-2.0
// The host's imitation of CUDA has four devices in programs with this file.
#include "tests/support/cuda_host/stream.h"

namespace precondor {
namespace {

const bool kFourDevices = (cuda_host::SetDeviceCount(4), true);

}  // namespace
}  // namespace precondor
