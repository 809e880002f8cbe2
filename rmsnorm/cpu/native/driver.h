// A whole call: the kernels of this processor, memory for the gains and sums, and the rows shared out among threads.
#pragma once

#include "call.h"
#include "threads.h"

namespace rmsnorm {

// Those of the best level that this processor has, or null. The environment variable RMSNORM_CPU_LEVEL, one of v3, v4,
// v4-bf16 and arm64, asks for another level; null if the processor or the build lacks that. It is read once.
const Kernels* kernels();

// Compute a call where there are kernels. No bit of a result depends on the threads. False if memory is short.
bool forward(const Call& call, const Forward& arrays, const Pool& pool);
bool backward(const Call& call, const Backward& arrays, const Pool& pool);

}  // namespace rmsnorm
