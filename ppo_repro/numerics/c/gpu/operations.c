// The operations of ../operations.h on a GPU. Products, attention and sums over tokens are in launches.c.
#include "../kernels.h"
#include "arguments.h"

// ----------------------------------------------------------------------------------------- memory of kernels

static float *kernel_memory(size_t n) { return allocate_on_gpu(n * sizeof(float)); }

static float *kernel_zeros(size_t n) {
  float *memory = kernel_memory(n);
  if (memory) check(cuda.cuMemsetD8Async(address(memory), 0, n * sizeof(float), gpu.stream), "zeros");
  return memory;
}

// Waits for the kernels that use the memory
static void free_kernel_memory(float *memory) { free_on_gpu(memory); }

// --------------------------------------------------------------------------------------------- what crosses

static const void *on_host(const void *memory, size_t bytes) {
  static void *host;
  static size_t size;
  if (bytes > size || !host) {
    free(host);
    host = allocate_zeros(bytes + 1, 1);
    size = host ? bytes : 0;
  }
  copy_from_gpu(host, memory, bytes);
  return failed() ? NULL : host;
}

static void copy_to_kernels(void *to, const void *from, size_t bytes) { copy_to_gpu(to, from, bytes); }

// Integers of a call gather in `host` and lie at the same place in `memory`. One copy sends what has gathered
// before the next launch.
enum { MOST_OUTGROWN = 32 };
static struct {
  int *host;
  int *memory;
  long used;
  long sent;
  long size;
  int *outgrown[MOST_OUTGROWN];  // memory of this call that was too small
  int outgrown_count;
} gathered;

static void send_integers(void) {
  if (gathered.sent == gathered.used) return;
  copy_to_gpu(gathered.memory + gathered.sent, gathered.host + gathered.sent,
              (size_t)(gathered.used - gathered.sent) * sizeof(int));
  gathered.sent = gathered.used;
}

// Room for n integers: where they lie on the host; their memory of the GPU is at the same place. NULL if this
// call has failed.
static int *room_for_integers(long n) {
  if (failed()) return NULL;
  if (gathered.used + n > gathered.size) {
    send_integers();
    if (gathered.outgrown_count == MOST_OUTGROWN) fail(0, "the GPU: one call has too many integers");
    long size = 2 * (gathered.size + n) + 4096;
    int *host = allocate_zeros((size_t)size, sizeof(int));
    int *memory = allocate_on_gpu((size_t)size * sizeof(int));
    if (failed()) {
      free(host);
      free_on_gpu(memory);
      return NULL;
    }
    if (gathered.memory) gathered.outgrown[gathered.outgrown_count++] = gathered.memory;
    free(gathered.host);
    gathered.host = host;
    gathered.memory = memory;
    gathered.size = size;
    gathered.used = gathered.sent = 0;
  }
  int *here = gathered.host + gathered.used;
  gathered.used += multiple_of_16(n);
  if (gathered.used > gathered.size) gathered.used = gathered.size;
  return here;
}

static int *memory_of(const int *here) { return here ? gathered.memory + (here - gathered.host) : NULL; }

static const int *integers_for_kernels(const int *numbers, long n) {
  if (!n) return NULL;
  int *here = room_for_integers(n);
  if (here) memcpy(here, numbers, (size_t)n * sizeof(int));
  return memory_of(here);
}

static int *integers_from_kernels(int *numbers, long n) {
  (void)numbers;
  return n ? memory_of(room_for_integers(n)) : NULL;
}

static void fetch_integers(int *numbers, const int *from, long n) {
  copy_from_gpu(numbers, from, (size_t)n * sizeof(int));
}

// ---------------------------------------------------------------------------------------------------- a call

// Torch's context on this thread, and torch's stream. Calls share memory, so a call on another stream waits
// for the kernels of the call before.
void begin_call(void *stream) {
  forget_failure();
  check(cuda.cuCtxSetCurrent(gpu.context), "context");
  if (stream != gpu.stream) check(cuda.cuStreamSynchronize(gpu.stream), "the kernels of the stream before");
  gpu.stream = stream;
  gathered.used = gathered.sent = 0;
  while (gathered.outgrown_count) free_on_gpu(gathered.outgrown[--gathered.outgrown_count]);
}

static int *flag_memory;

static int *clear_flag(void) {
  if (!flag_memory) flag_memory = allocate_on_gpu(sizeof(int));
  if (flag_memory) check(cuda.cuMemsetD8Async(address(flag_memory), 0, sizeof(int), gpu.stream), "a flag");
  return flag_memory;
}

static int flag_value(const int *flag) {
  const int *value = on_host(flag, sizeof(int));
  return value ? *value : 0;
}

// ------------------------------------------------------------------------------------------------------ rows

enum { FEW_THREADS = 32, MOST_ROW_GRID = 1 << 20, ROW_MEMORY_FLOATS = 1 << 26 };

static long divided_up(long items, long each) { return (items + each - 1) / each; }

static void for_rows_with_memory(int rows, int floats, RowFunction function, const void *argument) {
  if (rows < 1) return;
  // few rows in thread blocks of 2 rows, so that they meet on no multiprocessor
  const int threads = rows <= 16 * gpu.multiprocessors ? FEW_THREADS : GPU_THREADS;
  const int rows_at_once = threads / LANES;
  RowsOf of = {.rows = rows, .floats = (floats + 3) / 4 * 4};
  long grid = divided_up(rows, rows_at_once);
  if (grid > MOST_ROW_GRID) grid = MOST_ROW_GRID;
  if (floats) {
    long most = ROW_MEMORY_FLOATS / ((long)of.floats * rows_at_once);
    if (grid > most) grid = most > 0 ? most : 1;
    of.memory = shared_scratch(SCRATCH_ROWS, (size_t)grid * (size_t)rows_at_once * (size_t)of.floats);
  }
  launch_kernel(function, (Grid){.x = grid, .threads = threads}, 0, argument, &of);
}

static void for_rows(int rows, RowFunction function, const void *argument) {
  for_rows_with_memory(rows, 0, function, argument);
}
