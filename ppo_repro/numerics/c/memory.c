// Memory of the host. A failed allocation fails the call, see failure.c.
#ifdef __linux__
#include <malloc.h>
#endif

#include "kernels.h"

static void *checked(void *memory, size_t bytes) {
  if (!memory)
    fail(1, "out of memory: the kernels asked for %.3f GB; make the batch smaller, or see `ppo-repro plan`",
         (double)bytes / 1e9);
  return memory;
}

static void *allocate_zeros(size_t count, size_t size) {
  return checked(calloc(count ? count : 1, size), count * size);
}

// Gives free memory back to the system, because freed memory may stay in the heap of the C library.
void trim_heap(void) {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}
