// SPDX-License-Identifier: Apache-2.0
// What tests ask of, and do to, the NCCL of fake_nccl.cc.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>
#include <nccl.h>

namespace precondor {

// Made and neither destroyed nor aborted.
int FakeNcclCommunicators();
// What every communicator's asynchronous error is from now on; ncclSuccess ends that.
void FakeNcclFailWith(ncclResult_t error);
// What every stream says when it is asked; cudaSuccess ends that.
void FakeCudaFailStreams(cudaError_t error);
// Blocks of device memory that have been taken and not yet freed; whether there is none left.
int64_t FakeCudaAllocations();
void FakeCudaFailAllocations(bool fail);

}  // namespace precondor
