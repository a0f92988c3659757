// The operations that model.c, experts.c, tokens.c and optimizer.c call. These files decide what is computed
// and in which order. Only operations touch the numbers of tensors. On a CPU (operations.c) an operation is a
// loop over the pool of threads. On a GPU (gpu/operations.c) it is a launch: a row function is a kernel that
// gets its struct by value. So the struct holds all that the function needs, and its pointers point to memory
// of kernels.
//
// There are two kinds of memory. Code on the host reads and writes memory of the host (Model, Layer, Matrix,
// Batch and its integers). Operations read and write memory of kernels (weights, activations, gradients,
// cache). On a CPU both are one memory, and nothing is copied between them.
#ifndef OPERATIONS_H
#define OPERATIONS_H
#include "lanes.h"

#pragma GCC visibility push(default)  // what interface.h declares is exported, nothing else
#include "interface.h"
#pragma GCC visibility pop

// ---- arguments of sums over tokens, on a CPU and on a GPU

// Returns whether a pass ends a minibatch. Then the last part of each sum is the tree of all slots, which is
// the gradient.
INLINE int is_whole(const Sums *s) { return s->last == 1 << s->levels; }

// Columns of which each row t has `each` groups, for example the heads that share a norm's weight. Their
// gradient is
//   dw[c] = sum over t and e of dy[t][e][c] x[t][e][c] r[t][e], or of dy[t][e][c] if x is NULL
// With `mean`, x[t][e][c] - mean[t][e] stands for x[t][e][c].
typedef struct {
  const float *dy;
  long ldd;
  const float *x;
  long ldx;
  const float *r;
  const float *mean;
  long ldr;
  int each;
  int cols;
} Columns;

// A table, e.g. of embeddings. Its gradient is
//   d table[id] = sum of scale dx[t] over the rows t with that id
typedef struct {
  const float *dx;  // [rows][width]
  int width;
  float scale;
  int entries;        // ids are below
  int skipped;        // an id that takes no gradient, or -1
  const int *start;   // [entries + 1]: the rows of an id are sorted[start[id]] .. sorted[start[id + 1] - 1]
  const int *sorted;  // [rows]
  const int *slot;    // [rows]
  long grad;          // offset in `sums`
  Sums sums;
} TableGradient;

#ifndef GPU_KERNELS  // which has no host

// ---- Other operations have files of their own, because their tiles differ on a GPU: linear,
// linear_backward_input, weight_gradient, column_sums, table_gradient, attend and attend_backward. So has
// shared_scratch, which gives memory of kernels.

// ---- Calls function(argument, row) for each row of [0, rows), see lanes.h. for_rows_with_memory gives each
// row that is being computed `floats` of memory.
static void for_rows(int rows, RowFunction function, const void *argument);
static void for_rows_with_memory(int rows, int floats, RowFunction function, const void *argument);

// ---- the one flag, which rows may set (set_flag)
static int *clear_flag(void);
static int flag_value(const int *flag);

// ---- Returns whether this call has failed, see failure.c. Then operations compute nothing, memory may be
// NULL, and the host must not read what kernels wrote.
static int failed(void);

// ---- host memory: `count` zeros of `size` bytes, to be freed
static void *allocate_zeros(size_t count, size_t size);

// ---- memory of kernels, to be freed: n floats, not cleared; n zeros
static float *kernel_memory(size_t n);
static float *kernel_zeros(size_t n);
static void free_kernel_memory(float *memory);

// ---- Copies between the two memories. on_host: `bytes` that kernels wrote, which the host may read until
// the next call; NULL if this call has failed. integers_for_kernels: n integers of the host, which kernels
// may read until the pass ends. copy_to_kernels: from the host to memory of kernels.
static const void *on_host(const void *memory, size_t bytes);
static const int *integers_for_kernels(const int *numbers, long n);
static void copy_to_kernels(void *to, const void *from, size_t bytes);

// ---- n integers that kernels write in a pass and the host reads after it, at `numbers`. The first function
// returns where kernels write them, the second copies them to the host.
static int *integers_from_kernels(int *numbers, long n);
static void fetch_integers(int *numbers, const int *from, long n);

#endif
#endif
