// Memory of the kernels. Where the system gives none, the process ends with one line on standard error and
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

// Memory that is kept from call to call, and grows. What it held is lost when it grows.
typedef struct {
  float *memory;
  size_t floats;
} Area;

static float *grown(Area *area, size_t floats) {
  if (area->memory && floats <= area->floats) return area->memory;
  free(area->memory);
  area->floats = (size_t)round16((long)floats + 1);
  area->memory = checked(aligned_alloc(64, area->floats * sizeof(float)), area->floats * sizeof(float));
  return area->memory;
}

static float *scratch(size_t floats) {
  static _Thread_local Area area;
  return grown(&area, floats);
}

static Area shared_areas[SCRATCH_AREAS];

static float *shared_scratch(ScratchArea area, size_t floats) { return grown(&shared_areas[area], floats); }

// Free the memory that passes share, until the next one.
void free_scratch(void) {
  for (int i = 0; i < SCRATCH_AREAS; i++) {
    free(shared_areas[i].memory);
    shared_areas[i] = (Area){0};
  }
}

// Give free memory back to the system: large blocks that were freed may stay in the heap of the C library.
void trim_heap(void) {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}
