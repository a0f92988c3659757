// Products, sums over tokens and attention on a GPU: which kernel computes them, with how many thread blocks
// and how much shared memory. No choice here changes a bit. Structs: arguments.h.
#include "../kernels.h"
#include "arguments.h"

enum {
  FEW_ROWS = 256,     // up to here each block of terms has thread blocks of its own
  MOST_GRID_Y = 32768,
  MOST_GRID_Z = 32768,
  SCORE_FLOATS = 1 << 26,  // memory of scores
  PARTS_BYTES = 4 * GPU_THREADS * (MAX_LEVELS + 1)
};

// A kernel of kernels.c that this file launches
#define LAUNCHES(name) static Kernel name[1] = {{#name, 0, NULL}}

// Bytes of shared memory for tiles of 16 high rows
static long tile_bytes(int high) { return 4L * STAGES * stage_floats(high); }

// -------------------------------------------------------------------------------------------------- products

LAUNCHES(product_8);
LAUNCHES(product_4);
LAUNCHES(product_2);
LAUNCHES(product_1);
LAUNCHES(product_8_rows);
LAUNCHES(add_blocks);

// A kernel of products, its tiles, and its bytes of shared memory
typedef struct {
  Kernel *kernel;
  int rows;
  int columns;
  long shared;
} ProductKernel;

static ProductKernel product_kernel(int rows, int w_by_rows) {
  if (w_by_rows) return (ProductKernel){product_8_rows, 128, TILE, tile_bytes(8)};
  if (rows <= 16) return (ProductKernel){product_1, 16, TILE, tile_bytes(1)};
  if (rows <= 32) return (ProductKernel){product_2, 32, TILE, tile_bytes(2)};
  if (rows <= 64) return (ProductKernel){product_4, 64, TILE, tile_bytes(4)};
  return (ProductKernel){product_8, 128, TILE, tile_bytes(8)};
}

// `a` is the kernel's struct, or its beginning. If a grid of tiles is small, each block of terms gets thread
// blocks of its own, and add_blocks adds the blocks up.
static void run_product(ProductKernel with, ProductArguments *a) {
  if (a->rows < 1) return;
  long tiles = divided_up(a->rows, with.rows) * divided_up(a->cols, with.columns);
  int blocks = (int)divided_up(a->terms, BLOCK);
  if (tiles >= 2L * gpu.multiprocessors || blocks == 1 || a->rows > FEW_ROWS) {
    launch(with.kernel, (Grid){.x = tiles}, with.shared, a);
    return;
  }
  size_t floats = (size_t)blocks * (size_t)a->rows * (size_t)a->cols;
  a->each = 1;
  a->partial = shared_scratch(SCRATCH_PARTIAL_PRODUCTS, floats);
  launch(with.kernel, (Grid){.x = tiles, .y = blocks}, with.shared, a);
  launch(add_blocks, (Grid){.x = divided_up((long)a->rows * a->cols, GPU_THREADS)}, 0, a);
}

// ------------------------------------------------------------------------------------------------- integers

LAUNCHES(split_rows);
LAUNCHES(split_columns);
LAUNCHES(integer_product_tall);
LAUNCHES(integer_product_flat);

static int blocks_of_terms(int terms) { return (int)divided_up(terms, BLOCK); }

// Rows of `terms` terms as integers, with remainders: x [rows][ld], or x [terms][ld] `by_columns`
static SplitMatrix split(float *memory, const float *x, long ld, int rows, int terms, int by_columns,
                         int asked) {
  const int blocks = blocks_of_terms(terms);
  SplitArguments a = {.x = x, .ld = ld, .terms = terms, .asked = asked};
  a.to = factor_in(memory, rows, blocks);
  if (by_columns) launch(split_columns, (Grid){.x = blocks * (a.to.room / 32)}, 4L * 32 * BLOCK, &a);
  else launch(split_rows, (Grid){.x = blocks * (a.to.room / (GPU_THREADS / LANES))}, 0, &a);
  return a.to;
}

// Columns of x [..][columns], in the blocks of a batch
static SplitMatrix split_batch(ScratchArea area, const float *x, int columns, const Blocks *blocks) {
  float *memory = shared_scratch(area, (size_t)integer_floats(columns, blocks->count));
  SplitArguments a = {
      .x = x,
      .ld = columns,
      .start = blocks->start_in_kernels,
      .length = blocks->length_in_kernels,
      .to = integers_in(memory, columns, blocks->count),
  };
  if (blocks->count)
    launch(split_columns, (Grid){.x = blocks->count * (a.to.room / 32)}, 4L * 32 * BLOCK, &a);
  return a.to;
}

static void run_integer_product(ProductArguments a, SplitMatrix w, int asked) {
  if (a.rows < 1) return;
  const int blocks = blocks_of_terms(a.terms);
  float *memory = shared_scratch(SCRATCH_INTEGERS, (size_t)factor_floats(a.rows, blocks));
  IntegerProduct p = {.product = a, .w = w};
  p.x = split(memory, a.x, a.ldx, a.rows, a.terms, 0, asked);
  const IntegerForm f = a.rows <= 16 ? FLAT : TALL;
  Kernel *kernel = a.rows <= 16 ? integer_product_flat : integer_product_tall;
  const long shared = 4L * INTEGER_STAGES * integer_stage_floats(f);
  const ProductKernel with = {kernel, form_rows(f), form_columns(f), shared};
  run_product(with, &p.product);
}

// --------------------------------------------------------------------------------------------- linear layers

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
  if (w->precision == PRECISION_HIGH)
    run_integer_product(a, factor_in(w->panels, w->n, blocks_of_terms(w->k)), 1);
  else
    run_product(product_kernel(rows, w->transposed), &a);
}

static void linear_backward_input(const Matrix *w, const float *dy, int rows, float *dx) {
  const long ldw = w->transposed ? w->n : w->k;
  ProductArguments a = {
      .x = dy,
      .ldx = w->n,
      .w = w->w,
      .ldw = ldw,
      .y = dx,
      .ldy = w->k,
      .rows = rows,
      .cols = w->k,
      .terms = w->n,
  };
  if (w->precision == PRECISION_HIGH) {
    const long floats = factor_floats(w->k, blocks_of_terms(w->n));
    float *memory = shared_scratch(SCRATCH_INTEGER_WEIGHTS, (size_t)floats);
    run_integer_product(a, split(memory, w->w, ldw, w->k, w->n, !w->transposed, 1), 0);
    return;
  }
  run_product(product_kernel(rows, !w->transposed), &a);
}

// In precision highest the kernels of a GPU read weights as they lie: nothing is packed.
long panel_floats(int n, int k, Precision precision) {
  return precision == PRECISION_HIGH ? factor_floats(n, blocks_of_terms(k)) : 0;
}

void pack(Matrix *m) {
  if (m->precision == PRECISION_HIGH)
    split(m->panels, m->w, m->transposed ? m->n : m->k, m->n, m->k, m->transposed, 1);
}

// -------------------------------------------------------------------------------------- sums over tokens

LAUNCHES(weight_gradient_tiles);
LAUNCHES(integer_gradient_tiles);
LAUNCHES(column_blocks);
LAUNCHES(column_slots);
LAUNCHES(table_rows);

static void weight_gradient(Precision precision, const float *dy, int n, const float *x, int k,
                            const Blocks *blocks, long grad) {
  if (grad < 0) return;
  const int is_high = precision == PRECISION_HIGH;
  const int rows = is_high ? form_rows(TALL) : TILE;
  const int columns = is_high ? form_columns(TALL) : TILE;
  const long tiles = divided_up(n, rows) * divided_up(k, columns);
  const long at_once = (is_high ? 2L : 1L) * gpu.multiprocessors;
  const long grid = tiles < at_once ? tiles : at_once;
  const size_t parts = (size_t)((blocks->sums->levels + 1) * rows * columns);
  GradientArguments a = {
      .dy = dy,
      .ldd = n,
      .x = x,
      .ldx = k,
      .n = n,
      .k = k,
      .blocks = blocks->count,
      .start = blocks->start_in_kernels,
      .length = blocks->length_in_kernels,
      .slot = blocks->slot_in_kernels,
      .grad = grad,
      .parts = shared_scratch(SCRATCH_GRADIENT_PARTS, (size_t)grid * parts),
      .sums = *blocks->sums,
  };
  if (!is_high) {
    launch(weight_gradient_tiles, (Grid){.x = grid}, tile_bytes(8), &a);
    return;
  }
  const IntegerGradient with = {
      .gradient = a,
      .dy = split_batch(SCRATCH_GRADIENT_STRIPS, dy, n, blocks),
      .x = split_batch(SCRATCH_GRADIENT_PANELS, x, k, blocks),
  };
  launch(integer_gradient_tiles, (Grid){.x = grid}, 4L * INTEGER_STAGES * integer_stage_floats(TALL), &with);
}

static void column_sums(Columns of, const Blocks *blocks, long grad) {
  if (grad < 0) return;
  const int count = blocks->count;
  ColumnArguments a = {
      .of = of,
      .blocks = count,
      .start = blocks->start_in_kernels,
      .length = blocks->length_in_kernels,
      .slot = blocks->slot_in_kernels,
      .partial = shared_scratch(SCRATCH_COLUMN_BLOCKS, (size_t)count * (size_t)of.cols),
      .grad = grad,
      .sums = *blocks->sums,
  };
  const long across = divided_up(of.cols, GPU_THREADS);
  if (count) launch(column_blocks, (Grid){.x = across, .y = least(count, MOST_GRID_Y)}, 0, &a);
  launch(column_slots, (Grid){.x = across}, PARTS_BYTES, &a);
}

static void sum_table_rows(const TableGradient *of) {
  launch(table_rows, (Grid){.x = least(of->entries, 32 * gpu.multiprocessors)}, PARTS_BYTES, of);
}

// ------------------------------------------------------------------------------------------------- attention

LAUNCHES(attend_queries_2);
LAUNCHES(attend_queries_8);
LAUNCHES(attend_scores);
LAUNCHES(attend_rows);
LAUNCHES(attend_values);
LAUNCHES(attend_backward_scores);
LAUNCHES(attend_backward_rows);
LAUNCHES(attend_backward_queries);
LAUNCHES(attend_backward_keys);

enum { FEW_QUERIES = 8 };  // of a sequence, on average

// Queries of sequence s, and keys that its last query sees if there is no window
INLINE int queries_of(const Batch *b, int s) { return b->start[s + 1] - b->start[s]; }
INLINE int keys_of(const Batch *b, int s) {
  return queries_of(b, s) ? b->position[b->start[s + 1] - 1] + 1 : 0;
}

// Keys that one query reads at most
static int longest_span(const Heads *h) {
  int longest = 0;
  for (int s = 0; s < h->b->sequences; s++) {
    const int keys = keys_of(h->b, s);
    longest = keys > longest ? keys : longest;
  }
  return h->window && longest > h->window + BLOCK ? h->window + BLOCK : longest;
}

// Each query for itself
static void attend_single_queries(const Heads *h, int heads, long shared) {
  const Model *m = h->m;
  const Batch *b = h->b;
  AttendArguments a = {
      .q = h->q,
      .keys = h->keys,
      .values = h->values,
      .position = h->in_kernels->position,
      .sequence = h->in_kernels->sequence,
      .base = h->in_kernels->base,
      .capacity = b->capacity,
      .mixed = h->mixed,
      .top = h->top,
      .total = h->total,
      .heads = m->heads,
      .kv_heads = m->kv_heads,
      .head_dim = m->head_dim,
      .window = h->window,
      .scale = h->scale,
      .score_cap = h->score_cap,
  };
  const long of_token = m->kv_heads * divided_up(m->heads / m->kv_heads, heads);
  launch(heads <= 2 ? attend_queries_2 : attend_queries_8, (Grid){.x = b->tokens * of_token}, shared, &a);
}

// One launch: so many heads and sequences from those on that the arguments name
typedef void (*SequencePass)(const SequenceArguments *a, long heads, long sequences);

// All sequences: as many in one launch as SCORE_FLOATS allow, and at least one key head of one sequence.
// `arrays`: of scores.
static void by_sequences(const Heads *h, int arrays, SequencePass pass) {
  const Model *m = h->m;
  const Batch *b = h->b;
  SequenceArguments a = {
      .q = h->q,
      .keys = h->keys,
      .values = h->values,
      .start = h->in_kernels->start,
      .position = h->in_kernels->position,
      .base = h->in_kernels->base,
      .capacity = b->capacity,
      .mixed = h->mixed,
      .top = h->top,
      .total = h->total,
      .d_mixed = h->d_mixed,
      .dq = h->dq,
      .d_raw = h->d_raw,
      .d_raw_row = qkv_width(m),
      .k_at = m->k_at,
      .k_step = m->k_step,
      .v_at = m->v_at,
      .v_step = m->v_step,
      .heads = m->heads,
      .kv_heads = m->kv_heads,
      .head_dim = m->head_dim,
      .window = h->window,
      .scale = h->scale,
      .score_cap = h->score_cap,
  };
  const int group = m->heads / m->kv_heads;
  int count;
  for (int first = 0; first < b->sequences; first += count) {
    a.first_sequence = first;
    a.most = a.ld = 0;
    for (count = 0; first + count < b->sequences && count < MOST_GRID_Z; count++) {
      const int queries = queries_of(b, first + count);
      const int keys = (int)multiple_of_16(keys_of(b, first + count));
      const int most = queries > a.most ? queries : a.most;
      const int ld = keys > a.ld ? keys : a.ld;
      if (count && (long)arrays * (count + 1) * m->heads * most * ld > SCORE_FLOATS) break;
      a.most = most;
      a.ld = ld;
    }
    if (!a.most) continue;
    const long of_group = (long)count * group * a.most * a.ld;  // scores of one key head
    long groups = SCORE_FLOATS / (arrays * of_group);
    groups = groups < 1 ? 1 : groups > m->kv_heads ? m->kv_heads : groups;
    const long scores = multiple_of_16(groups * of_group);
    a.p = shared_scratch(SCRATCH_SCORES, (size_t)(arrays * scores));
    if (!a.p) return;
    a.ds = arrays > 1 ? a.p + scores : NULL;
    for (a.first_kv = 0; a.first_kv < m->kv_heads; a.first_kv += (int)groups)
      pass(&a, (long)group * least((int)groups, m->kv_heads - a.first_kv), count);
  }
}

static void attend_sequences(const SequenceArguments *a, long heads, long sequences) {
  const long down = divided_up(a->most, TILE);
  const Grid scores = {down * divided_up(a->ld, TILE), heads, sequences, 0};
  const Grid rows = {divided_up(a->most, GPU_THREADS / LANES), heads, sequences, 0};
  const Grid values = {down * divided_up(a->head_dim, TILE), heads, sequences, 0};
  launch(attend_scores, scores, tile_bytes(8), a);
  launch(attend_rows, rows, 0, a);
  launch(attend_values, values, tile_bytes(8), a);
}

static void attend_backward_sequences(const SequenceArguments *a, long heads, long sequences) {
  const long down = divided_up(a->most, TILE);
  const long across = divided_up(a->head_dim, TILE);
  const long key_heads = heads * a->kv_heads / a->heads;
  const Grid scores = {down * divided_up(a->ld, TILE), 2 * heads, sequences, 0};
  const Grid rows = {divided_up(a->most, GPU_THREADS / LANES), heads, sequences, 0};
  const Grid queries = {down * across, heads, sequences, 0};
  const Grid keys = {down * across, 2 * key_heads, sequences, 0};
  launch(attend_backward_scores, scores, tile_bytes(8), a);
  launch(attend_backward_rows, rows, 0, a);
  launch(attend_backward_queries, queries, tile_bytes(8), a);
  launch(attend_backward_keys, keys, tile_bytes(8), a);
}

static void attend(const Heads *h) {
  if (!h->b->tokens) return;
  const int heads = least(h->m->heads / h->m->kv_heads, QUERY_HEADS);
  const long shared = 4 * attend_queries_floats(heads, h->m->head_dim, longest_span(h));
  const int few = h->b->tokens <= FEW_QUERIES * h->b->sequences;
  if (few && shared <= gpu.shared_memory) attend_single_queries(h, heads, shared);
  else by_sequences(h, 1, attend_sequences);
}

static void attend_backward(const Heads *h) { by_sequences(h, 2, attend_backward_sequences); }
