// Tiles on a GPU: small products whose sums stay in registers. Products, gradients of weights and attention
// of whole sequences are loops over tiles. The rule is the one of ../tiles.c: a block of 128 terms is one
// chain acc = fma(x, w, acc) from +0, and a thread adds the blocks of an element in order.
//
// A thread block of 256 threads computes `16 high` x 128 elements of y, high at most 8. A thread has high x 8
// of them. It keeps in registers the chains of one block, and the sums of the blocks before it.
//
// The operands x and w come in stages of 16 terms by asynchronous copies. While a stage is computed, the next
// stages are copied. In global memory the operands have several layouts, but a stage always is [16
// terms][rows + GAP], so that a thread reads 4 rows of a term at once.
#include "arguments.h"
#include "machine.h"

enum { MOST_HIGH = 8 };  // rows of a tile / 16

// Constants of a kernel when it is compiled
typedef struct {
  int high;        // rows of a tile / 16
  int x_by_terms;  // whether the terms of a row of x follow one another in memory; else its rows do
  int w_by_terms;
} TileForm;

// -------------------------------------------------------------------------------------------------- operands

// Rows of terms in global memory. Element (row, term) is at
//   at + row * row_step + term / 16 * 16 * term_step + term % 16   by terms
//   at + row / 16 * row_step + row % 16 + term * term_step         by rows
// So a matrix has term_step 1 by terms and row_step 16 by rows; panels of 16 (keys in the cache) have others.
typedef struct {
  const float *at;
  int rows;
  long row_step;
  long term_step;
} Operand;

// A matrix [rows][terms], whose rows are `ld` floats apart
INLINE Operand matrix_by_terms(const float *at, long ld, int rows) {
  return (Operand){.at = at, .rows = rows, .row_step = ld, .term_step = 1};
}

// A matrix [terms][rows], whose terms are `ld` floats apart
INLINE Operand matrix_by_rows(const float *at, long ld, int rows) {
  return (Operand){.at = at, .rows = rows, .row_step = 16, .term_step = ld};
}

// ---------------------------------------------------------------------------------------------------- stages

// The numbers that a thread copies of each stage of an operand.
//   by terms  every 32nd row from `row` on, and of each one the terms `term` and `term` + 8, one by one. A
//             warp reads 8 terms of 4 rows, and writes them to 32 banks.
//   by rows   4 rows from `row` on of every term_copies-th term from `term` on, at once where they begin at a
//             multiple of 16 bytes
typedef struct {
  const float *from;  // (row, term)
  int row;
  int term;
  int left;           // rows that exist from `row` on
  long row_step;
  long term_step;
  int aligned;
} Fetch;

// Rows [first, first + height) of an operand
INLINE Fetch fetch_of(Operand o, int first, const int by_terms, const int height) {
  const int thread = thread_index();
  Fetch f = {.row_step = o.row_step, .term_step = o.term_step};
  f.row = by_terms ? thread / 8 : thread % (height / 4) * 4;
  f.term = by_terms ? thread % 8 : thread / (height / 4);
  const long row = first + f.row;
  long at = row * o.row_step + f.term;
  if (!by_terms) at = row / 16 * o.row_step + row % 16 + f.term * o.term_step;
  const uint64_t bytes = (uint64_t)o.at | (uint64_t)(4 * o.row_step) | (uint64_t)(4 * o.term_step);
  f.from = o.at + at;
  f.left = o.rows - (int)row;
  f.aligned = bytes % 16 == 0;
  return f;
}

// Starts the copies of the stage of terms [term, term + 16), of which those from `end` on are zeros, as are
// rows that do not exist
INLINE void fetch_by_terms(const Fetch *f, int term, int end, SHARED float *to, const int height) {
  const float *from = f->from + term * f->term_step;
  const int first_bytes = term + f->term < end ? 4 : 0;
  const int second_bytes = term + f->term + 8 < end ? 4 : 0;
  to += f->term * (height + GAP) + f->row;
  UNROLL
  for (int row = 0; row < height; row += 32) {
    if (height < 32 && f->row >= height) continue;
    const int exists = row < f->left;
    copy4(to + row, from, exists ? first_bytes : 0);
    copy4(to + row + 8 * (height + GAP), from + 8, exists ? second_bytes : 0);
    from += 32 * f->row_step;
  }
}

INLINE void fetch_by_rows(const Fetch *f, int term, int end, SHARED float *to, const int height) {
  const int term_copies = GPU_THREADS / (height / 4);
  const int rows = f->left < 0 ? 0 : least(f->left, 4);
  UNROLL
  for (int t = 0; t < TERMS; t += term_copies) {
    if (term_copies > TERMS && f->term >= TERMS) continue;
    const int floats = term + t + f->term < end ? rows : 0;
    const float *from = f->from + (term + t) * f->term_step;
    SHARED float *place = to + (t + f->term) * (height + GAP) + f->row;
    if (f->aligned) {
      copy16(place, from, 4 * floats);
    } else {
      UNROLL
      for (int i = 0; i < 4; i++) copy4(place + i, from + i, i < floats ? 4 : 0);
    }
  }
}

INLINE void fetch(const Fetch *f, int term, int end, SHARED float *to, const int by_terms, const int height) {
  if (by_terms) {
    fetch_by_terms(f, term, end, to, height);
  } else {
    fetch_by_rows(f, term, end, to, height);
  }
}

// ----------------------------------------------------------------------------------------------------- tiles

// Which row of a tile is the i-th of a thread's `count`; `place` is 0 to 15
INLINE int own_row(const int count, int place, int i) {
  return count < 4 ? count * place + i : 4 * place + i % 4 + 64 * (i / 4);
}

// A thread's `count` rows of one term, from a stage to registers
INLINE void fragment(SHARED const float *term, int place, const int count, float out[8]) {
  if (count < 4) {
    UNROLL
    for (int i = 0; i < count; i++) out[i] = term[own_row(count, place, i)];
    return;
  }
  UNROLL
  for (int i = 0; i < count; i += 4) {
    Float4 rows = shared4(term + own_row(count, place, i));
    out[i] = rows.x;
    out[i + 1] = rows.y;
    out[i + 2] = rows.z;
    out[i + 3] = rows.w;
  }
}

// The tile of y from row m0 and column n0 on, as one thread sees it
typedef struct {
  int m0;
  int n0;
  int place_x;  // 0 to 15: which rows of x, and of y, are the thread's
  int place_w;  // 0 to 15: which columns
  int terms;    // of the whole product
  int blocks;   // of terms
  const int *start;   // [blocks], the first term of a block; NULL: blocks have 128 terms each
  const int *length;  // [blocks]
  Fetch x;
  Fetch w;
} Tile;

INLINE int tiles_of(int n, int size) { return (n + size - 1) / size; }

INLINE Tile tile_at(Operand x, Operand w, int m0, int n0, int terms, const TileForm f) {
  const int warp = thread_index() / 32;
  const int in_warp = thread_index() % 32;
  return (Tile){
      .m0 = m0,
      .n0 = n0,
      .place_x = in_warp / 2 % 8 + 8 * (warp % 2),
      .place_w = in_warp / 16 * 2 + in_warp % 2 + 4 * (warp / 2),
      .terms = terms,
      .blocks = tiles_of(terms, BLOCK),
      .x = fetch_of(x, m0, f.x_by_terms, 16 * f.high),
      .w = fetch_of(w, n0, f.w_by_terms, TILE),
  };
}

// The elements of a thread: i of `high` rows and j of 8 columns; element (i, j) is y[own_m][own_n]
#define EACH_OWN(f)                  \
  UNROLL                             \
  for (int i = 0; i < (f).high; i++) \
    UNROLL                           \
    for (int j = 0; j < 8; j++)
INLINE int own_m(const Tile *t, int i, const TileForm f) { return t->m0 + own_row(f.high, t->place_x, i); }
INLINE int own_n(const Tile *t, int j) { return t->n0 + own_row(8, t->place_w, j); }

// The terms [begin, end) of a block
typedef struct {
  int begin;
  int end;
} Span;

INLINE Span span_of(const Tile *t, int block) {
  if (t->start) return (Span){t->start[block], t->start[block] + t->length[block]};
  return (Span){block * BLOCK, least(t->terms, (block + 1) * BLOCK)};
}

// Which stage is fetched next (its block and first term), and which one is computed next
typedef struct {
  int block;
  int term;
  int end;    // of the block's terms
  int after;  // the block after the last one
  int stage;
} Pipeline;

// Starts the copies of the next stage, into place `stage`. A group of copies ends here even where there is no
// stage left, so that the number of groups always tells which stages are here.
INLINE void fetch_stage(const Tile *t, Pipeline *p, int stage, const TileForm f) {
  SHARED float *x = shared_memory + stage * stage_floats(f.high);
  SHARED float *w = x + TERMS * (16 * f.high + GAP);
  if (p->block < p->after) {
    fetch(&t->x, p->term, p->end, x, f.x_by_terms, 16 * f.high);
    fetch(&t->w, p->term, p->end, w, f.w_by_terms, TILE);
    p->term += TERMS;
    if (p->term >= p->end && ++p->block < p->after) {
      Span span = span_of(t, p->block);
      p->term = span.begin;
      p->end = span.end;
    }
  }
  commit_copies();
}

// Blocks [first, after) of the tile
INLINE Pipeline begin_tile(const Tile *t, int first, int after, const TileForm f) {
  Pipeline p = {.block = first, .after = after};
  if (first < after) {
    Span span = span_of(t, first);
    p.term = span.begin;
    p.end = span.end;
  }
  for (int stage = 0; stage < STAGES - 1; stage++) fetch_stage(t, &p, stage, f);
  return p;
}

INLINE void end_tile(void) {
  wait_copies(0);
  barrier();  // now another tile may use the stages
}

// One block: acc[i][j] = chain over its terms, by rising term
INLINE void chain(const Tile *t, Pipeline *p, int block, const TileForm f, float acc[MOST_HIGH][8]) {
  Span span = span_of(t, block);
  EACH_OWN(f) acc[i][j] = 0.0f;
  for (int term = span.begin; term < span.end; term += TERMS) {
    wait_copies(STAGES - 2);
    // all threads see this stage, and none reads the one before it, whose place the next one takes
    barrier();
    fetch_stage(t, p, p->stage ? p->stage - 1 : STAGES - 1, f);
    SHARED const float *x = shared_memory + p->stage * stage_floats(f.high);
    SHARED const float *w = x + TERMS * (16 * f.high + GAP);
    UNROLL
    for (int k = 0; k < TERMS; k++) {
      float x_rows[8];
      float w_rows[8];
      fragment(x + k * (16 * f.high + GAP), t->place_x, f.high, x_rows);
      fragment(w + k * (TILE + GAP), t->place_w, 8, w_rows);
      // columns go to and fro, so that two fma that follow one another have an operand in common
      UNROLL
      for (int i = 0; i < f.high; i++)
        UNROLL
        for (int step = 0; step < 8; step++) {
          const int j = i % 2 ? 7 - step : step;
          acc[i][j] = fma32(x_rows[i], w_rows[j], acc[i][j]);
        }
    }
    p->stage = p->stage + 1 == STAGES ? 0 : p->stage + 1;
  }
}

// Adds the blocks [first, after) to y, in order
INLINE void add_blocks_to(const Tile *t, int first, int after, const TileForm f, float y[MOST_HIGH][8]) {
  Pipeline p = begin_tile(t, first, after, f);
  for (int block = first; block < after; block++) {
    float acc[MOST_HIGH][8];
    chain(t, &p, block, f, acc);
    EACH_OWN(f) y[i][j] = y[i][j] + acc[i][j];
  }
  end_tile();
}

// The product from block `first` on: y = +0, then y = y + block for all blocks, in order
INLINE void sum_blocks(const Tile *t, int first, const TileForm f, float y[MOST_HIGH][8]) {
  EACH_OWN(f) y[i][j] = 0.0f;
  add_blocks_to(t, first, t->blocks, f, y);
}
