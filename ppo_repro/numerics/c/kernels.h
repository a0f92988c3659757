// What all kernels share: the constants of the law, types, and functions that must be inlined.
//
// The law: each output element is one chain of operations, each rounded once (+ - * / sqrt fma), in one written order
// that depends on that element alone. Vector lanes run along the outputs, so batch, padding, cache, micro-batches,
// threads, vector width and instruction set cannot change a bit. Compile with -ffp-contract=off, never -ffast-math.
#ifndef KERNELS_H
#define KERNELS_H
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "arithmetic.h"

enum { COLS = 16 };                                // columns of a panel: free, as are all sizes below
#if defined(__AVX512F__)
enum { ROWS = 12, PANELS = 2 };
#else
enum { ROWS = 6, PANELS = 1 };
#endif
enum { MAX_LEVELS = 8 };  // arrays of partial sums of gradients: at most 2^7 slots

#define EXPORT __attribute__((visibility("default")))

// 16 columns of a tile. A vector type, because clang turns some loops over arrays of this size into gathers.
typedef float Wide __attribute__((ext_vector_type(COLS), aligned(4)));

INLINE Wide wide_at(const float *x) { return *(const Wide *)x; }
INLINE Wide fma_wide(Wide a, Wide b, Wide c) {
#if defined(__FMA__) || defined(__aarch64__)
  return __builtin_elementwise_fma(a, b, c);
#else
  for (int j = 0; j < COLS; j++) c[j] = fma32(a[j], b[j], c[j]);
  return c;
#endif
}

// ---- threads.c: one pool; results know nothing of it
typedef void (*Task)(void *argument, int index);
typedef void (*RowTask)(const void *argument, int row);
static void parallel_for(int total, Task task, void *argument);
static void for_rows(int rows, RowTask work, const void *argument);
static int task_size(long items, int others, int most);
static float *scratch(size_t floats);                    // of this thread, until its next call
static float *shared_scratch(int index, size_t floats);  // of the caller of parallel_for, until the next call with it

// ---- products.c
// A matrix [n][k] of a linear layer, y = x w^T + bias; `transposed`: it lies in memory as [k][n].
// Panels [ceil(n / 16)][k][16] are a packed copy of w. Offsets of gradients count floats; -1: not trained.
typedef struct {
  const float *w, *bias;
  float *panels;
  long grad, bias_grad;
  int n, k, transposed;
} Matrix;

// Where gradients go. A minibatch has `2^levels` slots of sequences; sums of slots are joined as a binary tree. After
// whole slots 0 .. s - 1, level[i + 1] holds a subtree of 2^i slots for each bit i of s; level[0] holds slot s so far,
// and in the end the whole tree. One call goes from slot `first` (`open`: with a beginning in level[0]) to slot `last`
// (`stays_open`: whose beginning is then in level[0]). All arrays have the same offsets.
typedef struct {
  float *level[MAX_LEVELS];
  int levels, first, open, last, stays_open;
} Sums;

// Rows of a batch in blocks: consecutive rows of one sequence whose positions have one value of position / 128
typedef struct {
  int count, rows;
  int *start, *length, *slot;
  const Sums *sums;
} Blocks;

// ---- model.c
enum { NORM_RMS, NORM_RMS_OFFSET, NORM_LAYER };                // w x r; (1 + w) x r; w (x - mean) r + b
enum { QK_NORM_NONE, QK_NORM_HEAD, QK_NORM_WHOLE };            // of queries and keys: of each head, of all heads
enum { ACT_SILU, ACT_GELU, ACT_GELU_TANH };
typedef struct { const float *w, *b; long grad, b_grad; } NormWeights;
typedef struct {
  NormWeights norm1, norm2, q_norm, k_norm;
  Matrix qkv, out, up, down;        // up: [2 mlp] with gates first where `gated`
  Matrix router, *expert_up, *expert_down;  // where the model has experts and `expert_up` is not NULL
  int window;                       // keys that a query sees, itself included; 0: all
  int mixture;                      // how many layers before it have experts
  float scale;                      // of scores
} Layer;
typedef struct {
  int layers, hidden, heads, kv_heads, head_dim, vocabulary;
  int norm, qk_norm, rotary, activation, gated, parallel;  // rotary: how many of head_dim rotate
  int experts, chosen, normalised, mixtures;               // mixtures: layers with experts
  int q_at, q_step, k_at, k_step, v_at, v_step;            // heads in a row of qkv
  int round_activations, round_inputs, round_cache;  // formats of rounding.c; 0: none
  int position_entries, padding;                           // rows of `positions`; a token whose embedding is not trained, or -1
  float eps, embedding_scale;
  const float *cosine, *sine;                              // [positions][rotary / 2]
  const float *embedding, *positions;                      // positions: learned, or NULL
  long embedding_grad, positions_grad;
  NormWeights last_norm;
  const Layer *layer;
} Model;

// Rows of tokens, sequence after sequence without padding. Keys and values lie in a cache: per layer and head
// [capacity / 16][head_dim][16] and [capacity][head_dim]; a sequence's first position is at base[s], of 16s.
typedef struct {
  int tokens, sequences;
  const int *ids, *position, *sequence, *start, *base;  // [tokens] x 3, [sequences + 1], [sequences]
  const int *slots;                                     // [sequences + 1], the last one: see Sums
  float *keys, *values;
  long capacity;
  const int *routes;  // [tokens][mixtures][chosen] experts that are given, rising; NULL: routers choose
  int *seen;          // where the experts go, or NULL
} Batch;
#endif
