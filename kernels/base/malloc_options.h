// SPDX-License-Identifier: Apache-2.0
// Settings of malloc for a server process.
#pragma once

namespace precondor {

// Makes malloc keep freed large blocks: returning them to the kernel costs more than copying the payloads they carry.
// It also limits the number of arenas, since each keeps its own free blocks. Call it before the process starts threads.
void KeepLargeBlocks();

}  // namespace precondor
