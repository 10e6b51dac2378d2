// SPDX-License-Identifier: Apache-2.0
// The whole training written a second time, from the formulas, in naive double precision: network, statistics,
// EXACT_DAMPED mkor with dense inverses, NORM_RESCALE, AdamW or SGD. Shares with the code under test only what a
// trajectory starts from: initial weights, batches, and the signs of the sketches.
#pragma once

#include <vector>

#include "tests/e2e/trainer/digits_data.h"
#include "tests/e2e/trainer/options.h"

namespace precondor::e2e {

// Final weights of each layer, row-major [d_out, d_in + 1]. `run` is a method of rule EXACT_DAMPED (its representation
// does not matter here) or "none", its base optimizer adamw or sgd.
std::vector<std::vector<double>> TrainOracle(const digits::Run& run, const digits::DigitsData& data);

}  // namespace precondor::e2e
