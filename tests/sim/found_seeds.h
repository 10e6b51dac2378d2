// SPDX-License-Identifier: Apache-2.0
// Seeds that once broke an invariant, run again by `sim_test --found`.
#pragma once

#include <cstddef>
#include <cstdint>

namespace precondor::sim {

// A run is a function of its seed and of the kinds of faults that it draws from: a later kind would make another run of
// an old seed. So kinds are added at the end of their table, and a seed is kept with how many there were.
struct FoundSeed {
  uint64_t seed = 0;
  size_t kinds = 0;
  const char* what = "";
};

constexpr FoundSeed kFoundSeeds[] = {
    {66939, 14, "an answer of a shard that had died was taken for the acknowledgement of the one that came back"},
    {21790, 17, "fresh factors were taken for those that a restored update still belongs to"},
    {126, 17, "a rank whose gradient was not finite ran ahead of one that had not had its answer"},
    {6027, 17, "statistics that were refused for their values were missing at a shard that came back"},
    {17782, 17, "a replaced rank was told to wait for itself"},
    {725, 18, "statistics of a step that a lost memory had answered were refused, with an error for who sent them"},
    {5488, 18, "a step whose gradient no rank sends again stayed in the window permanently"},
    {6231, 18, "statistics sent again to a step before the end of a log that was lost held the layer up"},
    {16296, 17, "a rank that was ahead was refused permanently while a step that came back was being answered"},
    {4591, 21, "ranks that begin again in first order were waited for at a step with factors"},
    {13303, 21, "a shard that came back waited for ranks that had begun after the step"},
    {1926, 21, "factors went on while a rank began again with earlier ones"},
    {2215, 21, "a rank before first order no longer said which factors it had"},
    {2224, 21, "a loss was not noticed by ranks that the others had left behind"},
    {5388, 21, "a rank began again before first order, whose factors had been released"},
    {46653, 21, "an update was made of what statistics a lost memory had left over, and not all ranks had it"},
    {41833, 21, "an update that waited for a rank which began again was forgotten when another took its place"},
    {17332, 21,
     "a rank that had yet to begin was taken for one that begins after the step, and an update lacked its part"},
    {745161, 21, "a session that ended stayed where an install came late"},
    {778712, 21, "a rank that had done all its steps did not say where it begins, and another waited for it"},
    {400044, 21, "ranks whose first step sends nothing did not say where they begin, and a delegate waited for them"},
    {308528, 21, "a rank waited for gradients of a step that the others had passed and a shard had lost"},
    {808653, 21, "a step that had lost its answer held up the later ones"},
    {1456620, 21, "the job had begun again; then as with 308528, which is told to the job and no fault"},
    {159, 23, "a shard that ended between a step's update and its pulls gave the update to no worker"},
    {206, 23, "a shard that ended wrote factors that were past a step which is answered again"},
    {2447, 23, "a gradient that ranks kept was taken in twice after a drain"},
    {8868, 23, "a shard that had missed the install of a rollback's epoch did not roll back"},
    {3004663, 17, "a shard took a gradient ahead of the RESUME before it, which it had refused without the session"},
    {4001055, 17, "as with 3004663"},
    {5003339, 17, "statistics that were being repeated when an epoch ended were missing in the epoch after the next"},
    {70021969, 17, "a lone worker whose shard lost its factors twice in a row ended with an error"},
    {70267092, 17,
     "a rank that was behind the step of a rollback was no longer waited for (the simulator's own fault)"},
    {81015369, 17,
     "a shard that drained after a rollback wrote no factors: a layer without work since had the old epoch"},
    {81096775, 17, "ranks that fetched after first order, one before and one after a loss, had different factors"},
    {150047655, 17, "a shard that had an epoch already did not follow a later rollback in it"},
    {81008572, 17, "statistics that were refused once more hid whose the update was (the simulator's own fault)"},
};

}  // namespace precondor::sim
