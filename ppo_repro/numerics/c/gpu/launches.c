// Products, sums over tokens and attention on a GPU: which kernel computes them, with how many thread blocks
// and how much shared memory. No choice here changes a bit. Structs: arguments.h.
#include "../kernels.h"
#include "arguments.h"

// Sizes that the kernels have too
enum {
  TILE = 128,         // columns of a tile, and its rows / (16 high) x 16
  TERMS = 16,         // of a stage
  STAGES = 3,
  FEW_ROWS = 256,     // up to here each block of terms has thread blocks of its own
  MOST_BLOCKS_Y = 32768,
  SCORE_FLOATS = 1 << 26  // memory of scores: that many heads at a time
};

#define KERNEL(name) static Kernel name[1] = {{#name, 0, NULL}}

// Bytes of shared memory for tiles of 16 high rows; with `in_registers` the sums of blocks are not there
static long tile_bytes(int high, int in_registers) {
  long sums = in_registers ? 0 : high * 8L * GPU_THREADS;
  return 4 * (sums + STAGES * (16 * high + TILE) * TERMS);
}

// Whether all rows, `ld` floats apart, begin at 16 bytes
static int whole(const float *rows, long ld) { return (((uintptr_t)rows | (uintptr_t)(4 * ld)) & 15) == 0; }

// -------------------------------------------------------------------------------------------------- products

KERNEL(product_8);
KERNEL(product_8_registers);
KERNEL(product_4);
KERNEL(product_2);
KERNEL(product_1);
KERNEL(product_8_any);
KERNEL(product_1_any);
KERNEL(product_8_rows);
KERNEL(product_8_rows_any);
KERNEL(add_blocks);

// A kernel of products y = x w^T for `rows` rows, and the height of its tiles / 16
typedef struct {
  Kernel *kernel;
  int high;
  int in_registers;
} ProductKernel;

static ProductKernel product_kernel(int rows, int w_by_rows, int is_whole) {
  int room = tile_bytes(8, 0) <= gpu.shared_memory;
  if (w_by_rows) return (ProductKernel){is_whole ? product_8_rows : product_8_rows_any, 8, 0};
  if (!is_whole) return rows <= 16 ? (ProductKernel){product_1_any, 1, 1} : (ProductKernel){product_8_any, 8, 0};
  if (rows <= 16) return (ProductKernel){product_1, 1, 1};
  if (rows <= 32) return (ProductKernel){product_2, 2, 1};
  if (rows <= 64) return (ProductKernel){product_4, 4, 1};
  return room ? (ProductKernel){product_8, 8, 0} : (ProductKernel){product_8_registers, 8, 1};
}

// With few rows a grid of tiles is small: each block of terms gets thread blocks of its own, and add_blocks
// adds the blocks up.
static void run_product(ProductArguments a, int w_by_rows) {
  if (a.rows < 1) return;
  ProductKernel with = product_kernel(a.rows, w_by_rows, whole(a.x, a.ldx) && whole(a.w, a.ldw));
  long tiles = blocks_for(a.rows, 16 * with.high) * blocks_for(a.cols, TILE);
  long shared = tile_bytes(with.high, with.in_registers);
  int blocks = (int)blocks_for(a.terms, BLOCK);
  if (a.rows > FEW_ROWS || blocks == 1) {
    launch(with.kernel, tiles, 1, shared, &a, NULL);
    return;
  }
  size_t floats = (size_t)blocks * (size_t)a.rows * (size_t)a.cols;
  a.each = 1;
  a.partial = gpu_scratch(PARTIAL_PRODUCTS, floats);
  launch(with.kernel, tiles, blocks, shared, &a, NULL);
  launch(add_blocks, blocks_for((long)a.rows * a.cols, GPU_THREADS), 1, 0, &a, NULL);
}

void linear(const Matrix *w, const float *x, int rows, const float *residual, float *y) {
  ProductArguments a = {
      .x = x,
      .ldx = w->k,
      .w = w->w,
      .ldw = w->transposed ? w->n : w->k,
      .bias = w->bias,
      .residual = residual,
      .y = y,
      .ldy = w->n,
      .rows = rows,
      .cols = w->n,
      .terms = w->k,
  };
  run_product(a, w->transposed);
}

static void linear_backward_input(const Matrix *w, const float *dy, int rows, float *dx) {
  ProductArguments a = {
      .x = dy,
      .ldx = w->n,
      .w = w->w,
      .ldw = w->transposed ? w->n : w->k,
      .y = dx,
      .ldy = w->k,
      .rows = rows,
      .cols = w->k,
      .terms = w->n,
  };
  run_product(a, !w->transposed);
}

// The kernels of a GPU read weights as they lie: nothing is packed.
long panel_floats(int n, int k) {
  (void)n;
  (void)k;
  return 0;
}

void pack(Matrix *m) { (void)m; }

// -------------------------------------------------------------------------------------- sums over tokens

KERNEL(weight_gradient_tiles);
KERNEL(weight_gradient_tiles_any);
KERNEL(column_blocks);
KERNEL(column_slots);
KERNEL(table_rows);

typedef struct {
  const int *start;
  const int *length;
  const int *slot;
} BlocksInKernels;

static BlocksInKernels in_kernels(const Blocks *b) {
  const int each = b->rows + 1;
  return (BlocksInKernels){b->in_kernels, b->in_kernels + each, b->in_kernels + 2 * each};
}

static void weight_gradient(const float *dy, int n, const float *x, int k, const Blocks *blocks, long grad) {
  if (grad < 0) return;
  const BlocksInKernels b = in_kernels(blocks);
  const long tiles = blocks_for(n, TILE) * blocks_for(k, TILE);
  const long grid = tiles < 2L * gpu.multiprocessors ? tiles : 2L * gpu.multiprocessors;
  const size_t parts = (size_t)(blocks->sums->levels + 1) * TILE * TILE;
  GradientArguments a = {
      .dy = dy,
      .ldd = n,
      .x = x,
      .ldx = k,
      .n = n,
      .k = k,
      .blocks = blocks->count,
      .start = b.start,
      .length = b.length,
      .slot = b.slot,
      .grad = grad,
      .parts = gpu_scratch(GRADIENT_PARTS, (size_t)grid * parts),
      .sums = *blocks->sums,
  };
  int is_whole = whole(dy, n) && whole(x, k);
  launch(is_whole ? weight_gradient_tiles : weight_gradient_tiles_any, grid, 1, tile_bytes(8, 0), &a, NULL);
}

static void column_sums(ColumnSums of) {
  if (of.grad < 0) return;
  const BlocksInKernels b = in_kernels(of.blocks);
  const int blocks = of.blocks->count;
  ColumnArguments a = {
      .dy = of.dy,
      .ldd = of.ldd,
      .x = of.x,
      .ldx = of.ldx,
      .r = of.r,
      .mean = of.mean,
      .ldr = of.ldr,
      .each = of.each,
      .cols = of.cols,
      .blocks = blocks,
      .start = b.start,
      .length = b.length,
      .slot = b.slot,
      .partial = gpu_scratch(COLUMN_BLOCKS, (size_t)blocks * (size_t)of.cols),
      .grad = of.grad,
      .sums = *of.blocks->sums,
  };
  const long across = blocks_for(of.cols, GPU_THREADS);
  if (blocks) launch(column_blocks, across, least(blocks, MOST_BLOCKS_Y), 0, &a, NULL);
  launch(column_slots, across, 1, 0, &a, NULL);
}

static void table_gradient(const float *dx, int width, float scale, const int *ids, int entries, int skipped,
                           const Blocks *blocks, long grad) {
  if (grad < 0) return;
  SortedRows rows = sort_rows(ids, entries, blocks);
  TableArguments a = {
      .dx = dx,
      .width = width,
      .scale = scale,
      .entries = entries,
      .skipped = skipped,
      .start = integers_for_kernels(rows.start, entries + 1L),
      .sorted = integers_for_kernels(rows.sorted, blocks->rows),
      .slot = integers_for_kernels(rows.slot, blocks->rows),
      .grad = grad,
      .sums = *blocks->sums,
  };
  launch(table_rows, least(entries, 32 * gpu.multiprocessors), 1, 0, &a, NULL);
  free(rows.start);
}

// ------------------------------------------------------------------------------------------------- attention

KERNEL(attend_queries);
KERNEL(keys_as_rows);
KERNEL(attend_scores);
KERNEL(attend_scores_any);
KERNEL(attend_rows);
KERNEL(attend_values);
KERNEL(attend_values_any);
KERNEL(attend_backward_scores);
KERNEL(attend_backward_scores_any);
KERNEL(attend_backward_rows);
KERNEL(attend_backward_queries);
KERNEL(attend_backward_queries_any);
KERNEL(attend_backward_keys);
KERNEL(attend_backward_keys_any);

enum { WHOLE_TOKENS = 32 };  // tokens of a sequence, on average, from which tiles are the faster form

// Whether all sequences are whole, and long enough for tiles
static int has_long_sequences(const Batch *b) {
  if (b->tokens < WHOLE_TOKENS * b->sequences) return 0;
  for (int s = 0; s < b->sequences; s++)
    if (b->start[s + 1] > b->start[s] && b->position[b->start[s]]) return 0;
  return 1;
}

// Each query for itself
static void attend_over_cache(const Heads *h) {
  const Model *m = h->m;
  const Batch *b = h->b;
  int longest = 0;
  for (int s = 0; s < b->sequences; s++)
    if (b->start[s + 1] > b->start[s]) {
      int last = b->position[b->start[s + 1] - 1] + 1;
      longest = last > longest ? last : longest;
    }
  AttendArguments a = {
      .q = h->q,
      .keys = h->keys,
      .values = h->values,
      .sequence = h->in_kernels->sequence,
      .position = h->in_kernels->position,
      .base = h->in_kernels->base,
      .mixed = h->mixed,
      .top = h->top,
      .total = h->total,
      .tokens = b->tokens,
      .heads = m->heads,
      .kv_heads = m->kv_heads,
      .d = m->head_dim,
      .window = h->window,
      .longest = longest,
      .capacity = b->capacity,
      .scale = h->scale,
  };
  if (!b->tokens) return;
  launch(attend_queries, (long)b->tokens * m->kv_heads, 1, attend_queries_bytes(&a), &a, NULL);
}

// A sequence as the tile kernels take it, without its scores
static SequenceArguments sequence_of(const Heads *h, int s, const float *keys) {
  const Model *m = h->m;
  const long first = h->b->start[s];
  const long width = q_width(m);
  const long at = (long)h->b->base[s] * m->head_dim;
  const int count = h->b->start[s + 1] - (int)first;
  SequenceArguments a = {
      .q = h->q + first * width,
      .ldq = width,
      .k = keys,
      .ldk = m->head_dim,
      .k_step = (long)count * m->head_dim,
      .v = h->values + at,
      .ldv = m->head_dim,
      .v_step = h->b->capacity * m->head_dim,
      .mixed = h->mixed + first * width,
      .top = h->top + first * m->heads,
      .total = h->total + first * m->heads,
      .all_heads = m->heads,
      .each = m->heads / m->kv_heads,
      .d = m->head_dim,
      .count = count,
      .window = h->window,
      .scale = h->scale,
  };
  if (!h->d_mixed) return a;
  a.d_mixed = h->d_mixed + first * width;
  a.dq = h->dq + first * width;
  a.ldd = qkv_width(m);
  a.d_step = m->k_step;
  a.dk = h->d_raw + first * a.ldd + m->k_at;
  a.dv = h->d_raw + first * a.ldd + m->v_at;
  return a;
}

// The keys of sequence s as rows [kv_heads][count][head_dim], in `rows`
static void turn_keys(const Heads *h, int s, int count, float *rows) {
  const Model *m = h->m;
  KeysArguments a = {
      .panels = h->keys + (long)h->b->base[s] * m->head_dim,
      .step = h->b->capacity * m->head_dim,
      .count = count,
      .d = m->head_dim,
      .rows = rows,
  };
  launch(keys_as_rows, blocks_for((long)count * m->head_dim, GPU_THREADS), m->kv_heads, 0, &a, NULL);
}

// Each sequence by tiles, some heads at a time: `pass` computes the heads of its argument.
static void by_sequence(const Heads *h, int arrays, void (*pass)(const SequenceArguments *a)) {
  const Model *m = h->m;
  for (int s = 0; s < h->b->sequences; s++) {
    const int count = h->b->start[s + 1] - h->b->start[s];
    if (!count) continue;
    const int group = m->heads / m->kv_heads;
    const long keys = round16((long)m->kv_heads * count * m->head_dim);
    const long of_head = (long)count * round16(count);
    long groups = SCORE_FLOATS / (arrays * of_head * group);
    groups = groups < 1 ? 1 : groups > m->kv_heads ? m->kv_heads : groups;
    const long scores = round16(groups * group * of_head);
    // tiles read rows of keys and scores beyond the last one, up to a whole tile of columns, as zeros
    float *memory = gpu_scratch(SEQUENCE_SCORES, (size_t)(keys + arrays * scores));
    turn_keys(h, s, count, memory);
    SequenceArguments a = sequence_of(h, s, memory);
    a.p = memory + keys;
    a.ds = arrays > 1 ? a.p + scores : NULL;
    for (int g = 0; g < m->kv_heads; g += (int)groups) {
      a.first = g * group;
      a.heads = least((int)groups, m->kv_heads - g) * group;
      pass(&a);
    }
  }
}

static long tiles_of(const SequenceArguments *a) { return blocks_for(a->count, TILE); }
static long across_of(const SequenceArguments *a) { return blocks_for(a->d, TILE); }
static int whole_heads(const float *rows, long ld, long step) { return whole(rows, ld) && whole(rows, step); }

static void attend_tiles(const SequenceArguments *a) {
  const long tiles = tiles_of(a);
  const int whole_q = whole_heads(a->q, a->ldq, a->d);
  const int whole_k = whole_heads(a->k, a->ldk, a->k_step);
  const int whole_v = whole_heads(a->v, a->ldv, a->v_step);
  launch(whole_q && whole_k ? attend_scores : attend_scores_any, tiles * tiles, a->heads, tile_bytes(8, 0), a, NULL);
  launch(attend_rows, blocks_for((long)a->heads * a->count, ROWS_OF_BLOCK), 1, 0, a, NULL);
  launch(whole_v ? attend_values : attend_values_any, tiles * across_of(a), a->heads, tile_bytes(8, 0), a, NULL);
}

static void attend_backward_tiles(const SequenceArguments *a) {
  const long tiles = tiles_of(a);
  const long across = across_of(a);
  const long rows = blocks_for((long)a->heads * a->count, ROWS_OF_BLOCK);
  const long shared = tile_bytes(8, 0);
  const int whole_q = whole_heads(a->q, a->ldq, a->d);
  const int whole_k = whole_heads(a->k, a->ldk, a->k_step);
  const int whole_v = whole_heads(a->v, a->ldv, a->v_step);
  const int whole_d = whole_heads(a->d_mixed, a->ldq, a->d);
  const int all = whole_q && whole_k && whole_v && whole_d;
  launch(all ? attend_backward_scores : attend_backward_scores_any, tiles * tiles, 2L * a->heads, shared, a, NULL);
  launch(attend_backward_rows, rows, 1, 0, a, NULL);
  launch(whole_k ? attend_backward_queries : attend_backward_queries_any, tiles * across, a->heads, shared, a, NULL);
  launch(whole_q && whole_d ? attend_backward_keys : attend_backward_keys_any, tiles * across,
         2L * a->heads / a->each, tile_bytes(8, 1), a, NULL);
}

static void attend(const Heads *h) {
  if (has_long_sequences(h->b)) by_sequence(h, 1, attend_tiles);
  else attend_over_cache(h);
}

static void attend_backward(const Heads *h) { by_sequence(h, 2, attend_backward_tiles); }
