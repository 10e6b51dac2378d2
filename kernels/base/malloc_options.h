// SPDX-License-Identifier: Apache-2.0
// How a server's process treats its memory.
#pragma once

namespace precondor {

// Large blocks stay with the process: giving them back costs more than the copies they carry. Hence few arenas. Before
// there are threads.
void KeepLargeBlocks();

}  // namespace precondor
