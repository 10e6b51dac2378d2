// SPDX-License-Identifier: Apache-2.0
// A base class of backends that forwards every operation to another backend.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/backend.h"
#include "kernels/base/status_macros.h"

namespace precondor {

// Thread-safe if `inner` and Before are. `inner` must outlive it.
class ForwardingBackend : public Backend {
 public:
  explicit ForwardingBackend(Backend& inner) : inner_(inner) {}
  absl::string_view name() const override { return inner_.name(); }
  void* stream() const override { return inner_.stream(); }
  absl::Status fault() const override { return inner_.fault(); }
  bool has_tensor_cores() const override { return inner_.has_tensor_cores(); }
  int64_t memory_limit_bytes() const override { return inner_.memory_limit_bytes(); }

 protected:
  // Called before an operation is forwarded. If it returns an error, the operation returns that error and is not
  // forwarded.
  virtual absl::Status Before() { return absl::OkStatus(); }
  Backend& inner() { return inner_; }

  // Access to Backend's protected functions for derived classes.
  static absl::StatusOr<float*> AllocateOn(Backend& backend, int64_t elements) { return backend.DoAllocate(elements); }
  static absl::StatusOr<float*> AllocateScratchOn(Backend& backend, int64_t elements) {
    return backend.DoAllocateScratch(elements);
  }
  static void FreeOn(Backend& backend, float* data, int64_t elements) { backend.DoFree(data, elements); }

  absl::StatusOr<float*> DoAllocate(int64_t elements) override {
    PRECONDOR_RETURN_IF_ERROR(Before());
    return AllocateOn(inner_, elements);
  }
  absl::StatusOr<float*> DoAllocateScratch(int64_t elements) override {
    PRECONDOR_RETURN_IF_ERROR(Before());
    return AllocateScratchOn(inner_, elements);
  }
  void DoFree(float* data, int64_t elements) override { FreeOn(inner_, data, elements); }
  int64_t DoAllocatedBytes() const override { return inner_.allocated_bytes(); }
  void DoTrim() override { inner_.Trim(); }
  absl::Status DoUpload(ConstMatrixView host, MatrixView device) override {
    PRECONDOR_RETURN_IF_ERROR(Before());
    return inner_.Upload(host, device);
  }
  absl::Status DoUploadToIdle(ConstMatrixView host, MatrixView device) override {
    PRECONDOR_RETURN_IF_ERROR(Before());
    return inner_.UploadToIdle(host, device);
  }
  absl::Status DoDownload(ConstMatrixView device, MatrixView host) override {
    PRECONDOR_RETURN_IF_ERROR(Before());
    return inner_.Download(device, host);
  }
  absl::Status DoCopy(ConstMatrixView from, MatrixView to) override {
    PRECONDOR_RETURN_IF_ERROR(Before());
    return inner_.Copy(from, to);
  }
  void DoRun(absl::Span<const Operation* const> operations, absl::Span<absl::Status> statuses) override {
    const absl::Status before = Before();
    if (before.ok()) return inner_.Run(operations, statuses);
    for (absl::Status& status : statuses) status = before;
  }

 private:
  Backend& inner_;
};

}  // namespace precondor
