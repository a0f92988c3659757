// Functions of the library that drives a GPU, beside ../interface.h; cffi reads both.

typedef struct {
  char name[256];  // of the GPU
  int major;       // compute capability
  int minor;
  int driver;      // the CUDA version that the driver has, 1000 major + 10 minor
} GpuFacts;

// driver.c
const char *gpu_open(const char *library, const char *ptx, int ordinal, GpuFacts *facts);
void gpu_memory(uint64_t *free_bytes, uint64_t *all_bytes);
