// SPDX-License-Identifier: Apache-2.0
// A method turns statistics into a preconditioner. `Method` is a validated configuration and the factory of
// `LayerState`, the per-layer factors. Each method is written once, over Backend.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "kernels/backend.h"
#include "kernels/base/method_traits.h"
#include "kernels/base/session_spec.h"
#include "kernels/device_group.h"

namespace precondor {

// One step's sealed, merged statistics of one layer: matrices on the backend's device. A side comes in one of two
// forms, the other is empty: as vectors, the rows of a matrix, whose second moment is (1/k) sum v v'; or as that second
// moment itself, the mean of v v' over the step's rows weighted as the workers' contributions are, its lower triangle
// packed by Backend::PackLower. The sides' forms and k's are independent of each other.
struct LayerStatistics {
  ConstMatrixView a = {};             // [k, d_in]
  ConstMatrixView g = {};             // [k, d_out]
  ConstMatrixView a_covariance = {};  // [1, d_in (d_in + 1) / 2]
  ConstMatrixView g_covariance = {};  // [1, d_out (d_out + 1) / 2]
};

// Factors of one layer. One thread at a time; distinct states may be used at the same time.
class LayerState {
 public:
  virtual ~LayerState() = default;

  // Takes in one statistic step. On error (non-finite input, failed decomposition) the state is as before: the last
  // good factors stay in use.
  virtual absl::Status Update(const LayerStatistics& statistics) = 0;

  // u = preconditioned d, both [d_out, d_in] on the device; u must not alias d. Before the first successful Update a
  // method that needs statistics gives u = d and reports it by ready() == false.
  // A method that works from gradients alone takes d in before it answers; on error (non-finite input, a result beyond
  // f32) it has not, and goes on as before.
  virtual absl::Status Precondition(ConstMatrixView d, MatrixView u) = 0;

  // The last answer again, bitwise, without taking its gradient in once more: for a method that works from gradients
  // alone. FailedPrecondition before the first; Unimplemented for the others, whose Precondition can be repeated.
  virtual absl::Status Repeat(MatrixView u) {
    return absl::UnimplementedError("the method takes no gradients in: repeat Precondition");
  }

  // What the last Update, or Load, has deferred and a later one will need, once; null where there is nothing. It may
  // run at any time, on any thread, beside all calls of this state, and outlive the state, but not the backend. An
  // Update that needs it waits for it where it runs, and does it itself where no thread has begun it: factors do not
  // depend on whether and when it ran.
  virtual std::function<void()> TakeDeferredWork() { return nullptr; }

  virtual bool ready() const = 0;

  // Successful updates so far, or gradients taken in; the factor version of the protocol.
  virtual uint64_t version() const = 0;

  // All that later updates and answers depend on, as bytes of kernels/methods/state_codec.h: a state made for the same
  // layer by an equal method that loads them goes on bitwise like this one, on the same kind of backend. Errors: the
  // backend's.
  virtual absl::StatusOr<std::string> Save() const = 0;
  // Takes over what Save gave. DataLoss: damaged; FailedPrecondition: of another method, configuration or shape; both
  // name the field. On error the state is as before.
  virtual absl::Status Load(absl::string_view bytes) = 0;

  // Device bytes held, never more than Method::StateBytes for the shape; of a split state on all devices together.
  virtual int64_t bytes() const = 0;

  // For GetLayerStats and tests: "dense", "low_rank", "triangular" or "diagonal" per side, the current rank, damping,
  // max diagonal.
  struct Summary {
    const char* input_representation = "none";
    const char* output_representation = "none";
    int64_t input_rank = 0;
    int64_t output_rank = 0;
    double input_damping = 0;
    double output_damping = 0;
    int64_t failed_decompositions = 0;  // after which the last good factors stayed in use
    int64_t resets = 0;                 // of factors that could not be decomposed three times in a row
  };
  virtual Summary summary() const = 0;
};

// Immutable after construction; safe from any thread.
class Method {
 public:
  virtual ~Method() = default;
  // A constant that outlives the method.
  virtual const MethodTraits& traits() const = 0;
  absl::string_view name() const { return traits().name; }
  bool needs_statistics() const { return traits().statistics != StatisticsForm::kNone; }

  // Exact device bytes of one layer's state at its fullest, for admission.
  virtual int64_t StateBytes(const LayerSpec& layer) const = 0;
  // Upper bound of what LayerState::Save gives of it: besides the matrices a number a column at most, and text.
  virtual int64_t SavedBytes(const LayerSpec& layer) const {
    const int64_t state = StateBytes(layer);
    return state + state / 8 + (16 << 10);
  }
  // Upper bound of the scratch that one Update or Precondition of the layer allocates and frees.
  virtual int64_t ScratchBytes(const LayerSpec& layer, int64_t vectors_per_step) const = 0;
  // Upper bound of the scratch of what TakeDeferredWork gives.
  virtual int64_t DeferredScratchBytes(const LayerSpec& layer) const { return 0; }
  // Arithmetic of one step, for placement before anything has been measured.
  virtual double StepFlops(const LayerSpec& layer, int64_t vectors_per_step) const = 0;

  // True when U still has to be scaled by one factor common to all layers (KL_CLIP): the answer to each gradient then
  // carries <D, U>, and the client computes the factor from all of them (docs/methods/mkor.md).
  virtual bool needs_global_scale() const = 0;

  // What the user who opens a session with this configuration should know; logged by servers.
  virtual std::vector<std::string> Warnings(int64_t vectors_per_step) const = 0;

  // `backend` must outlive the state.
  virtual absl::StatusOr<std::unique_ptr<LayerState>> MakeState(const LayerSpec& layer, Backend& backend) const = 0;

  // --- factors by rows over the devices of one process, where it has several ----------------------------------------
  // Whether this layer's factors are to be: it asks for so much that one device need not have to hold it.
  virtual bool Splits(const LayerSpec& layer) const { return false; }
  // Device bytes with the state, or scratch, of one layer: on the device whose backend takes statistics and gradients,
  // and on each of the others at most.
  struct SplitBytes {
    int64_t primary = 0;
    int64_t other = 0;
  };
  // StateBytes and ScratchBytes of MakeSplitState's states.
  virtual SplitBytes SplitStateBytes(const LayerSpec& layer, int ranks) const { return {StateBytes(layer), 0}; }
  virtual SplitBytes SplitScratchBytes(const LayerSpec& layer, int64_t vectors_per_step, int ranks) const {
    return {ScratchBytes(layer, vectors_per_step), 0};
  }
  // Where Splits. Statistics, gradients and answers are on group.backend(primary), as for a state of that backend; both
  // states load what the other has saved, and are equal up to rounding, which depends on the number of ranks. `group`
  // must outlive the state.
  virtual absl::StatusOr<std::unique_ptr<LayerState>> MakeSplitState(const LayerSpec& layer, DeviceGroup& group,
                                                                     int primary) const;
};

}  // namespace precondor
