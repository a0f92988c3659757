// Memory of kernels that is kept from call to call, and grows. An area's contents are lost when it grows.
#include "kernels.h"

typedef struct {
  float *memory;
  size_t floats;
} Area;

static float *grown(Area *area, size_t floats) {
  if (area->memory && floats <= area->floats) return area->memory;
  free_kernel_memory(area->memory);
  area->floats = (size_t)multiple_of_16((long)floats + 1);
  area->memory = kernel_memory(area->floats);
  return area->memory;
}

static Area shared_areas[SCRATCH_AREAS];

static float *shared_scratch(ScratchArea area, size_t floats) { return grown(&shared_areas[area], floats); }

// Free the memory that passes share, until the next one.
void free_scratch(void) {
  for (int i = 0; i < SCRATCH_AREAS; i++) {
    free_kernel_memory(shared_areas[i].memory);
    shared_areas[i] = (Area){0};
  }
}

#ifndef GPU_HOST
static float *scratch(size_t floats) {
  static _Thread_local Area area;
  return grown(&area, floats);
}
#endif
