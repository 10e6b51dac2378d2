// SPDX-License-Identifier: Apache-2.0
// Methods, which turn statistics into a preconditioner. `Method` is a validated configuration and the factory of
// `LayerState`, the per-layer factors. Each method is implemented once, on top of Backend.
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

namespace precondor {

// Upper bounds of the bytes that backends allocate for decompositions of n rows in f64, operands not included: copies
// in f64 and LAPACK's work space (1 + 6 n + 2 n^2 numbers for eigenvectors), each rounded up by at most an eighth.
constexpr int64_t SymmetricEigenScratchBytes(int64_t n) { return 27 * n * n + 86 * n + 64; }
// A device uses two matrices in f64, and two more that unused places of a call share where there are such places
// (kernels/cuda/large_inverses.cc).
constexpr int64_t SpdInverseScratchBytes(int64_t n) { return (n <= 256 || n > 1290 ? 17 : 33) * n * n + 1024; }

// The sealed, merged statistics of one step of one layer: matrices on the backend's device. Each side has one of two
// forms; the views of the other form are empty. The first form is vectors, the rows of a matrix, with second moment
// (1/k) sum v v'. The other form is the second moment itself: the mean of v v' over the step's rows, weighted as the
// workers' contributions are, with its lower triangle packed by Backend::PackLower. The sides' forms and k's are
// independent of each other.
struct LayerStatistics {
  ConstMatrixView a = {};             // [k, d_in]
  ConstMatrixView g = {};             // [k, d_out]
  ConstMatrixView a_covariance = {};  // [1, d_in (d_in + 1) / 2]
  ConstMatrixView g_covariance = {};  // [1, d_out (d_out + 1) / 2]
};

// The factors of one layer. One thread at a time; distinct states may be used concurrently.
class LayerState {
 public:
  virtual ~LayerState() = default;

  // Updates the factors with one statistic step. On error (non-finite input, failed decomposition) the state is
  // unchanged: the last good factors stay in use.
  virtual absl::Status Update(const LayerStatistics& statistics) = 0;

  // Sets u to the preconditioned d, both [d_out, d_in] on the device; u must not alias d. Before the first successful
  // Update, a method that needs statistics sets u = d, and ready() is false. A method that works from gradients alone
  // first updates its state with d. On error (non-finite input, a result beyond f32) the state is unchanged.
  virtual absl::Status Precondition(ConstMatrixView d, MatrixView u) = 0;

  // Returns the last answer again, bitwise, without updating the state; for methods that work from gradients alone.
  // Returns FailedPrecondition before the first answer, and Unimplemented for other methods, whose Precondition can be
  // repeated.
  virtual absl::Status Repeat(MatrixView u) {
    return absl::UnimplementedError("the method takes no gradients in: repeat Precondition");
  }

  // Returns, once, work that the last Update or Load has deferred and a later Update will need; null if there is none.
  // The work may run at any time, on any thread, concurrently with all calls of this state. It may outlive the state,
  // but not the backend. An Update that needs the work waits for it if it is running, and does it itself if no thread
  // has begun it. So factors do not depend on whether and when it ran.
  virtual std::function<void()> TakeDeferredWork() { return nullptr; }

  virtual bool ready() const = 0;

  // Number of successful updates, or of gradients that have updated the state; the factor version of the protocol.
  virtual uint64_t version() const = 0;

  // Returns everything that later updates and answers depend on, as bytes of kernels/methods/state_codec.h. A state
  // that an equal method has made for the same layer, and that loads these bytes, continues bitwise like this one on
  // the same kind of backend. Errors: the backend's.
  virtual absl::StatusOr<std::string> Save() const = 0;
  // Replaces the state by one that Save has returned. Returns DataLoss if the bytes are damaged, and FailedPrecondition
  // if they are of another method, configuration or shape; both name the field. On error the state is unchanged.
  virtual absl::Status Load(absl::string_view bytes) = 0;

  // Device bytes of the state, at most Method::StateBytes for the shape.
  virtual int64_t bytes() const = 0;

  // A summary for GetLayerStats and tests: per side the representation ("none", "dense", "low_rank", "eigen",
  // "inverse", "mean", "triangular" or "diagonal"), the current rank and the damping.
  struct Summary {
    const char* input_representation = "none";
    const char* output_representation = "none";
    int64_t input_rank = 0;
    int64_t output_rank = 0;
    double input_damping = 0;
    double output_damping = 0;
    int64_t failed_decompositions = 0;  // failures after which the last good factors stayed in use
    int64_t resets = 0;                 // resets of factors after three failed decompositions in a row
  };
  virtual Summary summary() const = 0;
};

// A validated configuration of a method. Immutable after construction; safe from any thread.
class Method {
 public:
  virtual ~Method() = default;
  // Returns a constant that outlives the method.
  virtual const MethodTraits& traits() const = 0;
  absl::string_view name() const { return traits().name; }
  bool needs_statistics() const { return traits().statistics != StatisticsForm::kNone; }
  bool learns_from_gradients() const { return traits().learns_from_gradients; }

  // Exact maximum of the device bytes of one layer's state, for admission.
  virtual int64_t StateBytes(const LayerSpec& layer) const = 0;
  // Upper bound of the bytes that LayerState::Save returns: besides the matrices at most a number per column, and text.
  virtual int64_t SavedBytes(const LayerSpec& layer) const {
    const int64_t state = StateBytes(layer);
    return state + state / 8 + (16 << 10);
  }
  // Upper bound of the scratch that one Update or Precondition of the layer allocates and frees.
  virtual int64_t ScratchBytes(const LayerSpec& layer, int64_t vectors_per_step) const = 0;
  // Upper bound of the scratch of the work that TakeDeferredWork returns.
  virtual int64_t DeferredScratchBytes(const LayerSpec& layer) const { return 0; }
  // Floating-point operations of one step, for placement before anything has been measured.
  virtual double StepFlops(const LayerSpec& layer, int64_t vectors_per_step) const = 0;

  // Returns true if U still must be scaled by one factor common to all layers (KL_CLIP). The answer to each gradient
  // then carries <D, U>, and the client computes the factor from all answers (docs/use/methods/mkor.md).
  virtual bool needs_global_scale() const { return false; }

  // Returns warnings for the user who opens a session with this configuration; servers log them.
  virtual std::vector<std::string> Warnings(int64_t) const { return {}; }

  // Makes the state of a layer. `backend` must outlive it.
  virtual absl::StatusOr<std::unique_ptr<LayerState>> MakeState(const LayerSpec& layer, Backend& backend) const = 0;
};

}  // namespace precondor
