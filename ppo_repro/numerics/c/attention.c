// Causal attention over a cache of keys and values (rule 4). Prefill, decoding and training are one function:
// a query at some position sees the keys of its sequence up to that position, or the last `window` of them.
//
//   score = scale (q . key)                       a chain over head_dim, rule 1; then the soft cap, if any
//   top   = the largest score that the query sees
//   p     = exp(score - top), 0 for keys that it does not see
//   total = row sum of p over key positions       rule 3
//   mixed = (sum of p value) / total              rule 1, in blocks of 128 key positions
//
// Backward, with d = the gradient of mixed. p is computed again from top and total:
//   p     = exp(score - top) (1 / total)
//   ds    = p (d . value - delta)                 delta = row sum of mixed d; times the soft cap's slope
//   dq    = scale (sum of ds key)                 in blocks of 128 key positions
//   dk    = scale (sum of ds q), dv = sum of p d  in blocks of 128 query positions, a group's heads in order
//
// Keys that a query does not see are terms of zero, which change no sum (rule 1). So no bit depends on where
// a loop ends.
#include "kernels.h"

// The offset of the keys, and of the values, of key head `kv` of sequence s
INLINE long head_at(const Heads *h, int kv, int s) {
  return ((long)kv * h->b->capacity + h->b->base[s]) * h->m->head_dim;
}

// scores[i][j] = sum over d of x[i][d] key[j][d] for keys j in [begin, end), of which `panels` are all of a
// head from position 0 on; begin is a multiple of 16, rows at most ROWS
static void multiply_keys(const float *x, long x_row, int rows, const float *panels, int head_dim, int begin,
                          int end, float *scores, long ld) {
  for (int d = 0; d < head_dim; d += BLOCK) {
    BlockOfProduct block = {
        .x = x + d,
        .x_row = x_row,
        .x_step = 1,
        .w = panels + (long)begin * head_dim + (long)d * COLS,
        .w_panel = (long)head_dim * COLS,
        .w_step = COLS,
        .y = scores + begin,
        .y_row = ld,
        .rows = rows,
        .terms = least(BLOCK, head_dim - d),
        .first = d == 0,
    };
    multiply_panels(&block, (int)multiple_of_16(end - begin));
  }
}

// out[i][d] = sum over positions j in [begin, end) of p[i][j] value[j][d]; begin is a multiple of BLOCK
static void multiply_values(const float *p, long ld, int rows, const float *values, int head_dim, int begin,
                            int end, float *out, long out_row) {
  for (int j = begin; j < end; j += BLOCK) {
    BlockOfProduct block = {
        .x = p + j,
        .x_row = ld,
        .x_step = 1,
        .w = values + (long)j * head_dim,
        .w_step = head_dim,
        .y = out,
        .y_row = out_row,
        .rows = rows,
        .terms = least(BLOCK, end - j),
        .first = j == begin,
    };
    multiply_rows(&block, head_dim);
  }
}

// Keys of one query, by position
typedef struct {
  int begin;  // those with scores are [begin, end); `begin` is a multiple of 16, so lanes go by position
  int end;
  int from;   // those that the query sees are [from, to)
  int to;
} Keys;

// From q . key to scores, in place, for the keys that the query sees
static void scale_scores(const Heads *h, float *scores, Keys keys) {
  for (int j = keys.from; j < keys.to; j++) scores[j] = scores[j] * h->scale;
  if (!h->score_cap) return;
  for (int j = keys.from; j < keys.to; j++) scores[j] = soft_cap(scores[j], h->score_cap);
}

// Scores into p, in place: p = exp(score - top) for the keys j that the query sees, 0 for the others with
// scores. Returns top; total is the sum.
static float exponentiate_scores(float *score_to_p, Keys keys, float *total) {
  float top = largest(score_to_p + keys.from, keys.to - keys.from);
  for (int j = keys.begin; j < keys.from; j++) score_to_p[j] = 0.0f;
  for (int j = keys.from; j < keys.to; j++) score_to_p[j] = exp32(score_to_p[j] - top);
  for (int j = keys.to; j < keys.end; j++) score_to_p[j] = 0.0f;
  *total = (float)sum_row(score_to_p + keys.begin, keys.to - keys.begin);
  return top;
}

// --------------------------------------------------------------------------------------------------- forward

// A group is the query heads that share one key head. The rows of one sequence and one key head are pairs of
// a query and a head of the group: row r is query r / group, and the heads of a group stand next to each
// other. So decoding, which has one query, still fills a tile, and keys are read once for a group. A strip is
// the rows [row0, row1), at most ROWS.
static void attend_strip(const Heads *h, int kv, int s, int row0, int row1, float *memory) {
  const Model *m = h->m;
  int head_dim = m->head_dim;
  int group = m->heads / m->kv_heads;
  int rows = row1 - row0;
  int first = h->b->start[s];           // row of the batch
  int past = h->b->position[first];     // position of the first query
  int begin = first_seen(h->window, past + row0 / group) / BLOCK * BLOCK;
  int end = past + (row1 - 1) / group + 1;
  long ld = multiple_of_16(end);
  float *q = memory;                    // [ROWS][head_dim]
  float *mixed = q + ROWS * head_dim;   // [ROWS][head_dim]
  float *p = mixed + ROWS * head_dim;   // [ROWS][ld]
  long at[ROWS];                        // index of a row in [tokens][heads]
  for (int i = 0; i < rows; i++) {
    at[i] = (long)(first + (row0 + i) / group) * m->heads + kv * group + (row0 + i) % group;
    copy_floats(q + i * head_dim, h->q + at[i] * head_dim, head_dim);
  }
  multiply_keys(q, head_dim, rows, h->keys + head_at(h, kv, s), head_dim, begin, end, p, ld);
  for (int i = 0; i < rows; i++) {
    int position = past + (row0 + i) / group;
    Keys keys = {.begin = begin, .end = end, .from = first_seen(h->window, position), .to = position + 1};
    scale_scores(h, p + i * ld, keys);
    h->top[at[i]] = exponentiate_scores(p + i * ld, keys, &h->total[at[i]]);
  }
  multiply_values(p, ld, rows, h->values + head_at(h, kv, s), head_dim, begin, end, mixed, head_dim);
  for (int i = 0; i < rows; i++) {
    float *out = h->mixed + at[i] * head_dim;
    for (int d = 0; d < head_dim; d++) out[d] = mixed[i * head_dim + d] / h->total[at[i]];
  }
}

// One sequence and one key head
static void attend_task(void *argument, int index) {
  const Heads *h = argument;
  int kv = index % h->m->kv_heads;
  int s = index / h->m->kv_heads;
  int queries = h->b->start[s + 1] - h->b->start[s];
  if (!queries) return;
  int rows = queries * (h->m->heads / h->m->kv_heads);
  int strips = strips_of(rows);
  int end = h->b->position[h->b->start[s + 1] - 1] + 1;
  float *memory = scratch((size_t)(2 * ROWS * h->m->head_dim) + ROWS * (size_t)multiple_of_16(end));
  if (!memory) return;
  for (int i = 0; i < strips; i++)
    attend_strip(h, kv, s, strip_row(rows, i, strips), strip_row(rows, i + 1, strips), memory);
}

// top, total and mixed of all heads of all tokens. definition: attention.attend
static void attend(const Heads *h) { parallel_for(h->b->sequences * h->m->kv_heads, attend_task, (void *)h); }

// -------------------------------------------------------------------------------------------------- backward

// Copies of keys and values, each in the layout that the cache has for the other: keys [positions][head_dim],
// values in panels [position / 16][head_dim][16]. The products of the backward pass read them so.
static void keys_as_rows(const float *panels, int positions, int head_dim, float *rows) {
  for (int j = 0; j < positions; j++)
    for (int d = 0; d < head_dim; d++) rows[(long)j * head_dim + d] = panels[key_at(j, head_dim) + d * COLS];
}

static void values_as_panels(const float *rows, int positions, int head_dim, float *panels) {
  for (int j = 0; j < positions; j++)
    for (int d = 0; d < head_dim; d++) panels[key_at(j, head_dim) + d * COLS] = rows[(long)j * head_dim + d];
}

// The query of `row` in [tokens][heads], in place: its scores become p, and dp = d . value becomes ds; both 0
// for the keys that it does not see. definition: attention.attend_backward.
INLINE void softmax_backward(const Heads *h, long row, float *score_to_p, float *dp_to_ds, Keys keys,
                             float delta, const int capped) {
  const float top = h->top[row];
  const float inverse = 1.0f / h->total[row];
  const float cap = h->score_cap;
  for (int j = keys.begin; j < keys.from; j++) score_to_p[j] = dp_to_ds[j] = 0.0f;
  for (int j = keys.from; j < keys.to; j++) {
    const float score = score_to_p[j];
    score_to_p[j] = exp32(score - top) * inverse;
    dp_to_ds[j] = score_to_p[j] * (dp_to_ds[j] - delta);
    if (capped) dp_to_ds[j] = dp_to_ds[j] * soft_cap_slope(score, cap);
  }
  for (int j = keys.to; j < keys.end; j++) score_to_p[j] = dp_to_ds[j] = 0.0f;
}

// out[j][d] += sum over the queries of one block, from query0 to query1 - 1, of x[query][j] w[query][d], for
// the keys [begin, query1). A strip of keys begins with the first query that may see one of them.
static void add_queries_to_keys(const float *x, long ld, int query0, int query1, int begin, const float *w,
                                long w_row, int head_dim, float *out, long out_row) {
  int keys = query1 - begin;
  int strips = strips_of(keys);
  for (int i = 0; i < strips; i++) {
    int key0 = begin + strip_row(keys, i, strips);
    int key1 = begin + strip_row(keys, i + 1, strips);
    int from = key0 > query0 ? key0 : query0;
    BlockOfProduct block = {
        .x = x + (from - query0) * ld + key0,
        .x_row = 1,
        .x_step = ld,
        .w = w + (from - query0) * w_row,
        .w_step = w_row,
        .y = out + key0 * out_row,
        .y_row = out_row,
        .rows = key1 - key0,
        .terms = query1 - from,
    };
    multiply_rows(&block, head_dim);
  }
}

// One key head of one sequence, whose tokens all are in the batch
typedef struct {
  int first;                  // its first row in the batch
  const float *key_panels;    // in the layout of the cache
  const float *key_rows;      // turned, see above
  const float *value_panels;  // turned
  float *dk;                  // a row of dk and of dv for each position, `row` apart
  float *dv;
  long row;
  float *p;                   // [BLOCK][positions]
  float *ds;                  // [BLOCK][positions]
} KeyHead;

// The block of queries [query0, query1) of one head: dq, and their part of dk and dv
static void attend_backward_block(const Heads *h, const KeyHead *key_head, int head, int query0, int query1) {
  const Model *m = h->m;
  int head_dim = m->head_dim;
  int strips = strips_of(query1 - query0);
  int begin = first_seen(h->window, query0) / BLOCK * BLOCK;
  long ld = multiple_of_16(query1);
  long width = q_width(m);
  // of query 0 of this head; the next query is `width` further
  long at = key_head->first * width + head * head_dim;
  const float *q = h->q + at;
  const float *mixed = h->mixed + at;
  const float *d_mixed = h->d_mixed + at;
  float *dq = h->dq + at;
  for (int i = 0; i < strips; i++) {
    int t0 = query0 + strip_row(query1 - query0, i, strips);
    int t1 = query0 + strip_row(query1 - query0, i + 1, strips);
    float *p = key_head->p + (t0 - query0) * ld;
    float *ds = key_head->ds + (t0 - query0) * ld;
    multiply_keys(q + t0 * width, width, t1 - t0, key_head->key_panels, head_dim, begin, t1, p, ld);
    multiply_keys(d_mixed + t0 * width, width, t1 - t0, key_head->value_panels, head_dim, begin, t1, ds, ld);
    for (int t = t0; t < t1; t++) {
      long row = (long)(key_head->first + t) * m->heads + head;
      float delta = (float)dot_rows(mixed + t * width, d_mixed + t * width, head_dim);
      Keys keys = {.begin = begin, .end = (int)ld, .from = first_seen(h->window, t), .to = t + 1};
      float *p_row = p + (t - t0) * ld;
      float *ds_row = ds + (t - t0) * ld;
      scale_scores(h, p_row, keys);
      if (h->score_cap) softmax_backward(h, row, p_row, ds_row, keys, delta, 1);
      else softmax_backward(h, row, p_row, ds_row, keys, delta, 0);
    }
    multiply_values(ds, ld, t1 - t0, key_head->key_rows, head_dim, begin, t1, dq + t0 * width, width);
    for (int t = t0; t < t1; t++)
      for (int d = 0; d < head_dim; d++) dq[t * width + d] = dq[t * width + d] * h->scale;
  }
  const float *q_block = q + query0 * width;
  const float *d_block = d_mixed + query0 * width;
  add_queries_to_keys(key_head->p, ld, query0, query1, begin, d_block, width, head_dim, key_head->dv,
                      key_head->row);
  add_queries_to_keys(key_head->ds, ld, query0, query1, begin, q_block, width, head_dim, key_head->dk,
                      key_head->row);
}

// One sequence and one key head: the heads of the group in order, and their queries block by block
static void attend_backward_task(void *argument, int index) {
  const Heads *h = argument;
  const Model *m = h->m;
  int kv = index % m->kv_heads;
  int s = index / m->kv_heads;
  int first = h->b->start[s];
  int positions = h->b->start[s + 1] - first;
  int head_dim = m->head_dim;
  int group = m->heads / m->kv_heads;
  long padded = multiple_of_16(positions);
  long row = qkv_width(m);
  float *key_rows = scratch((size_t)(2 * padded * head_dim + 2 * BLOCK * padded));
  if (!key_rows) return;
  float *value_panels = key_rows + padded * head_dim;
  float *p = value_panels + padded * head_dim;
  KeyHead key_head = {
      .first = first,
      .key_panels = h->keys + head_at(h, kv, s),
      .key_rows = key_rows,
      .value_panels = value_panels,
      .dk = h->d_raw + first * row + m->k_at + kv * m->k_step,
      .dv = h->d_raw + first * row + m->v_at + kv * m->v_step,
      .row = row,
      .p = p,
      .ds = p + BLOCK * padded,
  };
  keys_as_rows(key_head.key_panels, positions, head_dim, key_rows);
  values_as_panels(h->values + head_at(h, kv, s), positions, head_dim, value_panels);
  for (int t = 0; t < positions; t++) {
    zero_floats(key_head.dk + t * row, head_dim);
    zero_floats(key_head.dv + t * row, head_dim);
  }
  for (int head = kv * group; head < (kv + 1) * group; head++)
    for (int query0 = 0; query0 < positions; query0 += BLOCK)
      attend_backward_block(h, &key_head, head, query0, least(positions, query0 + BLOCK));
  for (int t = 0; t < positions; t++)
    for (int d = 0; d < head_dim; d++) key_head.dk[t * row + d] = key_head.dk[t * row + d] * h->scale;
}

// dq, and dk and dv in d_raw; every sequence is whole, from position 0. definition: attention.attend_backward
static void attend_backward(const Heads *h) {
  parallel_for(h->b->sequences * h->m->kv_heads, attend_backward_task, (void *)h);
}
