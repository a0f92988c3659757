// Precision high on tensor cores: blocks of integers as ../integers.c says, their exact sums from products
// of bytes. Tensor cores multiply bytes, so X = 65 H + L, with H in -63..63 and L in -32..32:
//
//   sum of X W = 65^2 HH' + 65 (HL' + LH') + LL'
//
// To save registers a thread has one sum of each element instead of the three above. The sum is modulo 2^32.
// This loses nothing: |sum of X W| < 2^31, and 65 has an inverse, since it is odd. For 32 terms the sum adds
// LL', is divided by 65, adds HL' and LH', is divided by 65, and adds HH'. For the next 32 terms it goes
// back: it adds HH', is multiplied by 65, adds HL' and LH', is multiplied by 65, and adds LL'. So bytes are
// read once, and registers suffice for two thread blocks of a multiprocessor: one computes while the other
// waits. Beyond the terms of a block, H = L = 0.
//
// The sum of remainders, X W' + X' W, is computed in the same way, from two products. It is rare, so its
// lines come straight from global memory.
//
// A thread block of 8 warps computes a tile of y, and a warp 16 high x 8 wide elements of it. Halves of
// blocks, 64 terms, come by asynchronous copies: of each row one line of 128 bytes, 64 H and then 64 L. Chunk
// c of line r, 16 bytes, is stored as chunk c ^ r % 8, so that load_matrices meets no bank twice.
#include "arguments.h"
#include "machine.h"

#define WHOLE 0x1.8p23f  // between 2^23 and 2^24 a float is an integer, so x + WHOLE rounds x
#define INVERSE 0xc0fc0fc1u  // 65 INVERSE = 1 modulo 2^32
enum {
  RADIX = 65,                        // between H and L
  MOST_FOURS = 8,                    // of a warp: high wide
  LINE_FLOATS = LINE_BYTES / 4,
  LEAST_EXPONENT = 127 + 11 - 63,    // as ../integers.c: s is at most 63
  REFUSED_EXPONENT = 127 + 60,       // 2^60, and infinity and NaN
  SMALL = 32                         // as ../integers.c too
};

// ---------------------------------------------------------------------------------- from numbers to integers

// WHOLE + X
INLINE float integer_of(float x) {
  const int most = (int)as_bits(WHOLE + 4095.0f);
  const int lowest = (int)as_bits(WHOLE - 4095.0f);
  const int bits = (int)as_bits(x + WHOLE);
  return as_float((uint32_t)(bits > most ? most : bits < lowest ? lowest : bits));
}

INLINE int sum_of_lanes(int x) {
  UNROLL
  for (int mask = LANES / 2; mask; mask /= 2) x += (int)other_lane((uint32_t)x, mask);
  return x;
}

// The bytes H and L of 4 integers, from WHOLE + X, to the place of a thread's terms in a line. The lowest
// byte of WHOLE + H is H.
INLINE void put_bytes(const float whole[4], uint32_t *line) {
  uint32_t high[4];
  uint32_t low[4];
  UNROLL
  for (int i = 0; i < 4; i++) {
    const float H = fma32(whole[i] - WHOLE, 1.0f / RADIX, WHOLE);  // X / 65 is never near a tie
    high[i] = as_bits(H);
    low[i] = as_bits(fma32(H - WHOLE, -RADIX, whole[i]));
  }
  line[0] = lowest_bytes(high);
  line[LINE_FLOATS / 2] = lowest_bytes(low);
}

// 16 threads turn one block of a row into integers. Thread l has the terms 64 half + 4 l + i in v[half][i],
// and 0 beyond `terms`. definition: product.integers
INLINE void split_block(float v[2][4], int terms, const SplitMatrix *to, int row, int block, int asked) {
  const int lane = thread_index() % LANES;
  uint32_t largest = 0;
  UNROLL
  for (int half = 0; half < 2; half++)
    UNROLL
    for (int i = 0; i < 4; i++) {
      const uint32_t size = as_bits(v[half][i]) & 0x7fffffffu;
      largest = size > largest ? size : largest;
    }
  UNROLL
  for (int mask = LANES / 2; mask; mask /= 2) {
    const uint32_t other = other_lane(largest, mask);
    largest = other > largest ? other : largest;
  }
  const int found = (int)(largest >> 23);
  const int exponent = found > LEAST_EXPONENT ? found : LEAST_EXPONENT;
  const float up = as_float((uint32_t)(127 + 127 + 11 - exponent) << 23);
  const long at = line_of(to, row, block) + 4 * lane;
  int small = 0;
  UNROLL
  for (int half = 0; half < 2; half++) {
    float whole[4];
    UNROLL
    for (int i = 0; i < 4; i++) {
      whole[i] = integer_of(v[half][i] * up);
      small += abs32(whole[i] - WHOLE) < SMALL && v[half][i] != 0.0f;
    }
    put_bytes(whole, (uint32_t *)(to->lines + at + half * HALF_BYTES));
    if (!to->rest) continue;
    UNROLL
    for (int i = 0; i < 4; i++) whole[i] = fma32(v[half][i] * up - (whole[i] - WHOLE), 0x1p11f, WHOLE);
    put_bytes(whole, (uint32_t *)(to->rest + at + half * HALF_BYTES));
  }
  const int mostly_small = asked && 2 * sum_of_lanes(small) > terms;
  if (lane) return;
  const float scale = as_float(exponent >= REFUSED_EXPONENT ? 0x7fc00000u : (uint32_t)(exponent - 11) << 23);
  to->scales[(long)block * to->room + row] = mostly_small ? -scale : scale;
}

// The rows of x, whose terms follow one another: 16 threads have a block of a row
KERNEL(split_rows, SplitArguments) {
  const int block = thread_block_x() % a->to.blocks;
  const int row = thread_block_x() / a->to.blocks * (GPU_THREADS / LANES) + thread_index() / LANES;
  const int begin = block * BLOCK;
  const int terms = least(BLOCK, a->terms - begin);
  const int own = row < a->to.rows ? terms : 0;  // a row that fills up a tile is zeros
  const float *x = a->x + row * a->ld + begin;
  const int at_once = own == BLOCK && ((uint64_t)a->x | (uint64_t)(4 * a->ld)) % 16 == 0;
  float v[2][4];
  UNROLL
  for (int half = 0; half < 2; half++) {
    const int k = 64 * half + 4 * (thread_index() % LANES);
    if (at_once) {
      const Float4 four = load4(x + k);
      v[half][0] = four.x;
      v[half][1] = four.y;
      v[half][2] = four.z;
      v[half][3] = four.w;
      continue;
    }
    UNROLL
    for (int i = 0; i < 4; i++) v[half][i] = k + i < own ? x[k + i] : 0.0f;
  }
  split_block(v, terms, &a->to, row, block, a->asked);
}

// The columns of x [terms][ld]: a thread block has one block of 32 of them. In shared memory they are
// rotated, so that neither rows nor columns meet a bank twice.
KERNEL(split_columns, SplitArguments) {
  const int block = thread_block_x() % a->to.blocks;
  const int column = thread_block_x() / a->to.blocks * 32;
  const int begin = a->start ? a->start[block] : block * BLOCK;
  const int terms = a->start ? a->length[block] : least(BLOCK, a->terms - begin);
  const int lane = thread_index() % 32;
  UNROLL
  for (int i = 0; i < BLOCK; i += GPU_THREADS / 32) {
    const int t = i + thread_index() / 32;
    const int exists = t < terms && column + lane < a->to.rows;
    shared_memory[32 * t + (lane + t / 4) % 32] = exists ? a->x[(begin + t) * a->ld + column + lane] : 0.0f;
  }
  barrier();
  const int l = thread_index() % LANES;
  UNROLL
  for (int c = 0; c < 32; c += 16) {
    // the two columns of a warp are 16 apart
    const int own = thread_index() / 32 + thread_index() / LANES % 2 * 16 + c / 2;
    float v[2][4];
    UNROLL
    for (int half = 0; half < 2; half++)
      UNROLL
      for (int i = 0; i < 4; i++) {
        const int t = 64 * half + 4 * l + i;
        v[half][i] = shared_memory[32 * t + (own + t / 4) % 32];
      }
    split_block(v, terms, &a->to, column + own, block, a->asked);
  }
}

// ----------------------------------------------------------------------------------------------------- tiles

// The tile of y from row m0 and column n0 on
typedef struct {
  const SplitMatrix *x;
  const SplitMatrix *w;
  int m0;
  int n0;
} IntegerTile;

// The stage that is computed next, the block after the last, and where the thread's chunk of the half that is
// fetched next is in its first rows of x and w
typedef struct {
  int stage;
  int after;
  const signed char *x;
  const signed char *w;
} Halves;

// A thread in its warp, and where the warp's elements begin in a tile
typedef struct {
  int lane;
  int row;
  int column;
} InWarp;

INLINE InWarp in_warp(int thread, const IntegerForm f) {
  return (InWarp){thread % 32, thread / 32 / f.across * 16 * f.high, thread / 32 % f.across * 8 * f.wide};
}

// The lines of one half of `count` rows, from the thread's chunk on: 8 threads have a line
INLINE void fetch_lines(const signed char *from, const int count, SHARED float *to) {
  const int row = thread_index() / 8;
  to += row * LINE_FLOATS + 4 * (thread_index() % 8 ^ row % 8);
  if (count < GPU_THREADS / 8 && row >= count) return;
  UNROLL
  for (int i = 0; i < count; i += GPU_THREADS / 8)
    copy16(to + i * LINE_FLOATS, (const float *)(from + i * LINE_BYTES), 16);
}

INLINE const signed char *own_chunk(const SplitMatrix *o, int first, int block) {
  return o->lines + line_of(o, first + thread_index() / 8, block) + 16 * (thread_index() % 8);
}

INLINE void fetch_scales(const SplitMatrix *o, int first, const int count, int block, SHARED float *to) {
  const int row = 4 * thread_index();  // 16 bytes are four scales
  if (row < count) copy16(to + row, o->scales + (long)block * o->room + first + row, 16);
}

// Half number `half` from the beginning of `block` on, which is the next one, into a stage
INLINE void fetch_half(const IntegerTile *t, Halves *h, int block, const int half, int stage,
                       const IntegerForm f) {
  const int rows = form_rows(f);
  const int columns = form_columns(f);
  SHARED float *to = shared_memory + stage * integer_stage_floats(f);
  block += half / 2;
  if (block < h->after) {
    fetch_lines(h->x, rows, to);
    fetch_lines(h->w, columns, to + rows * LINE_FLOATS);
    h->x += HALF_BYTES;
    h->w += HALF_BYTES;
    if (half % 2) {
      SHARED float *scales = to + (rows + columns) * LINE_FLOATS;
      fetch_scales(t->x, t->m0, rows, block, scales);
      fetch_scales(t->w, t->n0, columns, block, scales + rows);
    }
  }
  commit_copies();
}

// Blocks [first, after) of the tile
INLINE Halves begin_integer_tile(const IntegerTile *t, int first, int after, const IntegerForm f) {
  Halves h = {.after = after, .x = own_chunk(t->x, t->m0, first), .w = own_chunk(t->w, t->n0, first)};
  UNROLL
  for (int half = 0; half < INTEGER_STAGES - 1; half++) fetch_half(t, &h, first, half, half, f);
  return h;
}

// One of three steps of 32 terms: products with no H, then with one, then with two; if `falls`, two first
INLINE void add_products(int step, const int falls, const uint32_t xh[4], const uint32_t xl[4],
                         const uint32_t wh[2], const uint32_t wl[2], uint32_t sums[4]) {
  if (step)
    UNROLL
    for (int c = 0; c < 4; c++) sums[c] *= falls ? RADIX : INVERSE;
  const int highs = falls ? 2 - step : step;
  if (highs == 0) multiply_bytes(sums, xl, wl);
  if (highs == 1) multiply_bytes(sums, xh, wl);
  if (highs == 1) multiply_bytes(sums, xl, wh);
  if (highs == 2) multiply_bytes(sums, xh, wh);
}

// The products of 32 terms, from chunk 2 k of the lines of the stage at float `at` of shared memory
INLINE void multiply_terms(int at, int k, const IntegerForm f, uint32_t sums[][4]) {
  const InWarp in = in_warp(thread_index(), f);
  const int w_row = form_rows(f) + in.column + in.lane % 8 + in.lane / 16 * 8;
  const int x_line = at + (in.row + in.lane % 16) * LINE_FLOATS + 4 * (in.lane / 16 ^ in.lane % 8);
  const int w_line = at + w_row * LINE_FLOATS + 4 * (in.lane / 8 % 2 ^ in.lane % 8);
  uint32_t x[2][4][4];  // H, L
  UNROLL
  for (int part = 0; part < 2; part++)
    UNROLL
    for (int i = 0; i < f.high; i++)
      load_matrices(shared_memory + (x_line ^ 4 * (4 * part + 2 * k)) + 16 * i * LINE_FLOATS, x[part][i]);
  UNROLL
  for (int j = 0; j < f.wide; j += 2) {  // the columns of two
    uint32_t w[2][4];
    UNROLL
    for (int part = 0; part < 2; part++)
      load_matrices(shared_memory + (w_line ^ 4 * (4 * part + 2 * k)) + 8 * j * LINE_FLOATS, w[part]);
    UNROLL
    for (int step = 0; step < 3; step++)
      UNROLL
      for (int i = 0; i < f.high; i++)
        UNROLL
        for (int c = 0; c < 2; c++)
          add_products(step, k % 2, x[0][i], x[1][i], w[0] + 2 * c, w[1] + 2 * c, sums[i * f.wide + j + c]);
  }
}

// The products of a block, from the thread's bytes of the first row and the column in global memory
INLINE void multiply_lines(const signed char *x_line, const signed char *w_line, uint32_t sums[4]) {
  _Pragma("nounroll")  // registers
  for (int half = 0; half < 2; half++) {
    UNROLL
    for (int k = 0; k < 2; k++) {  // of 32 terms each
      uint32_t x[2][4];
      uint32_t w[2][2];
      UNROLL
      for (int part = 0; part < 2; part++) {  // H, L
        UNROLL
        for (int i = 0; i < 4; i++)
          x[part][i] = *(const uint32_t *)(x_line + i % 2 * 8 * LINE_BYTES + 64 * part + 32 * k + i / 2 * 16);
        UNROLL
        for (int i = 0; i < 2; i++) w[part][i] = *(const uint32_t *)(w_line + 64 * part + 32 * k + 16 * i);
      }
      UNROLL
      for (int step = 0; step < 3; step++) add_products(step, k, x[0], x[1], w[0], w[1], sums);
    }
    x_line += HALF_BYTES;
    w_line += HALF_BYTES;
  }
}

// y += block, for the thread's elements, where a block of the warp's rows or columns is mostly small
INLINE void add_with_remainders(const IntegerTile *t, int block, const IntegerForm f, const float of_x[],
                                const float of_w[], uint32_t sums[][4], float y[][4]) {
  const InWarp in = in_warp(not_ahead(thread_index()), f);
  const long x_at = line_of(t->x, t->m0 + in.row + in.lane / 4, block) + in.lane % 4 * 4;
  const long w_at = line_of(t->w, t->n0 + in.column + in.lane / 4, block) + in.lane % 4 * 4;
  UNROLL
  for (int q = 0; q < f.high * f.wide; q++) {
    const long x_line = x_at + q / f.wide * 16 * LINE_BYTES;
    const long w_line = w_at + q % f.wide * 8 * LINE_BYTES;
    uint32_t rest[4] = {0};
    multiply_lines(t->x->lines + x_line, t->w->rest + w_line, rest);
    multiply_lines(t->x->rest + x_line, t->w->lines + w_line, rest);
    UNROLL
    for (int c = 0; c < 4; c++) {
      const float x_scale = of_x[q / f.wide * 2 + c / 2];
      const float w_scale = of_w[q % f.wide * 2 + c % 2];
      const float scale = abs32(x_scale * w_scale);
      float sum = (float)(int)sums[q][c] * scale;
      if ((as_bits(x_scale) | as_bits(w_scale)) >> 31) sum = sum + (float)(int)rest[c] * (scale * 0x1p-11f);
      y[q][c] = y[q][c] + sum;
    }
  }
}

// y += block, for the thread's elements: four i wide + j has rows m + 16 i and columns n + 8 j, see corner_of
INLINE void add_integer_block(const IntegerTile *t, Halves *h, int block, const IntegerForm f,
                              const int is_product, float y[][4]) {
  const int rows = form_rows(f);
  uint32_t sums[MOST_FOURS][4];
  UNROLL
  for (int q = 0; q < f.high * f.wide; q++)
    UNROLL
    for (int c = 0; c < 4; c++) sums[q][c] = 0;
  int at = 0;  // of the stage
  UNROLL
  for (int half = 0; half < 2; half++) {
    wait_copies(INTEGER_STAGES - 2);
    // all threads see this half, and none reads the one before it, whose place the next one takes
    barrier();
    fetch_half(t, h, block, half + INTEGER_STAGES - 1, h->stage ? h->stage - 1 : INTEGER_STAGES - 1, f);
    at = h->stage * integer_stage_floats(f);
    h->stage = h->stage + 1 == INTEGER_STAGES ? 0 : h->stage + 1;
    UNROLL
    for (int k = 0; k < 2; k++) multiply_terms(at, k, f, sums);
  }
  const InWarp in = in_warp(not_ahead(thread_index()), f);
  SHARED const float *scales = shared_memory + at + (rows + form_columns(f)) * LINE_FLOATS;
  float of_x[2 * MOST_FOURS];  // the scales of the thread's rows, and columns; below 0 if mostly small
  float of_w[2 * MOST_FOURS];
  uint32_t signs = 0;
  UNROLL
  for (int i = 0; i < 2 * f.high; i++) {
    of_x[i] = scales[in.row + in.lane / 4 + 8 * i];
    signs |= as_bits(of_x[i]);
  }
  UNROLL
  for (int j = 0; j < 2 * f.wide; j++) {
    of_w[j] = scales[rows + in.column + in.lane % 4 * 2 + j / 2 * 8 + j % 2];
    signs |= as_bits(of_w[j]);
  }
  if (is_product && any_of_warp(signs >> 31)) {
    add_with_remainders(t, block, f, of_x, of_w, sums, y);
    return;
  }
  UNROLL
  for (int q = 0; q < f.high * f.wide; q++)
    UNROLL
    for (int c = 0; c < 4; c++) {
      const float scaled = (float)(int)sums[q][c] * of_x[q / f.wide * 2 + c / 2];
      y[q][c] = fma32(scaled, of_w[q % f.wide * 2 + c % 2], y[q][c]);  // of an exact product: a sum
    }
}

// -------------------------------------------------------------------------------------------------- products

// Where a thread's elements begin
INLINE Corner integer_corner(const IntegerTile *t, const IntegerForm f) {
  const InWarp in = in_warp(not_ahead(thread_index()), f);
  return (Corner){t->m0 + in.row + in.lane / 4, t->n0 + in.column + in.lane % 4 * 2};
}

INLINE void zero_fours(float y[][4], const int fours) {
  UNROLL
  for (int q = 0; q < fours; q++)
    UNROLL
    for (int c = 0; c < 4; c++) y[q][c] = 0.0f;
}

#define EACH_INTEGER_ELEMENT(corner, f, rows, cols, ...)          \
  UNROLL                                                          \
  for (int q = 0; q < (f).high * (f).wide; q++)                   \
    UNROLL                                                        \
    for (int c = 0; c < 4; c++) {                                 \
      const int m = (corner).row + q / (f).wide * 16 + c / 2 * 8; \
      const int n = (corner).column + q % (f).wide * 8 + c % 2;   \
      if (m < (rows) && n < (cols)) {                             \
        __VA_ARGS__                                               \
      }                                                           \
    }

// As `product` in products.c
INLINE void integer_product(const IntegerProduct *a, const IntegerForm f) {
  const ProductArguments *p = &a->product;
  const int tiles_down = tiles_of(p->rows, form_rows(f));
  const int m0 = thread_block_x() % tiles_down * form_rows(f);
  const int n0 = thread_block_x() / tiles_down * form_columns(f);
  const IntegerTile t = {&a->x, &a->w, m0, n0};
  const int first = p->partial ? thread_block_y() * p->each : 0;
  const int after = p->partial ? least(a->x.blocks, first + p->each) : a->x.blocks;
  Halves h = begin_integer_tile(&t, first, after, f);
  float y[MOST_FOURS][4];
  zero_fours(y, f.high * f.wide);
  for (int block = first; block < after; block++) {
    add_integer_block(&t, &h, block, f, 1, y);
    if (!p->partial) continue;
    const Corner corner = integer_corner(&t, f);
    float *partial = p->partial + (long)block * p->rows * p->cols;
    EACH_INTEGER_ELEMENT(corner, f, p->rows, p->cols, partial[(long)m * p->cols + n] = y[q][c];)
    zero_fours(y, f.high * f.wide);
  }
  end_tile();
  const Corner corner = integer_corner(&t, f);
  if (!p->partial) EACH_INTEGER_ELEMENT(corner, f, p->rows, p->cols, put_result(p, m, n, y[q][c]);)
}

KERNEL(integer_product_tall, IntegerProduct) { integer_product(a, TALL); }
KERNEL(integer_product_flat, IntegerProduct) { integer_product(a, FLAT); }

// -------------------------------------------------------------------------------------- gradients of weights

// As `weight_gradient_tiles` in gradients.c
KERNEL(integer_gradient_tiles, IntegerGradient) {
  const GradientArguments *g = &a->gradient;
  for (int index = thread_block_x();; index += thread_blocks_x()) {
    const int tiles_down = tiles_of(not_ahead(g->n), form_rows(TALL));
    const int m0 = index % tiles_down * form_rows(TALL);
    const int n0 = index / tiles_down * form_columns(TALL);
    if (n0 >= g->k) break;
    const IntegerTile t = {&a->dy, &a->x, m0, n0};
    float *parts = parts_of_thread(g, 1, not_ahead(thread_index()));
    float y[MOST_FOURS][4];
    open_sums(g, integer_corner(&t, TALL), 1, parts, y);
    Halves h = begin_integer_tile(&t, 0, g->blocks, TALL);
    for (int block = 0; block < g->blocks; block++) {
      add_integer_block(&t, &h, block, TALL, 0, y);
      close_tile_slots(y, 1, parts, g->slot[block], g->slot[block + 1]);
    }
    end_tile();
    store_sums(g, integer_corner(&t, TALL), 1, parts, y);
  }
}
