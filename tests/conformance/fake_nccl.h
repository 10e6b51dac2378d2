// SPDX-License-Identifier: Apache-2.0
// What tests ask of, and do to, the NCCL of fake_nccl.cc.
#pragma once

#include <nccl.h>

namespace precondor {

// Made and neither destroyed nor aborted.
int FakeNcclCommunicators();
// What every communicator's asynchronous error is from now on; ncclSuccess ends that.
void FakeNcclFailWith(ncclResult_t error);

}  // namespace precondor
