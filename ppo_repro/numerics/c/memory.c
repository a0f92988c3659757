// Memory of the host. Where the system gives none, the process ends with one line on standard error and
// status 2: a kernel has no way back, and a run that ends here goes on from its last checkpoint like one that
// was killed.
#include <stdio.h>
#include <unistd.h>
#ifdef __linux__
#include <malloc.h>
#endif

#include "kernels.h"

static void *checked(void *memory, size_t bytes) {
  if (memory) return memory;
  double gigabytes = (double)bytes / 1e9;
  fprintf(stderr, "error: no memory: the kernels asked for %.3f GB; see `ppo-repro plan`\n", gigabytes);
  fflush(stderr);
  _exit(2);
}

static void *allocate_zeros(size_t count, size_t size) {
  return checked(calloc(count ? count : 1, size), count * size);
}

// Give free memory back to the system: large blocks that were freed may stay in the heap of the C library.
void trim_heap(void) {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}
