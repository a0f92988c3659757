// Gradients of weights on a GPU (rule 2): sums over the rows of a batch, in blocks and slots, as
// ../gradients.c says. An element belongs to one thread, which takes it through the whole batch. Part 0 is
// the sum of the present slot, and part i + 1 is a subtree of 2^i slots that waits.
#include "arguments.h"
#include "machine.h"

// -------------------------------------------------------------------------------------- gradient of a matrix

// A thread's elements of a tile are fours: 16, or 8 where dy and x are integers. Part 0 is in registers, and
// the other parts in memory of the thread block, parts [levels + 1][fours][256][4]: the fours of the 256
// threads stand side by side. `parts` is where the thread's first four are.
INLINE int fours_of(const int is_high) { return is_high ? 8 : 16; }

INLINE long part_floats(const int is_high) { return 4L * GPU_THREADS * fours_of(is_high); }

INLINE float *parts_of_thread(const GradientArguments *a, const int is_high, int thread) {
  return a->parts + (long)thread_block_x() * (a->sums.levels + 1) * part_floats(is_high) + 4 * thread;
}

INLINE float *four_at(float *parts, const int is_high, int part, int q) {
  return parts + part * part_floats(is_high) + (long)q * 4 * GPU_THREADS;
}

// The slots [from, to) are complete. Each is joined with the subtrees that wait before it, and part 0 begins
// again at +0, as in close_slots of ../gradients.c. definition: gradients.join_slots
INLINE void close_tile_slots(float y[][4], const int is_high, float *parts, int from, int to) {
  for (int slot = from; slot < to; slot++) {
    int level = 0;
    for (; (slot >> level) & 1; level++)
      UNROLL
      for (int q = 0; q < fours_of(is_high); q++) {
        const Float4 subtree = load4(four_at(parts, is_high, level, q));
        y[q][0] = y[q][0] + subtree.x;
        y[q][1] = y[q][1] + subtree.y;
        y[q][2] = y[q][2] + subtree.z;
        y[q][3] = y[q][3] + subtree.w;
      }
    UNROLL
    for (int q = 0; q < fours_of(is_high); q++) {
      store4(four_at(parts, is_high, level, q), (Float4){y[q][0], y[q][1], y[q][2], y[q][3]});
      y[q][0] = y[q][1] = y[q][2] = y[q][3] = 0.0f;
    }
  }
}

// The thread's elements of dw that exist: element c of four q is at `at` in the arrays of partial sums. See
// own_row, and machine.h for integers. Each use computes the 32 or 64 addresses anew: registers do not
// suffice for them beside the sums.
#define EACH_ELEMENT(a, corner, is_high, ...)                                                     \
  {                                                                                               \
    const Corner from = {not_ahead((corner).row), not_ahead((corner).column)};                    \
    UNROLL                                                                                        \
    for (int q = 0; q < fours_of(is_high); q++)                                                   \
      UNROLL                                                                                      \
      for (int c = 0; c < 4; c++) {                                                               \
        const int n = from.row + ((is_high) ? q / 4 * 16 + c / 2 * 8 : q / 2 % 4 + q / 8 * 64);   \
        const int k = from.column + ((is_high) ? q % 4 * 8 + c % 2 : q % 2 * 64 + c);             \
        const long at = (a)->grad + (long)n * (a)->k + k;                                         \
        if (n < (a)->n && k < (a)->k) {                                                           \
          __VA_ARGS__                                                                             \
        }                                                                                         \
      }                                                                                           \
  }

// The sums that earlier passes left, up to the first slot of this one
INLINE void open_sums(const GradientArguments *a, Corner corner, const int is_high, float *parts,
                      float y[][4]) {
  const Sums *s = &a->sums;
  UNROLL
  for (int q = 0; q < fours_of(is_high); q++) y[q][0] = y[q][1] = y[q][2] = y[q][3] = 0.0f;
  if (s->open) EACH_ELEMENT(a, corner, is_high, y[q][c] = s->level[0][at];)
  for (int level = 0; level < s->levels; level++)
    if ((s->first >> level) & 1)
      EACH_ELEMENT(a, corner, is_high, four_at(parts, is_high, level, q)[c] = s->level[level + 1][at];)
  close_tile_slots(y, is_high, parts, s->first, a->slot[0]);
}

// The sums for the next pass, or the gradient
INLINE void store_sums(const GradientArguments *a, Corner corner, const int is_high, float *parts,
                       float y[][4]) {
  const Sums *s = &a->sums;
  if (is_whole(s)) {
    EACH_ELEMENT(a, corner, is_high, s->level[0][at] = four_at(parts, is_high, s->levels, q)[c];)
    return;
  }
  if (s->stays_open) EACH_ELEMENT(a, corner, is_high, s->level[0][at] = y[q][c];)
  for (int level = 0; level < s->levels; level++)
    if ((s->last >> level) & 1)
      EACH_ELEMENT(a, corner, is_high, s->level[level + 1][at] = four_at(parts, is_high, level, q)[c];)
}

// A thread block takes tile after tile of dw. For each one it loads the parts that an earlier backward pass
// left, adds its blocks, and stores what is open. Rows of dy and x are terms here.
KERNEL(weight_gradient_tiles, GradientArguments) {
  const TileForm f = {.high = 8};
  const int tiles_down = tiles_of(a->n, TILE);
  const int tiles = tiles_down * tiles_of(a->k, TILE);
  float *parts = parts_of_thread(a, 0, thread_index());
  for (int index = thread_block_x(); index < tiles; index += thread_blocks_x()) {
    Operand dy = matrix_by_rows(a->dy, a->ldd, a->n);
    Operand x = matrix_by_rows(a->x, a->ldx, a->k);
    Tile t = tile_at(dy, x, index % tiles_down * TILE, index / tiles_down * TILE, 0, f);
    t.start = a->start;
    t.length = a->length;
    t.blocks = a->blocks;
    const Corner corner = {own_m(&t, 0, f), own_n(&t, 0)};
    float y[MOST_HIGH][8];
    float(*fours)[4] = (float(*)[4])y;
    open_sums(a, corner, 0, parts, fours);
    Pipeline p = begin_tile(&t, 0, t.blocks, f);
    for (int block = 0; block < t.blocks; block++) {
      float acc[MOST_HIGH][8];
      chain(&t, &p, block, f, acc);
      EACH_OWN(f) y[i][j] = y[i][j] + acc[i][j];
      close_tile_slots(fours, 0, parts, a->slot[block], a->slot[block + 1]);
    }
    end_tile();
    store_sums(a, corner, 0, parts, fours);
  }
}

// ----------------------------------------------------------------------------------------------- one element

// The parts of one element: part 0 in a register, part i + 1 at subtrees[i * GPU_THREADS] in shared memory. A
// launch gives shared memory for MAX_LEVELS + 1 floats a thread.
typedef struct {
  float sum;
  SHARED float *subtrees;
} Element;

INLINE void close_element_slots(Element *e, int from, int to) {
  for (int slot = from; slot < to; slot++) {
    int level = 0;
    for (; (slot >> level) & 1; level++) e->sum = e->sum + e->subtrees[level * GPU_THREADS];
    e->subtrees[level * GPU_THREADS] = e->sum;
    e->sum = 0.0f;
  }
}

// Returns the sum that earlier passes left of the element at offset `at`
INLINE Element load_element(const Sums *s, long at) {
  Element e = {.sum = s->open ? s->level[0][at] : 0.0f, .subtrees = shared_memory + thread_index()};
  for (int level = 0; level < s->levels; level++)
    if ((s->first >> level) & 1) e.subtrees[level * GPU_THREADS] = s->level[level + 1][at];
  return e;
}

INLINE void store_element(const Sums *s, long at, const Element *e) {
  if (is_whole(s)) {
    s->level[0][at] = e->subtrees[s->levels * GPU_THREADS];
    return;
  }
  if (s->stays_open) s->level[0][at] = e->sum;
  for (int level = 0; level < s->levels; level++)
    if ((s->last >> level) & 1) s->level[level + 1][at] = e->subtrees[level * GPU_THREADS];
}

// ------------------------------------------------------------------- gradients of biases and of norm weights

// One column of one block: the sum over its rows in float64, rounded once.
// definition: gradients.column_addends
// `has_x`, `has_mean`: whether there are x and mean. They are constants, because nothing is loaded ahead
// over a branch.
INLINE float column_sum(const Columns *a, int first, int rows, int c, const int has_x, const int has_mean) {
  enum { AT_ONCE = 8 };  // addends whose numbers are on their way together
  const int addends = rows * a->each;
  double sum = 0.0;
  long t = first;
  int e = 0;
  for (int begin = 0; begin < addends; begin += AT_ONCE) {
    float dy[AT_ONCE];
    float x[AT_ONCE];
    float r[AT_ONCE];
    float mean[AT_ONCE];
    UNROLL
    for (int i = 0; i < AT_ONCE; i++) {
      dy[i] = a->dy[t * a->ldd + (long)e * a->cols + c];
      x[i] = has_x ? a->x[t * a->ldx + (long)e * a->cols + c] : 0.0f;
      r[i] = has_x ? a->r[t * a->ldr + e] : 0.0f;
      mean[i] = has_mean ? a->mean[t * a->ldr + e] : 0.0f;
      const int is_last = begin + i + 1 >= addends;  // which is loaded again, for nobody
      const int next = e + 1 == a->each;
      t += !is_last && next;
      e = is_last ? e : next ? 0 : e + 1;
    }
    UNROLL
    for (int i = 0; i < AT_ONCE; i++) {
      const float centered = has_mean ? x[i] - mean[i] : x[i];
      const double next = sum + (has_x ? (double)dy[i] * (centered * r[i]) : dy[i]);
      sum = begin + i < addends ? next : sum;
    }
  }
  return (float)sum;
}

INLINE float column_block(const Columns *a, int first, int rows, int c) {
  if (!a->x) return column_sum(a, first, rows, c, 0, 0);
  return a->mean ? column_sum(a, first, rows, c, 1, 1) : column_sum(a, first, rows, c, 1, 0);
}

// First all blocks, each for itself: a thread has a column of some blocks.
KERNEL(column_blocks, ColumnArguments) {
  const int c = thread_block_x() * GPU_THREADS + thread_index();
  if (c >= a->of.cols) return;
  for (int block = thread_block_y(); block < a->blocks; block += thread_blocks_y())
    a->partial[(long)block * a->of.cols + c] = column_block(&a->of, a->start[block], a->length[block], c);
}

// Then their sums, slot by slot: a thread has a column.
KERNEL(column_slots, ColumnArguments) {
  const int c = thread_block_x() * GPU_THREADS + thread_index();
  if (c >= a->of.cols) return;
  Element e = load_element(&a->sums, a->grad + c);
  close_element_slots(&e, a->sums.first, a->slot[0]);
  for (int block = 0; block < a->blocks; block++) {
    e.sum = e.sum + a->partial[(long)block * a->of.cols + c];
    close_element_slots(&e, a->slot[block], a->slot[block + 1]);
  }
  store_element(&a->sums, a->grad + c, &e);
}

// ----------------------------------------------------------------------------------- gradients of embeddings

// A thread block has one id after the other, a thread some columns of each: the gradients of the rows with
// that id are added one by one, straight into the slot's sum. definition: gradients.row_addends
KERNEL(table_rows, TableGradient) {
  const Sums *s = &a->sums;
  const int alone = !s->first && !s->open && is_whole(s);  // there is no other pass
  for (int id = thread_block_x(); id < a->entries; id += thread_blocks_x()) {
    const int begin = a->start[id];
    const int end = id == a->skipped ? begin : a->start[id + 1];
    for (int c = thread_index(); c < a->width; c += GPU_THREADS) {
      const long at = a->grad + (long)id * a->width + c;
      if (begin == end && alone) {  // most ids of a large vocabulary
        s->level[0][at] = 0.0f;
        continue;
      }
      Element e = load_element(s, at);
      int slot = s->first;
      for (int i = begin; i < end; i++) {
        const int t = a->sorted[i];
        close_element_slots(&e, slot, a->slot[t]);
        slot = a->slot[t];
        e.sum = e.sum + a->scale * a->dx[(long)t * a->width + c];
      }
      close_element_slots(&e, slot, s->last);
      store_element(s, at, &e);
    }
  }
}
