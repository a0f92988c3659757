// Memory of the kernels on a CPU that is kept from call to call.
#include "kernels.h"

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
