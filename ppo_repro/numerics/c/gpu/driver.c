// The driver of NVIDIA GPUs, libcuda, opened at run time: no header and no library of CUDA is needed to
// compile this. Its context and its streams are torch's; see gpu_open and begin_call.
//
// gpu_open returns an error as a text. A later error fails the call, see failure.c. Then nothing more is
// copied or launched.
#include <dlfcn.h>
#include <stdio.h>

#include "arguments.h"
#include "../kernels.h"

#pragma GCC visibility push(default)
#include "driver.h"
#pragma GCC visibility pop

typedef unsigned long long Address;  // of memory of the GPU
enum {
  OUT_OF_MEMORY = 2,    // results of the driver
  NOT_FOUND = 500,
  JIT_ERROR_LOG = 5,    // options of cuModuleLoadDataEx
  JIT_ERROR_LOG_SIZE = 6,
  MULTIPROCESSORS = 16,  // attributes of a device
  CAPABILITY_MAJOR = 75,
  CAPABILITY_MINOR = 76,
  SHARED_MEMORY_OPT_IN = 97,
  DYNAMIC_SHARED_MEMORY = 8,  // attribute of a function
  LOG_BYTES = 4096
};

// The functions of the driver, as their manual declares them
#define DRIVER(f)                                                                                       \
  f(cuInit, (unsigned flags))                                                                           \
  f(cuDriverGetVersion, (int *version))                                                                 \
  f(cuDeviceGetCount, (int *count))                                                                     \
  f(cuDeviceGet, (int *device, int ordinal))                                                            \
  f(cuDeviceGetName, (char *name, int bytes, int device))                                               \
  f(cuDeviceGetAttribute, (int *value, int attribute, int device))                                      \
  f(cuDevicePrimaryCtxRetain, (void **context, int device))                                             \
  f(cuCtxSetCurrent, (void *context))                                                                   \
  f(cuModuleLoadDataEx, (void **module, const void *image, unsigned count, int *options, void **values)) \
  f(cuModuleGetFunction, (void **function, void *module, const char *name))                             \
  f(cuFuncSetAttribute, (void *function, int attribute, int value))                                     \
  f(cuLaunchKernel, (void *function, unsigned x, unsigned y, unsigned z, unsigned block_x, unsigned block_y, \
                     unsigned block_z, unsigned shared, void *stream, void **parameters, void **extra)) \
  f(cuMemAlloc_v2, (Address *memory, size_t bytes))                                                     \
  f(cuMemFree_v2, (Address memory))                                                                     \
  f(cuMemGetInfo_v2, (size_t *free, size_t *total))                                                     \
  f(cuMemcpyHtoDAsync_v2, (Address to, const void *from, size_t bytes, void *stream))                   \
  f(cuMemcpyDtoHAsync_v2, (void *to, Address from, size_t bytes, void *stream))                         \
  f(cuMemsetD8Async, (Address memory, unsigned char value, size_t bytes, void *stream))                 \
  f(cuStreamSynchronize, (void *stream))                                                                \
  f(cuGetErrorString, (int code, const char **text))

#define MEMBER(name, parameters) int(*name) parameters;
static struct {
  DRIVER(MEMBER)
} cuda;
#undef MEMBER

static struct {
  void *library;
  void *context;
  void *module;
  void *stream;
  int shared_memory;  // bytes that a thread block may have
  int multiprocessors;
} gpu;

static const char *error_text(int code) {
  const char *text = NULL;
  if (!cuda.cuGetErrorString || cuda.cuGetErrorString(code, &text) || !text) return "unknown error";
  return text;
}

// Fails the call if the driver could not do `what`
static void check(int code, const char *what) {
  if (code) fail(0, "the GPU: %s: %s (%d)", what, error_text(code), code);
}

// --------------------------------------------------------------------------------------------------- opening

static char answer[LOG_BYTES + 512];  // of gpu_open
#define ANSWER(...)                              \
  do {                                           \
    snprintf(answer, sizeof answer, __VA_ARGS__); \
    return answer;                               \
  } while (0)

#define DUE(call, what)                                                          \
  do {                                                                           \
    int code_ = (call);                                                          \
    if (code_) ANSWER("%s: %s (%d)", what, error_text(code_), code_);            \
  } while (0)

// Loads the kernels `ptx` on device `ordinal` through the driver in file `library`. Returns NULL, or the
// error.
const char *gpu_open(const char *library, const char *ptx, int ordinal, GpuFacts *facts) {
  gpu.library = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (!gpu.library) ANSWER("no driver: %s", dlerror());
#define FIND(name, parameters)                                      \
  *(void **)&cuda.name = dlsym(gpu.library, #name);                 \
  if (!cuda.name) ANSWER("the driver is too old: %s lacks " #name, library);
  DRIVER(FIND)
#undef FIND
  int device;
  int count = 0;
  DUE(cuda.cuInit(0), "no GPU");
  DUE(cuda.cuDeviceGetCount(&count), "no GPU");
  if (ordinal >= count) ANSWER("no GPU: the driver sees %d", count);
  DUE(cuda.cuDeviceGet(&device, ordinal), "no GPU");
  DUE(cuda.cuDeviceGetName(facts->name, sizeof facts->name, device), "the GPU has no name");
  DUE(cuda.cuDriverGetVersion(&facts->driver), "the driver has no version");
  DUE(cuda.cuDeviceGetAttribute(&facts->major, CAPABILITY_MAJOR, device), "compute capability");
  DUE(cuda.cuDeviceGetAttribute(&facts->minor, CAPABILITY_MINOR, device), "compute capability");
  DUE(cuda.cuDeviceGetAttribute(&gpu.shared_memory, SHARED_MEMORY_OPT_IN, device), "shared memory");
  DUE(cuda.cuDeviceGetAttribute(&gpu.multiprocessors, MULTIPROCESSORS, device), "multiprocessors");
  if (facts->major < 8)
    ANSWER("%s has compute capability %d.%d, and the kernels need 8.0", facts->name, facts->major,
           facts->minor);
  DUE(cuda.cuDevicePrimaryCtxRetain(&gpu.context, device), "context");
  DUE(cuda.cuCtxSetCurrent(gpu.context), "context");
  char log[LOG_BYTES] = "";
  int options[2] = {JIT_ERROR_LOG, JIT_ERROR_LOG_SIZE};
  void *values[2] = {log, (void *)(uintptr_t)sizeof log};
  int code = cuda.cuModuleLoadDataEx(&gpu.module, ptx, 2, options, values);
  if (code) ANSWER("the driver (CUDA %d.%d) does not load the kernels: %s %s", facts->driver / 1000,
                   facts->driver % 1000 / 10, error_text(code), log);
  return NULL;
}

// Free bytes of the GPU, and all of them
void gpu_memory(uint64_t *free_bytes, uint64_t *all_bytes) {
  size_t free_memory = 0;
  size_t all = 0;
  check(cuda.cuMemGetInfo_v2(&free_memory, &all), "memory");
  *free_bytes = free_memory;
  *all_bytes = all;
}

// --------------------------------------------------------------------------------------------------- memory

static Address address(const void *memory) { return (Address)(uintptr_t)memory; }

static void *allocate_on_gpu(size_t bytes) {
  Address memory = 0;
  int code = cuda.cuMemAlloc_v2(&memory, bytes);
  if (code == OUT_OF_MEMORY) {
    size_t free_memory = 0;
    size_t all = 0;
    cuda.cuMemGetInfo_v2(&free_memory, &all);
    fail(1,
         "out of memory on the GPU: the kernels asked for %.3f GB, and %.3f of %.3f GB are free; see "
         "`ppo-repro plan`, and make layout's micro-batches smaller or set "
         "layout.gradient_checkpointing=true",
         (double)bytes / 1e9, (double)free_memory / 1e9, (double)all / 1e9);
  }
  check(code, "memory");
  return code ? NULL : (void *)(uintptr_t)memory;
}

static void free_on_gpu(void *memory) {
  if (memory) check(cuda.cuMemFree_v2(address(memory)), "memory");
}

static void copy_to_gpu(void *to, const void *from, size_t bytes) {
  if (bytes && !failed())
    check(cuda.cuMemcpyHtoDAsync_v2(address(to), from, bytes, gpu.stream), "a copy to the GPU");
}

static void copy_from_gpu(void *to, const void *from, size_t bytes) {
  if (!bytes || failed()) return;
  check(cuda.cuMemcpyDtoHAsync_v2(to, address(from), bytes, gpu.stream), "a copy from the GPU");
  check(cuda.cuStreamSynchronize(gpu.stream), "the kernels");
}

// -------------------------------------------------------------------------------------------------- launches

static void send_integers(void);

// Returns the function of a kernel. If the GPU lacks it, the call fails, because nothing else computes it.
static void *function_of(Kernel *kernel) {
  if (kernel->function) return kernel->function;
  void *function = NULL;
  int code = cuda.cuModuleGetFunction(&function, gpu.module, kernel->name);
  if (code == NOT_FOUND) fail(0, "the GPU has no kernel %s; set layout.device=cpu", kernel->name);
  if (!code) code = cuda.cuFuncSetAttribute(function, DYNAMIC_SHARED_MEMORY, gpu.shared_memory);
  check(code, kernel->name);
  if (!code) kernel->function = function;
  return kernel->function;
}

// Thread blocks in three dimensions, and threads of each; 0 stands for 1 thread block, or for GPU_THREADS
// threads
typedef struct {
  long x;
  long y;
  long z;
  int threads;
} Grid;

// Start a kernel with `shared` bytes of shared memory in each thread block. `rows` is NULL unless the kernel
// is a row function's.
static void launch_kernel(Kernel *kernel, Grid g, long shared, const void *argument, const RowsOf *rows) {
  void *function = function_of(kernel);
  void *parameters[2] = {(void *)(uintptr_t)argument, (void *)(uintptr_t)rows};
  unsigned threads = g.threads ? (unsigned)g.threads : GPU_THREADS;
  unsigned y = g.y ? (unsigned)g.y : 1;
  unsigned z = g.z ? (unsigned)g.z : 1;
  send_integers();
  if (failed()) return;
  int code = cuda.cuLaunchKernel(function, (unsigned)g.x, y, z, threads, 1, 1, (unsigned)shared, gpu.stream,
                                 parameters, NULL);
  check(code, kernel->name);
}

static void launch(Kernel *kernel, Grid g, long shared, const void *argument) {
  launch_kernel(kernel, g, shared, argument, NULL);
}
