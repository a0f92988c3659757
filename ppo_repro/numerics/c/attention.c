// Causal attention over a cache of keys and values; prefill, decoding and training are the same functions.
//
// Law: a score is a chain over head_dim (products.c) times the scale; top is the largest score that a query sees;
// p = exp(score - top); total = row sum of p over key positions; out = (sum of p value in blocks of 128 key positions)
// / total. Keys that a query does not see are terms of zero.
// Backward: p = exp(score - top) (1 / total); delta = row sum of out d_out; ds = p (d_out value - delta);
// dq = scale (sum of ds key in blocks of key positions); dk = scale (sum of ds q), dv = sum of p d_out in blocks of
// query positions, the heads of a group in order.
#include "kernels.h"

typedef struct {
  const Model *m;
  const Batch *b;
  int window;
  float scale;
  float *keys, *values;         // of this layer's cache
  const float *q;               // [tokens][heads][head_dim], rotated
  float *top, *total, *mixed;   // [tokens][heads], [tokens][heads], [tokens][heads][head_dim]
  const float *d_mixed;         // backward only
  float *dq, *d_raw;            // d_raw: rows of qkv, whose key and value parts get dk and dv
} Heads;

INLINE int q_width(const Model *m) { return m->heads * m->head_dim; }
INLINE int kv_width(const Model *m) { return m->kv_heads * m->head_dim; }
INLINE int qkv_width(const Model *m) { return q_width(m) + 2 * kv_width(m); }

// Where the keys and values of a head begin for sequence s; keys lie as [position / 16][head_dim][16]
INLINE long head_at(const Heads *h, int head, int s) {
  return ((long)head * h->b->capacity + h->b->base[s]) * h->m->head_dim;
}
INLINE long key_at(int position, int width) { return (long)(position / COLS) * width * COLS + position % COLS; }

// The first position that the query at `position` sees
INLINE int first_seen(const Heads *h, int position) {
  return h->window && position >= h->window ? position - h->window + 1 : 0;
}

// y[i, j] = sum_d x[i, d] key[j, d] for the positions j in [begin, end); begin is a multiple of 16
static void scores_of(const float *x, long x_row, int rows, const float *panels, int d, int begin, int end, float *y, long ld) {
  for (int k = 0; k < d; k += BLOCK)
    panels_tile(x + k, x_row, panels + (long)begin * d + (long)k * COLS, (long)d * COLS, least(BLOCK, d - k), y + begin, ld,
                k == 0, rows, (int)round16(end - begin));
}

// y[i, d] = sum over positions j in [begin, end) of x[i, j] value[j, d]; begin is a multiple of BLOCK
static void mix_values(const float *x, long x_row, int rows, const float *values, int d, int begin, int end, float *y, long ld) {
  for (int j = begin; j < end; j += BLOCK)
    for (int c = 0; c < d; c += COLS)
      any_tile(x + j, x_row, 1, values + (long)j * d + c, d, least(BLOCK, end - j), y + c, ld, j == begin, rows, d - c);
}

// x[j] = exp(scale x[j] - top) for j in [from, to), zeros elsewhere in [begin, end); returns top and the sum
static float exponentials(float *x, int begin, int from, int to, int end, float scale, float *total) {
  for (int j = from; j < to; j++) x[j] = x[j] * scale;
  float top = largest(x + from, to - from);
  for (int j = begin; j < from; j++) x[j] = 0.0f;
  for (int j = from; j < to; j++) x[j] = exp32(x[j] - top);
  for (int j = to; j < end; j++) x[j] = 0.0f;
  *total = (float)sum_row(x + begin, to - begin);  // begin is a multiple of 16: lanes go by position
  return top;
}

// Rows [r0, r1) of (query, head of the group), all of one sequence and key head
static void attend_strip(const Heads *h, int kv, int s, int r0, int r1, float *memory) {
  const Model *m = h->m;
  int d = m->head_dim, each = m->heads / m->kv_heads, first = h->b->start[s], past = h->b->position[first];
  int rows = r1 - r0, end = past + (r1 - 1) / each + 1, begin = first_seen(h, past + r0 / each) / BLOCK * BLOCK;
  long ld = round16(end);
  float *q = memory, *mixed = q + ROWS * d, *p = mixed + ROWS * d;
  for (int i = 0; i < rows; i++)
    memcpy(q + i * d, h->q + (long)(first + (r0 + i) / each) * q_width(m) + (kv * each + (r0 + i) % each) * d, sizeof(float) * (size_t)d);
  scores_of(q, d, rows, h->keys + head_at(h, kv, s), d, begin, end, p, ld);
  for (int i = 0; i < rows; i++) {
    int position = past + (r0 + i) / each;
    long at = (long)(first + (r0 + i) / each) * m->heads + kv * each + (r0 + i) % each;
    h->top[at] = exponentials(p + i * ld, begin, first_seen(h, position), position + 1, end, h->scale, &h->total[at]);
  }
  mix_values(p, ld, rows, h->values + head_at(h, kv, s), d, begin, end, mixed, d);
  for (int i = 0; i < rows; i++) {
    long at = (long)(first + (r0 + i) / each) * m->heads + kv * each + (r0 + i) % each;
    for (int k = 0; k < d; k++) h->mixed[at * d + k] = mixed[i * d + k] / h->total[at];
  }
}

static void attend_task(void *argument, int index) {
  const Heads *h = argument;
  const Model *m = h->m;
  int kv = index % m->kv_heads, s = index / m->kv_heads, count = h->b->start[s + 1] - h->b->start[s];
  int rows = count * (m->heads / m->kv_heads), strips = strips_of(rows);
  if (!count) return;
  int end = h->b->position[h->b->start[s + 1] - 1] + 1;
  float *memory = scratch((size_t)(2 * ROWS * m->head_dim) + ROWS * (size_t)round16(end));
  for (int i = 0; i < strips; i++) attend_strip(h, kv, s, strip_row(rows, i, strips), strip_row(rows, i + 1, strips), memory);
}

static void attend(const Heads *h) { parallel_for(h->b->sequences * h->m->kv_heads, attend_task, (void *)h); }

// --------------------------------------------------------------------------------------------------------- backward

static void rows_of_keys(const float *panels, int positions, int d, float *rows) {
  for (int j = 0; j < positions; j++)
    for (int k = 0; k < d; k++) rows[(long)j * d + k] = panels[key_at(j, d) + k * COLS];
}

static void panels_of_values(const float *rows, int positions, int d, float *panels) {
  for (int j = 0; j < positions; j++)
    for (int k = 0; k < d; k++) panels[key_at(j, d) + k * COLS] = rows[(long)j * d + k];
}

// p and ds of one query, in place of its scores and of d_out value
static void softmax_backward(float *s, float *dp, int begin, int from, int to, int end, float scale, float top, float total, float delta) {
  float inverse = 1.0f / total;
  for (int j = begin; j < from; j++) s[j] = dp[j] = 0.0f;
  for (int j = from; j < to; j++) {
    s[j] = exp32(s[j] * scale - top) * inverse;
    dp[j] = s[j] * (dp[j] - delta);
  }
  for (int j = to; j < end; j++) s[j] = dp[j] = 0.0f;
}

// dy[j, d] += sum over the block of queries [q0, q1) of x[query, j] w[query, d], for the keys [begin, q1)
static void add_block_to_keys(const float *x, long ld, int q0, int q1, int begin, const float *w, long w_row, int d, float *dy, long y_row) {
  int keys = q1 - begin, strips = strips_of(keys);
  for (int i = 0; i < strips; i++) {
    int j0 = begin + strip_row(keys, i, strips), j1 = begin + strip_row(keys, i + 1, strips), from = j0 > q0 ? j0 : q0;
    for (int c = 0; c < d; c += COLS)
      any_tile(x + (from - q0) * ld + j0, 1, ld, w + (from - q0) * w_row + c, w_row, q1 - from, dy + j0 * y_row + c, y_row, 0, j1 - j0, d - c);
  }
}

typedef struct { const float *key_panels, *key_rows, *value_panels; float *dk, *dv; long dk_row; float *memory; } KeySide;

// Queries [q0, q1) of one head: dq, and their part of dk and dv
static void attend_backward_block(const Heads *h, const KeySide *k, int head, int first, int q0, int q1) {
  const Model *m = h->m;
  int d = m->head_dim, strips = strips_of(q1 - q0), lowest = first_seen(h, q0) / BLOCK * BLOCK;
  long ld = round16(q1), width = q_width(m);
  float *p = k->memory, *ds = p + BLOCK * ld;
  const float *q = h->q + first * width + head * d, *d_out = h->d_mixed + first * width + head * d;
  const float *mixed = h->mixed + first * width + head * d;
  float *dq = h->dq + first * width + head * d;
  for (int i = 0; i < strips; i++) {
    int a = q0 + strip_row(q1 - q0, i, strips), b = q0 + strip_row(q1 - q0, i + 1, strips);
    float *pa = p + (a - q0) * ld, *dsa = ds + (a - q0) * ld;
    scores_of(q + a * width, width, b - a, k->key_panels, d, lowest, b, pa, ld);
    scores_of(d_out + a * width, width, b - a, k->value_panels, d, lowest, b, dsa, ld);
    for (int t = a; t < b; t++) {
      long at = (long)(first + t) * m->heads + head;
      float delta = (float)dot_rows(mixed + t * width, d_out + t * width, d);
      softmax_backward(p + (t - q0) * ld, ds + (t - q0) * ld, lowest, first_seen(h, t), t + 1, (int)ld, h->scale, h->top[at], h->total[at], delta);
    }
    mix_values(dsa, ld, b - a, k->key_rows, d, lowest, b, dq + a * width, width);
    for (int t = a; t < b; t++)
      for (int j = 0; j < d; j++) dq[t * width + j] = dq[t * width + j] * h->scale;
  }
  add_block_to_keys(p, ld, q0, q1, lowest, d_out + q0 * width, width, d, k->dv, k->dk_row);
  add_block_to_keys(ds, ld, q0, q1, lowest, q + q0 * width, width, d, k->dk, k->dk_row);
}

static void attend_backward_task(void *argument, int index) {
  const Heads *h = argument;
  const Model *m = h->m;
  int kv = index % m->kv_heads, s = index / m->kv_heads, first = h->b->start[s], count = h->b->start[s + 1] - first;
  int d = m->head_dim, each = m->heads / m->kv_heads;
  long padded = round16(count), out = qkv_width(m);
  float *key_rows = scratch((size_t)(2 * padded * d + 2 * BLOCK * padded)), *value_panels = key_rows + padded * d;
  float *row = h->d_raw + first * out;
  KeySide k = {h->keys + head_at(h, kv, s), key_rows, value_panels, row + m->k_at + kv * m->k_step,
               row + m->v_at + kv * m->v_step, out, value_panels + padded * d};
  rows_of_keys(k.key_panels, count, d, key_rows);
  panels_of_values(h->values + head_at(h, kv, s), count, d, value_panels);
  for (int t = 0; t < count; t++) {
    memset(k.dk + t * out, 0, sizeof(float) * (size_t)d);
    memset(k.dv + t * out, 0, sizeof(float) * (size_t)d);
  }
  for (int head = kv * each; head < (kv + 1) * each; head++)
    for (int q0 = 0; q0 < count; q0 += BLOCK) attend_backward_block(h, &k, head, first, q0, least(count, q0 + BLOCK));
  for (int t = 0; t < count; t++)
    for (int j = 0; j < d; j++) k.dk[t * out + j] = k.dk[t * out + j] * h->scale;
}

static void attend_backward(const Heads *h) {
  parallel_for(h->b->sequences * h->m->kv_heads, attend_backward_task, (void *)h);
}
