// Memory of kernels that stays allocated from call to call. If an area must grow, its contents are lost.
#include "kernels.h"

typedef struct {
  float *memory;
  size_t floats;
} Area;

// Returns at least `floats` floats. If memory is full, returns NULL and leaves the area empty.
static float *grown(Area *area, size_t floats) {
  if (area->memory && floats <= area->floats) return area->memory;
  free_kernel_memory(area->memory);
  area->floats = (size_t)multiple_of_16((long)floats + 1);
  area->memory = kernel_memory(area->floats);
  return area->memory;
}

static Area shared_areas[SCRATCH_AREAS];

static float *shared_scratch(ScratchArea area, size_t floats) { return grown(&shared_areas[area], floats); }

static void free_area(Area *area) {
  free_kernel_memory(area->memory);
  *area = (Area){0};
}

#ifndef GPU_HOST
static _Thread_local Area area_of_thread;

static float *scratch(size_t floats) { return grown(&area_of_thread, floats); }
static void free_scratch_of_thread(void) { free_area(&area_of_thread); }
#endif

// Frees the memory of passes, of this thread and shared. The next pass allocates it again.
void free_scratch(void) {
  for (int i = 0; i < SCRATCH_AREAS; i++) free_area(&shared_areas[i]);
#ifndef GPU_HOST
  free_scratch_of_thread();
#endif
}
