// Causal attention on a GPU (rule 4), the sums of ../attention.c. Two ways to the same bits:
//   attend_queries                             one query after the other, each with a thread block: decoding
//   attend_scores, attend_rows, attend_values  all queries of some sequences: products by tiles, and the
//                                              rows of scores in memory between them
// and attend_backward_scores, .._rows, .._queries, .._keys for their gradients.
// A query at some position sees the keys of its sequence up to that position, or the last `window` of them.
// Keys that it does not see are terms of zero, which change no sum (rule 1).
#include "../elementary.h"
#include "../lanes.h"
#include "../shapes.h"
#include "arguments.h"

// The first block of positions in which a query sees a key
INLINE int first_block(int window, int position) { return first_seen(window, position) / BLOCK; }

// 16 lanes: scores s[begin .. end), after the soft cap, become exp(s - top), 0 outside [from, to); `begin` is
// a multiple of 16, so that lanes go by position. Writes the largest score and, by rule 3, the sum.
// definition: attention.attend
INLINE void exponentiate_scores(float *s, int begin, int from, int to, int end, float cap, float *top,
                                float *total) {
  LANE_VALUES(float, tops, -INFINITE);
  IN_LANES(i, end - begin, {
    const int j = begin + i;
    if (cap && j >= from && j < to) s[j] = soft_cap(s[j], cap);
    if (j >= from && j < to) LANE(tops) = s[j] > LANE(tops) ? s[j] : LANE(tops);
  });
  const float largest_score = largest_lane(tops);
  LANE_VALUES(double, sum, 0.0);
  IN_LANES(i, end - begin, {
    const int j = begin + i;
    s[j] = j >= from && j < to ? exp32(s[j] - largest_score) : 0.0f;
    LANE(sum) += s[j];
  });
  *top = largest_score;
  *total = (float)join_lanes(sum);
}

// -------------------------------------------------------------------------------------------------- decoding

// One query of up to `most` heads that share a key head. A smaller `most` leaves registers for more loads at
// once. Three passes, with a barrier after each:
//   1 scores   a thread has some keys; a score is a chain over the elements, in blocks of 128
//   2 rows     16 lanes have a head
//   3 values   a thread has some elements of the output, each in one block of 128 positions
// and the blocks are added in order. Shared memory: attend_queries_floats in arguments.h.
INLINE void attend_queries(const AttendArguments *a, const int most) {
  const int each = a->heads / a->kv_heads;
  const int parts = (each + most - 1) / most;
  const int part = thread_block_x() % parts;
  const int kv = thread_block_x() / parts % a->kv_heads;
  const int token = thread_block_x() / parts / a->kv_heads;
  const int heads = least(most, each - part * most);
  const long first_head = (long)token * a->heads + kv * each + part * most;  // in [tokens][heads]
  const int head_dim = a->head_dim;

  const int position = a->position[token];
  const int from = first_seen(a->window, position);
  const int begin = from / BLOCK * BLOCK;
  const int seen = position + 1 - begin;  // keys from `begin` on
  const int span = (int)multiple_of_16(seen);
  const int blocks = (seen + BLOCK - 1) / BLOCK;
  const long cache = ((long)kv * a->capacity + a->base[a->sequence[token]]) * head_dim;
  const float *keys = a->keys + cache;
  const float *values = a->values + cache + (long)begin * head_dim;

  SHARED float *q = shared_memory;            // [heads][head_dim]
  SHARED float *p = q + heads * head_dim;     // [heads][span]
  SHARED float *totals = p + heads * span;    // [heads]
  SHARED float *mixed = totals + heads;       // [blocks][heads][head_dim]
  for (int i = thread_index(); i < heads * head_dim; i += GPU_THREADS) q[i] = a->q[first_head * head_dim + i];
  barrier();

  for (int j = thread_index(); j < span; j += GPU_THREADS) {
    const float *key = keys + key_at(begin + j, head_dim);
    float sum[QUERY_HEADS];
    float acc[QUERY_HEADS];
    UNROLL
    for (int h = 0; h < most; h++) sum[h] = 0.0f;
    for (int d0 = 0; d0 < head_dim; d0 += BLOCK) {
      UNROLL
      for (int h = 0; h < most; h++) acc[h] = 0.0f;
      UNROLL_16
      for (int d = d0; d < least(head_dim, d0 + BLOCK); d++) {
        const float x = key[d * COLS];
        UNROLL
        for (int h = 0; h < most; h++)
          if (h < heads) acc[h] = fma32(q[h * head_dim + d], x, acc[h]);
      }
      UNROLL
      for (int h = 0; h < most; h++) sum[h] = sum[h] + acc[h];
    }
    UNROLL
    for (int h = 0; h < most; h++)
      if (h < heads) p[h * span + j] = sum[h] * a->scale;
  }
  barrier();

  const int own_head = thread_index() / LANES;
  if (own_head < heads) {
    float top;
    float total;
    float *own = (float *)(p + own_head * span);
    exponentiate_scores(own, 0, from - begin, seen, span, a->score_cap, &top, &total);
    if (lane_index() == 0) {
      totals[own_head] = total;
      a->top[first_head + own_head] = top;
      a->total[first_head + own_head] = total;
    }
  }
  barrier();

  for (int i = thread_index(); i < blocks * head_dim; i += GPU_THREADS) {
    const int block = i / head_dim;
    const int d = i % head_dim;
    float acc[QUERY_HEADS];
    UNROLL
    for (int h = 0; h < most; h++) acc[h] = 0.0f;
    UNROLL_16
    for (int j = block * BLOCK; j < least(seen, (block + 1) * BLOCK); j++) {
      const float x = values[(long)j * head_dim + d];
      UNROLL
      for (int h = 0; h < most; h++)
        if (h < heads) acc[h] = fma32(p[h * span + j], x, acc[h]);
    }
    UNROLL
    for (int h = 0; h < most; h++)
      if (h < heads) mixed[(block * heads + h) * head_dim + d] = acc[h];
  }
  barrier();

  for (int i = thread_index(); i < heads * head_dim; i += GPU_THREADS) {
    float y = 0.0f;
    for (int block = 0; block < blocks; block++) y = y + mixed[block * heads * head_dim + i];
    a->mixed[first_head * head_dim + i] = y / totals[i / head_dim];
  }
}

KERNEL(attend_queries_2, AttendArguments) { attend_queries(a, 2); }
KERNEL(attend_queries_8, AttendArguments) { attend_queries(a, QUERY_HEADS); }

// ------------------------------------------------------------------------------------------- whole sequences

// Work of a thread block: one head of one sequence of the launch
typedef struct {
  int head;
  int kv;
  int first;    // row of the batch
  int count;    // queries
  int past;     // position of the first query
  long row;     // of `first` and `head` in [tokens][heads]
  long cache;   // offset of the keys, and of the values
  long scores;  // offset of the scores [most][ld] of this head
} HeadOf;

// Head `index` of the `heads` that the launch has
INLINE HeadOf head_of(const SequenceArguments *a, int index, int heads) {
  const int each = a->heads / a->kv_heads;
  const int s = a->first_sequence + thread_block_z();
  HeadOf h;
  h.head = a->first_kv * each + index;
  h.kv = h.head / each;
  h.first = a->start[s];
  h.count = a->start[s + 1] - h.first;
  h.past = h.count ? a->position[h.first] : 0;
  h.row = (long)h.first * a->heads + h.head;
  h.cache = ((long)h.kv * a->capacity + a->base[s]) * a->head_dim;
  h.scores = ((long)thread_block_z() * heads + index) * a->most * a->ld;
  return h;
}

// The keys that a tile of queries from m0 on reads: those of the blocks from the first one that its first
// query sees, up to the last one that its last query may see
INLINE int tile_begin(const SequenceArguments *a, const HeadOf *h, int m0) {
  return first_block(a->window, h->past + m0) * BLOCK;
}
INLINE int tile_end(const HeadOf *h, int m0) { return h->past + least(h->count, m0 + TILE); }

// The row and column of this thread block's tile of a result with `rows` rows
INLINE int tile_row(int rows) { return thread_block_x() % tiles_of(rows, TILE) * TILE; }
INLINE int tile_column(int rows) { return thread_block_x() / tiles_of(rows, TILE) * TILE; }

// Rows of queries of one head, in an array [tokens][heads][head_dim]
INLINE Operand queries_by_terms(const SequenceArguments *a, const HeadOf *h, const float *of) {
  return matrix_by_terms(of + h->row * a->head_dim, (long)a->heads * a->head_dim, h->count);
}
INLINE Operand queries_by_rows(const SequenceArguments *a, const HeadOf *h, const float *of) {
  return matrix_by_rows(of + h->row * a->head_dim, (long)a->heads * a->head_dim, a->head_dim);
}

// Keys lie in panels [position / 16][head_dim][16]. For scores a key is a row, whose terms are its elements;
// for gradients of queries an element is a row, whose terms are positions.
INLINE Operand keys_by_rows(const SequenceArguments *a, const HeadOf *h) {
  return (Operand){
      .at = a->keys + h->cache,
      .rows = (int)multiple_of_16(h->past + h->count),
      .row_step = (long)a->head_dim * COLS,
      .term_step = COLS,
  };
}
INLINE Operand keys_by_terms(const SequenceArguments *a, const HeadOf *h) {
  return (Operand){.at = a->keys + h->cache, .rows = a->head_dim, .row_step = COLS, .term_step = a->head_dim};
}

// One tile of scores, times the scale. `x_by_terms` rows are queries, columns are keys.
INLINE void put_scores(const SequenceArguments *a, const HeadOf *h, Operand x, Operand w, const TileForm f,
                       float scale, float *scores) {
  const int m0 = tile_row(a->most);
  const int n0 = tile_column(a->most);
  if (m0 >= h->count || n0 >= tile_end(h, m0) || n0 < tile_begin(a, h, m0)) return;
  Tile t = tile_at(x, w, m0, n0, a->head_dim, f);
  float y[MOST_HIGH][8];
  sum_blocks(&t, 0, f, y);
  EACH_OWN(f) {
    int m = own_m(&t, i, f);
    int n = own_n(&t, j);
    if (m < h->count && n < a->ld) scores[h->scores + (long)m * a->ld + n] = y[i][j] * scale;
  }
}

KERNEL(attend_scores, SequenceArguments) {
  const HeadOf h = head_of(a, thread_block_y(), thread_blocks_y());
  const TileForm f = {.high = 8, .x_by_terms = 1};
  put_scores(a, &h, queries_by_terms(a, &h, a->q), keys_by_rows(a, &h), f, a->scale, a->p);
}

// 16 lanes have a query: its row of scores becomes exponentials.
KERNEL(attend_rows, SequenceArguments) {
  const HeadOf h = head_of(a, thread_block_y(), thread_blocks_y());
  const int m = thread_block_x() * (GPU_THREADS / LANES) + thread_index() / LANES;
  if (m >= h.count) return;
  const int m0 = m / TILE * TILE;
  const int position = h.past + m;
  float top;
  float total;
  exponentiate_scores(a->p + h.scores + (long)m * a->ld, tile_begin(a, &h, m0),
                      first_seen(a->window, position), position + 1, tile_end(&h, m0), a->score_cap, &top,
                      &total);
  ONE_LANE {
    a->top[h.row + (long)m * a->heads] = top;
    a->total[h.row + (long)m * a->heads] = total;
  }
}

// One tile [queries][elements] of x w, where the rows of x [queries][ld] are numbers of keys
INLINE void sum_over_keys(const SequenceArguments *a, const HeadOf *h, const float *x, Operand w,
                          const TileForm f, Tile *t, float y[MOST_HIGH][8]) {
  const int m0 = tile_row(a->most);
  Operand rows = matrix_by_terms(x + h->scores, a->ld, h->count);
  *t = tile_at(rows, w, m0, tile_column(a->most), tile_end(h, m0), f);
  sum_blocks(t, tile_begin(a, h, m0) / BLOCK, f, y);
}

KERNEL(attend_values, SequenceArguments) {
  const HeadOf h = head_of(a, thread_block_y(), thread_blocks_y());
  if (tile_row(a->most) >= h.count) return;
  const TileForm f = {.high = 8, .x_by_terms = 1};
  Operand values = matrix_by_rows(a->values + h.cache, a->head_dim, a->head_dim);
  Tile t;
  float y[MOST_HIGH][8];
  sum_over_keys(a, &h, a->p, values, f, &t, y);
  EACH_OWN(f) {
    int m = own_m(&t, i, f);
    int d = own_n(&t, j);
    long row = h.row + (long)m * a->heads;
    if (m < h.count && d < a->head_dim) a->mixed[row * a->head_dim + d] = y[i][j] / a->total[row];
  }
}

// -------------------------------------------------------------------------------------------------- backward

// Scores again, and d_mixed . value, which becomes ds
KERNEL(attend_backward_scores, SequenceArguments) {
  const HeadOf h = head_of(a, thread_block_y() / 2, thread_blocks_y() / 2);
  if (thread_block_y() % 2 == 0) {
    const TileForm f = {.high = 8, .x_by_terms = 1};
    put_scores(a, &h, queries_by_terms(a, &h, a->q), keys_by_rows(a, &h), f, a->scale, a->p);
  } else {
    const TileForm f = {.high = 8, .x_by_terms = 1, .w_by_terms = 1};
    Operand values = matrix_by_terms(a->values + h.cache, a->head_dim, h.count);
    put_scores(a, &h, queries_by_terms(a, &h, a->d_mixed), values, f, 1.0f, a->ds);
  }
}

// 16 lanes have a query: p = exp(score - top) (1 / total), ds = p (d_mixed . value - delta), times the slope
// of the soft cap, 0 where it sees no key; delta = row sum of mixed d_mixed. definition:
// attention.attend_backward
KERNEL(attend_backward_rows, SequenceArguments) {
  const HeadOf h = head_of(a, thread_block_y(), thread_blocks_y());
  const int m = thread_block_x() * (GPU_THREADS / LANES) + thread_index() / LANES;
  if (m >= h.count) return;
  const int m0 = m / TILE * TILE;
  const int begin = tile_begin(a, &h, m0);
  const int from = first_seen(a->window, m);
  const long row = h.row + (long)m * a->heads;
  const float top = a->top[row];
  const float inverse = 1.0f / a->total[row];
  const float *mixed = a->mixed + row * a->head_dim;
  const float *d_mixed = a->d_mixed + row * a->head_dim;
  const float delta = (float)dot_rows(mixed, d_mixed, a->head_dim);
  float *p = a->p + h.scores + (long)m * a->ld;
  float *ds = a->ds + h.scores + (long)m * a->ld;
  EACH(i, least(a->ld, m0 + TILE) - begin) {
    const int j = begin + i;
    const int seen = j >= from && j <= m;
    const float score = a->score_cap ? soft_cap(p[j], a->score_cap) : p[j];
    p[j] = seen ? exp32(score - top) * inverse : 0.0f;
    ds[j] = seen ? p[j] * (ds[j] - delta) : 0.0f;
    if (a->score_cap && seen) ds[j] = ds[j] * soft_cap_slope(score, a->score_cap);
  }
}

// dq = scale (sum of ds key)
KERNEL(attend_backward_queries, SequenceArguments) {
  const HeadOf h = head_of(a, thread_block_y(), thread_blocks_y());
  if (tile_row(a->most) >= h.count) return;
  const TileForm f = {.high = 8, .x_by_terms = 1, .w_by_terms = 1};
  Tile t;
  float y[MOST_HIGH][8];
  sum_over_keys(a, &h, a->ds, keys_by_terms(a, &h), f, &t, y);
  EACH_OWN(f) {
    int m = own_m(&t, i, f);
    int d = own_n(&t, j);
    if (m < h.count && d < a->head_dim)
      a->dq[(h.row + (long)m * a->heads) * a->head_dim + d] = y[i][j] * a->scale;
  }
}

// The block after the last block of queries that sees a key of the tile from n0 on
INLINE int query_blocks_end(const SequenceArguments *a, const HeadOf *h, int n0) {
  int after = tiles_of(h->count, BLOCK);
  while (after > 0 && first_block(a->window, (after - 1) * BLOCK) * BLOCK > n0) after--;
  return after;
}

// dk = scale (sum of ds q) and dv = sum of p d_mixed: for each head of the group in order, blocks of 128
// queries. Rows of the tile are keys, terms are queries; queries before these keys do not see them.
KERNEL(attend_backward_keys, SequenceArguments) {
  const TileForm f = {.high = 8};
  const int each = a->heads / a->kv_heads;
  const int of_values = thread_block_y() % 2;
  const int group = thread_block_y() / 2;  // of the launch
  const int heads = thread_blocks_y() / 2 * each;
  const int n0 = tile_row(a->most);
  HeadOf h = head_of(a, group * each, heads);
  if (n0 >= h.count) return;
  Tile t;
  float y[MOST_HIGH][8];
  EACH_OWN(f) y[i][j] = 0.0f;
  for (int index = group * each; index < (group + 1) * each; index++) {
    h = head_of(a, index, heads);
    Operand x = matrix_by_rows((of_values ? a->p : a->ds) + h.scores, a->ld, h.count);
    Operand w = queries_by_rows(a, &h, of_values ? a->d_mixed : a->q);
    t = tile_at(x, w, n0, tile_column(a->most), h.count, f);
    add_blocks_to(&t, n0 / BLOCK, query_blocks_end(a, &h, n0), f, y);
  }
  EACH_OWN(f) {
    int n = own_m(&t, i, f);
    int d = own_n(&t, j);
    if (n >= h.count || d >= a->head_dim) continue;
    float *row = a->d_raw + (h.first + n) * a->d_raw_row;
    if (of_values) {
      row[a->v_at + h.kv * a->v_step + d] = y[i][j];
    } else {
      row[a->k_at + h.kv * a->k_step + d] = y[i][j] * a->scale;
    }
  }
}
