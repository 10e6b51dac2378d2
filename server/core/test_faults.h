// SPDX-License-Identifier: Apache-2.0
// Protections that a test may switch off, to see that the simulator notices (docs/simulator.md). Nothing but tests/sim
// sets one: there is no option, flag or field that does.
#pragma once

namespace precondor {

struct TestFaults {
  bool count_repetitions = false;  // a contribution that comes twice counts twice
  bool seal_early = false;         // a step seals when all ranks but one are in
  bool ignore_leases = false;      // a change of mode holds from the next step, whatever has been granted
  bool accept_fenced = false;      // contributions of epochs and incarnations that have ended are taken
};

}  // namespace precondor
