// The operations of operations.h on a CPU. Products and sums over tokens are in files of their own.
#include "kernels.h"
#include "operations.h"

// ------------------------------------------------------------------------------------------------------ rows

typedef struct {
  RowFunction function;
  const void *argument;
  int rows;
  int floats;
  int each;  // rows of a task
} RowsOf;

static void rows_task(void *argument, int index) {
  const RowsOf *of = argument;
  const int end = least(of->rows, (index + 1) * of->each);
  float *memory = of->floats ? scratch((size_t)of->floats) : NULL;
  if (of->floats && !memory) return;
  for (int row = index * of->each; row < end; row++) of->function(of->argument, row, memory);
}

static void for_rows_with_memory(int rows, int floats, RowFunction function, const void *argument) {
  RowsOf of = {
      .function = function,
      .argument = argument,
      .rows = rows,
      .floats = floats,
      .each = task_size(rows, 1, 64),
  };
  parallel_for((rows + of.each - 1) / of.each, rows_task, &of);
}

static void for_rows(int rows, RowFunction function, const void *argument) {
  for_rows_with_memory(rows, 0, function, argument);
}

// ---------------------------------------------------------------------------------------------------- a call

void begin_call(void *stream) {
  (void)stream;
  forget_failure();
}

// ------------------------------------------------------------------------------------------------ one memory

static int *clear_flag(void) {
  static int flag;
  flag = 0;
  return &flag;
}

static int flag_value(const int *flag) { return *flag; }

// n is a multiple of 16
static float *kernel_memory(size_t n) {
  return checked(aligned_alloc(64, n * sizeof(float)), n * sizeof(float));
}
static float *kernel_zeros(size_t n) { return allocate_zeros(n, sizeof(float)); }
static void free_kernel_memory(float *memory) { free(memory); }

static const void *on_host(const void *memory, size_t bytes) { return bytes && !failed() ? memory : NULL; }
static const int *integers_for_kernels(const int *numbers, long n) { return n ? numbers : NULL; }
static void copy_to_kernels(void *to, const void *from, size_t bytes) {
  if (!failed()) memcpy(to, from, bytes);
}

static int *integers_from_kernels(int *numbers, long n) { return n ? numbers : NULL; }
static void fetch_integers(int *numbers, const int *from, long n) {
  if (numbers != from) copy_to_kernels(numbers, from, (size_t)n * sizeof(int));
}
