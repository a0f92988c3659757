// The kernels as one unit of compilation. A stand-in until the kernels of the models are here.
#pragma clang diagnostic ignored "-Wunused-function"
#include "kernels.h"

static int thread_count = 1;

EXPORT void set_threads(int count) { thread_count = count; }

// In a forked child, which has no threads but the one that forked: the next kernel begins without workers.
EXPORT void forget_workers(void) { thread_count = 1; }

#include "checks.c"
