// A stand-in for libcuda.so.1: the functions of the CUDA driver that ppo_repro calls, over the emulator.
// There is one GPU; its memory is the host's, and every call is over when it returns. Kernels are the
// functions of this library. Memory of the GPU holds NaN at first and ends at a page without access.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "emulate.h"

#define EXPORT __attribute__((visibility("default")))

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_PTX = 218, NOT_FOUND = 500 };
enum { SHARED_LIMIT = 227 << 10, SHARED_DEFAULT = 48 << 10, PAGE = 4096, KERNELS = 256 };
static const size_t TOTAL = 4ULL << 30;

// What tests set and read
EXPORT int emulated_order;     // an Order
EXPORT long emulated_launches;
EXPORT long emulated_memory;   // bytes that are allocated now
EXPORT long emulated_most = 2L << 30;  // bytes that may be allocated
EXPORT long emulated_calls;            // copies and launches
EXPORT long emulated_refused = -1;     // the number of the copy or launch that fails

static int refused(void) { return emulated_calls++ == emulated_refused; }

typedef struct {
  Function function;
  int shared;  // bytes of dynamic shared memory that it may have
} Kernel;

static Kernel kernels[KERNELS];

// -------------------------------------------------------------------------------------------------- the GPU

EXPORT int cuInit(unsigned flags) { return flags ? INVALID_VALUE : SUCCESS; }

EXPORT int cuDriverGetVersion(int *version) {
  *version = 13000;
  return SUCCESS;
}

EXPORT int cuDeviceGetCount(int *count) {
  *count = 1;
  return SUCCESS;
}

EXPORT int cuDeviceGet(int *device, int ordinal) {
  *device = ordinal;
  return ordinal ? INVALID_VALUE : SUCCESS;
}

EXPORT int cuDeviceGetName(char *name, int length, int device) {
  (void)device;
  snprintf(name, (size_t)length, "emulated GPU");
  return SUCCESS;
}

EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device) {
  (void)device;
  switch (attribute) {
    case 16: *value = 4; return SUCCESS;  // multiprocessors
    case 75: *value = 8; return SUCCESS;  // compute capability
    case 76: *value = 0; return SUCCESS;
    case 97: *value = SHARED_LIMIT; return SUCCESS;
    default: return INVALID_VALUE;
  }
}

EXPORT int cuDeviceTotalMem_v2(size_t *bytes, int device) {
  (void)device;
  *bytes = TOTAL;
  return SUCCESS;
}

EXPORT int cuDevicePrimaryCtxRetain(void **context, int device) {
  (void)device;
  *context = kernels;
  return SUCCESS;
}

EXPORT int cuCtxSetCurrent(void *context) { return context == kernels ? SUCCESS : INVALID_VALUE; }

EXPORT int cuGetErrorString(int error, const char **text) {
  switch (error) {
    case SUCCESS: *text = "no error"; return SUCCESS;
    case INVALID_VALUE: *text = "invalid argument"; return SUCCESS;
    case OUT_OF_MEMORY: *text = "out of memory"; return SUCCESS;
    case INVALID_PTX: *text = "a PTX JIT compilation failed"; return SUCCESS;
    case NOT_FOUND: *text = "named symbol not found"; return SUCCESS;
    default: *text = NULL; return INVALID_VALUE;
  }
}

// --------------------------------------------------------------------------------------------------- kernels

EXPORT int cuModuleLoadDataEx(void **module, const void *image, unsigned count, int *options, void **values) {
  (void)count;
  (void)options;
  (void)values;
  if (!strstr(image, ".entry")) return INVALID_PTX;
  *module = kernels;
  return SUCCESS;
}

EXPORT int cuModuleGetFunction(void **function, void *module, const char *name) {
  static int count;
  Dl_info self;
  if (module != kernels || !dladdr((void *)kernels, &self)) return INVALID_VALUE;
  void *library = dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  Function found = (Function)dlsym(library, name);
  if (!found) return NOT_FOUND;
  for (int i = 0; i < count; i++)
    if (kernels[i].function == found) {
      *function = &kernels[i];
      return SUCCESS;
    }
  if (count == KERNELS) return OUT_OF_MEMORY;
  kernels[count] = (Kernel){found, SHARED_DEFAULT};
  *function = &kernels[count++];
  return SUCCESS;
}

EXPORT int cuFuncSetAttribute(void *function, int attribute, int value) {
  if (attribute != 8 || value > SHARED_LIMIT) return INVALID_VALUE;
  ((Kernel *)function)->shared = value;
  return SUCCESS;
}

// `parameters`: the addresses of one struct or of two
EXPORT int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned threads,
                          unsigned threads_y, unsigned threads_z, unsigned shared, void *stream,
                          void **parameters, void **extra) {
  (void)stream;
  const Kernel *kernel = function;
  if (refused()) return INVALID_VALUE;
  int fits = x && y && z && x <= INT32_MAX && y <= 65535 && z <= 65535 && (int)shared <= kernel->shared;
  if (!fits || !threads || threads % 32 || threads > 256 || threads_y != 1 || threads_z != 1 || extra)
    return INVALID_VALUE;
  const int blocks[3] = {(int)x, (int)y, (int)z};
  const void *const *arguments = (const void *const *)parameters;
  emulate(kernel->function, arguments, blocks, (int)threads, shared, (Order)emulated_order);
  emulated_launches++;
  return SUCCESS;
}

// ---------------------------------------------------------------------------------------------------- memory

// An allocation is a page that knows its size, the memory, and a page without access right behind it.
static size_t pages_of(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

EXPORT int cuMemAlloc_v2(uint64_t *address, size_t bytes) {
  const size_t pages = pages_of(bytes);
  if (!bytes || emulated_memory + (long)bytes > emulated_most) return OUT_OF_MEMORY;
  char *memory = mmap(NULL, PAGE + pages + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return OUT_OF_MEMORY;
  if (mprotect(memory + PAGE + pages, PAGE, PROT_NONE)) return OUT_OF_MEMORY;
  memset(memory + PAGE, 0xff, pages);
  *(size_t *)memory = bytes;
  emulated_memory += (long)bytes;
  *address = (uint64_t)(memory + PAGE + (pages - bytes) / 16 * 16);
  return SUCCESS;
}

EXPORT int cuMemFree_v2(uint64_t address) {
  if (!address) return SUCCESS;
  char *memory = (char *)(address / PAGE * PAGE) - PAGE;
  const size_t bytes = *(size_t *)memory;
  emulated_memory -= (long)bytes;
  munmap(memory, PAGE + pages_of(bytes) + PAGE);
  return SUCCESS;
}

EXPORT int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
  *free_bytes = (size_t)(emulated_most - emulated_memory);
  *total = TOTAL;
  return SUCCESS;
}

EXPORT int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, void *stream) {
  (void)stream;
  if (refused()) return INVALID_VALUE;
  memcpy((void *)to, from, bytes);
  return SUCCESS;
}

EXPORT int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, void *stream) {
  (void)stream;
  if (refused()) return INVALID_VALUE;
  memcpy(to, (const void *)from, bytes);
  return SUCCESS;
}

EXPORT int cuMemsetD8Async(uint64_t address, unsigned char value, size_t bytes, void *stream) {
  (void)stream;
  if (refused()) return INVALID_VALUE;
  memset((void *)address, value, bytes);
  return SUCCESS;
}

EXPORT int cuStreamSynchronize(void *stream) {
  (void)stream;
  return SUCCESS;
}
