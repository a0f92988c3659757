// The operations that model.c, experts.c, tokens.c and optimizer.c are made of. The passes there decide what
// is computed and in which order; only operations touch the numbers of tensors. On a CPU each one is a loop
// over the pool of threads. On a GPU each one will be a launch: a row function becomes a kernel that gets its
// struct by value, so the struct holds all that the function needs, and its pointers point to memory of
// kernels.
//
// Two kinds of memory: `host`, which this code reads and writes itself (Model, Layer, Matrix, Batch, its
// integers), and memory of kernels (weights, activations, gradients, cache). A CPU has one memory, and what
// crosses between them stays where it is.
#ifndef OPERATIONS_H
#define OPERATIONS_H
#include "lanes.h"

#pragma GCC visibility push(default)  // what interface.h declares is exported, nothing else
#include "interface.h"
#pragma GCC visibility pop

// ---- the other operations, which have a file of their own because their tiles will differ on a GPU:
// linear, linear_backward_input, linear_backward_weight, column_sums, table_gradient, attend and
// attend_backward; and shared_scratch, which gives memory of kernels

// ---- rows (lanes.h): function(argument, row) for each row of [0, rows); with `floats` of memory for each
// row that is being computed
static void for_rows(int rows, RowFunction function, const void *argument);
static void for_rows_with_memory(int rows, int floats, RowFunction function, const void *argument);

// ---- a flag that rows may set (set_flag); there is one
static int *clear_flag(void);
static int flag_value(const int *flag);

// ---- host memory: `count` zeros of `size` bytes, to be freed; ends the process if there is no memory
static void *allocate_zeros(size_t count, size_t size);

// ---- what crosses: n numbers that kernels wrote, for the host; n numbers that the host wrote, for kernels
static const int *integers_on_host(const int *numbers, long n);
static const double *doubles_on_host(const double *numbers, long n);
static const int *integers_for_kernels(const int *numbers, long n);

#endif
