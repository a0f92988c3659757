// Rows of logits: probabilities of tokens, gradients, kept tokens, noise and sampling.
//
// A row z [v] stands for p = softmax(z / temperature) over the eligible tokens (bytes [v]; NULL: all). Sums over the
// vocabulary are row sums: lane l adds the terms of tokens l, l + 16, ... in float64. A row whose shifted logits are
// not finite has a NaN in log_total, and the exported functions return 0.
#include "elementary.h"

INLINE float shift(float z, float temperature, float top) { return z / temperature - top; }

INLINE float log_prob(float shifted, double log_total) { return (float)((double)shifted - log_total); }

// One step of a row for n = 16 tokens, or for those that are left
#define ROW_STEPS(v, step) \
  do { \
    int i = 0; \
    for (; i + LANES <= (v); i += LANES) step(i, LANES); \
    step(i, (v) - i); \
  } while (0)

// The largest z_i / temperature over the eligible tokens; +0 where zeros of both signs are the largest
INLINE float row_top(const float *z, const uint8_t *eligible, int v, float temperature) {
  float lane[LANES];
  for (int l = 0; l < LANES; l++) lane[l] = -INFINITY;
#define STEP(i, n) \
  for (int l = 0; l < (n); l++) { \
    float x = z[i + l] / temperature; \
    if (eligible) x = eligible[i + l] ? x : -INFINITY; \
    lane[l] = x > lane[l] ? x : lane[l]; \
  }
  ROW_STEPS(v, STEP);
#undef STEP
  for (int l = 1; l < LANES; l++) lane[0] = lane[l] > lane[0] ? lane[l] : lane[0];
  return lane[0] + 0.0f;
}

// Softmax of a row; where `squares` is given also the sum of e_i^2, and the mean
INLINE Softmax row_softmax(const float *z, const uint8_t *eligible, int v, float temperature, double *squares) {
  float top = row_top(z, eligible, v, temperature);
  double total[LANES] = {0}, weighted[LANES] = {0}, square[LANES] = {0};
  uint32_t size[LANES] = {0};  // bits of the largest |shifted|, above any finite number's for infinity and NaN
#define STEP(i, n) \
  for (int l = 0; l < (n); l++) { \
    float shifted = shift(z[i + l], temperature, top), e = exp32(shifted); \
    uint32_t bits = as_bits(shifted) & 0x7fffffffu; \
    size[l] = bits > size[l] ? bits : size[l]; \
    if (eligible) e = eligible[i + l] ? e : 0.0f; \
    total[l] += (double)e; \
    if (squares) weighted[l] += (double)e * (double)shifted, square[l] += (double)e * (double)e; \
  }
  ROW_STEPS(v, STEP);
#undef STEP
  uint32_t most = 0;
  for (int l = 0; l < LANES; l++) most = size[l] > most ? size[l] : most;
  Softmax s = {.top = top, .total = join_lanes(total)};
  s.log_total = most < 0x7f800000u ? log64(s.total) : (double)NAN;
  if (squares) s.mean = join_lanes(weighted) / s.total, *squares = join_lanes(square);
  return s;
}

static int all_finite(const Softmax *rows, int n) {
  for (int r = 0; r < n; r++)
    if (rows[r].log_total != rows[r].log_total) return 0;
  return 1;
}

// ---------------------------------------------------------------------------------------- statistics of a token
static void statistics_row(const void *argument, int r) {
  const Statistics *a = argument;
  const float *z = a->logits + r * a->ld;
  double squares;
  Softmax s = a->eligible ? row_softmax(z, a->eligible + (long)r * a->v, a->v, a->temperature, &squares)
                          : row_softmax(z, NULL, a->v, a->temperature, &squares);
  a->logprobs[r] = log_prob(shift(z[a->targets[r]], a->temperature, (float)s.top), s.log_total);
  a->entropies[r] = (float)(s.log_total - s.mean);
  a->squares[r] = (float)(squares / (s.total * s.total));
  a->rows[r] = s;
}

// Of each row log p of the target, the entropy log_total - mean, the sum of p^2
int token_statistics(const Statistics *a) {
  for_rows(a->n, statistics_row, a);
  return all_finite(a->rows, a->n);
}

// d log p_t / d z_i = ([i = t] - p_i) / temperature, d entropy / d z_i = -p_i (shifted_i - mean) / temperature
static void statistics_gradient_row(const void *argument, int r) {
  const Statistics *a = argument;
  const float *z = a->logits + r * a->ld, temperature = a->temperature;
  const uint8_t *eligible = a->eligible ? a->eligible + (long)r * a->v : NULL;
  Softmax s = a->rows[r];
  float *out = a->gradient + (long)r * a->v, top = (float)s.top, inverse = (float)(1.0 / s.total);
  float mean = (float)s.mean, dl = a->d_logprobs[r], de = a->d_entropies[r];
  if (dl == 0 && de == 0) {
    memset(out, 0, sizeof(float) * (size_t)a->v);
    return;
  }
  for (int i = 0; i < a->v; i++) {
    float shifted = shift(z[i], temperature, top), p = exp32(shifted) * inverse;
    out[i] = (0.0f - p * fma32(de, shifted - mean, dl)) / temperature;
  }
  if (eligible)
    for (int i = 0; i < a->v; i++) out[i] = eligible[i] ? out[i] : 0.0f;
  int64_t t = a->targets[r];
  float shifted = shift(z[t], temperature, top);
  float p = eligible && !eligible[t] ? 0.0f : exp32(shifted) * inverse;
  out[t] = (dl - p * fma32(de, shifted - mean, dl)) / temperature;
}

// `rows` are those of token_statistics
void token_statistics_gradient(const Statistics *a) { for_rows(a->n, statistics_gradient_row, a); }

// ---------------------------------------------------------------------------------------- Kullback-Leibler divergence
INLINE double mean_difference(const float *zp, const float *zq, const uint8_t *eligible, int v, float temperature,
                              Softmax p, Softmax q) {
  double sum[LANES] = {0};
  float p_top = (float)p.top, q_top = (float)q.top;
#define STEP(i, n) \
  for (int l = 0; l < (n); l++) { \
    float a = shift(zp[i + l], temperature, p_top), b = shift(zq[i + l], temperature, q_top), e = exp32(a); \
    if (eligible) e = eligible[i + l] ? e : 0.0f; \
    sum[l] += (double)e * ((double)a - (double)b); \
  }
  ROW_STEPS(v, STEP);
#undef STEP
  return join_lanes(sum) / p.total;
}

INLINE void divergence(const Divergence *a, int r, const uint8_t *eligible) {
  const float *zp = a->p_logits + r * a->p_ld, *zq = a->q_logits + r * a->q_ld;
  Softmax p = row_softmax(zp, eligible, a->v, a->temperature, NULL);
  Softmax q = row_softmax(zq, eligible, a->v, a->temperature, NULL);
  p.mean = mean_difference(zp, zq, eligible, a->v, a->temperature, p, q);
  a->out[r] = (float)(p.mean + (q.log_total - p.log_total));
  a->p[r] = p, a->q[r] = q;
}

static void divergence_row(const void *argument, int r) {
  const Divergence *a = argument;
  if (a->eligible) divergence(a, r, a->eligible + (long)r * a->v);
  else divergence(a, r, NULL);
}

// sum p (log p - log q) = mean + log_total_q - log_total_p
int kl_divergence(const Divergence *a) {
  for_rows(a->n, divergence_row, a);
  return all_finite(a->p, a->n) && all_finite(a->q, a->n);
}

// d KL / d zp_i = p_i ((shifted_p_i - shifted_q_i) - mean) / temperature, times the row's seed
static void divergence_gradient_row(const void *argument, int r) {
  const Divergence *a = argument;
  const float *zp = a->p_logits + r * a->p_ld, *zq = a->q_logits + r * a->q_ld, temperature = a->temperature;
  float *out = a->gradient + (long)r * a->v, p_top = (float)a->p[r].top, q_top = (float)a->q[r].top;
  float inverse = (float)(1.0 / a->p[r].total), seed = a->seed[r];
  double mean = a->p[r].mean;
  for (int i = 0; i < a->v; i++) {
    float s = shift(zp[i], temperature, p_top), t = shift(zq[i], temperature, q_top), p = exp32(s) * inverse;
    out[i] = seed * (p * (float)(((double)s - (double)t) - mean)) / temperature;
  }
  if (a->eligible)
    for (int i = 0; i < a->v; i++) out[i] = a->eligible[(long)r * a->v + i] ? out[i] : 0.0f;
}

// p and q are those of kl_divergence
void kl_divergence_gradient(const Divergence *a) { for_rows(a->n, divergence_gradient_row, a); }

// ---------------------------------------------------------------------------------------- tokens that are kept
static void cut_row(const void *argument, int r) {
  const Cut *a = argument;
  const float *scaled = a->scaled + (long)r * a->v;
  const int64_t *order = a->order + (long)r * a->v;
  uint8_t *eligible = a->eligible + (long)r * a->v;
  int *rank = a->rank + (long)r * a->v, count = a->top_k ? least(a->top_k, a->v) : a->v, kept = 0;
  float *e = scratch((size_t)a->v), top = scaled[order[0]];
  int finite = 1;
  for (int i = 0; i < a->v; i++) {
    float shifted = scaled[i] - top;
    finite &= (as_bits(shifted) & 0x7fffffffu) < 0x7f800000u;
    e[i] = exp32(shifted);
  }
  double total = 0, before = 0;
  for (int i = 0; i < a->v; i++) total += e[order[i]], rank[order[i]] = i;
  memset(eligible, 0, (size_t)a->v);
  for (; kept < count && before <= a->top_p * total; kept++) eligible[order[kept]] = 1, before += e[order[kept]];
  a->log_kept[r] = finite ? (float)log64(before / total) : NAN;
}

// A token is kept while its rank is below top_k (0: no limit) and the mass of the tokens before it, added one by one by
// rank, is at most top_p of the sum of all.
int cut_tokens(const Cut *a) {
  for_rows(a->n, cut_row, a);
  for (int r = 0; r < a->n; r++)
    if (a->log_kept[r] != a->log_kept[r]) return 0;
  return 1;
}

// ---------------------------------------------------------------------------------------- noise
INLINE uint32_t roll(uint32_t x, int bits) { return x << bits | x >> (32 - bits); }

// One word of MurmurHash3 x86 32-bit (Appleby, 2011)
INLINE uint32_t absorb(uint32_t h, uint32_t word) {
  return roll(h ^ roll(word * 0xcc9e2d51u, 15) * 0x1b873593u, 13) * 5 + 0xe6546b64u;
}

INLINE uint32_t finish(uint32_t h, uint32_t bytes) {
  h ^= bytes;
  h = (h ^ h >> 16) * 0x85ebca6bu;
  h = (h ^ h >> 13) * 0xc2b2ae35u;
  return h ^ h >> 16;
}

INLINE uint32_t absorb_row(uint32_t h, int64_t seed, int64_t position) {
  return absorb(absorb(absorb(h, (uint32_t)seed), (uint32_t)((uint64_t)seed >> 32)), (uint32_t)position);
}

// Gumbel noise -ln(-ln u) of u = h / (2^32 - 1), with ln u in [-DBL_MAX, -2^-32], as SGLang computes it
INLINE double gumbel_of_hash(uint32_t h) {
  double log_u = log64((h ? (double)h : 1.0) / 4294967295.0);
  log_u = h ? log_u : -0x1.fffffffffffffp+1023;
  return -log64(-(log_u < -0x1p-32 ? log_u : -0x1p-32));
}

// At least the noise of the hash, but for roundings below 1e-5: -ln u >= 1 - u, so noise <= -ln(y / 2^32) with
// y = 2^32 - 1 - h; and log2 y >= bits(y) 2^-23 - 127, because chords lie below a concave function.
INLINE float gumbel_bound(uint32_t h) {
  int32_t bits = (int32_t)as_bits((float)(0xffffffffu - h));
  return (float)(LN2 * (127 + 32)) - (float)bits * (float)(LN2 * 0x1p-23);
}

// Box and Muller, 1958: sqrt(-2 ln u) cos(2 pi w), u and w = (h + 1/2) / 2^32 of hashes whose first words are 1 and 2
static void normal_row(const void *argument, int r) {
  const Noise *a = argument;
  uint32_t radius = absorb_row(absorb(0, 1), a->seeds[r], a->positions[r]);
  uint32_t angle = absorb_row(absorb(0, 2), a->seeds[r], a->positions[r]);
  double *out = a->out + (long)r * a->columns;
  for (int i = 0; i < a->columns; i++) {
    double u = ((double)finish(absorb(radius, (uint32_t)i), 20) + 0.5) * 0x1p-32, sine, cosine;
    double w = ((double)finish(absorb(angle, (uint32_t)i), 20) + 0.5) * 0x1p-32;
    sin_cos64(w * 6.283185307179586, &sine, &cosine);
    out[i] = __builtin_sqrt(log64(u) * -2.0) * cosine;
  }
}

void normal_noise(const Noise *a) { for_rows(a->n, normal_row, a); }

// ---------------------------------------------------------------------------------------- sampling
// A score that can win is above -12 - 710, log p of the likeliest token and the smallest noise. There the roundings of
// the bound, a float32 sum, stay below this.
#define BOUND_SLACK 1e-3f
enum { SCAN = 64 };

// The first token with the largest score log p + noise. Only tokens whose bound reaches the score of the token with the
// highest bound are computed: the others cannot win.
static void sample_row(const void *argument, int r) {
  const Sampling *a = argument;
  const float *z = a->logits + r * a->ld, temperature = a->temperature;
  const uint8_t *eligible = a->eligible ? a->eligible + (long)r * a->v : NULL;
  const int *columns = a->columns ? a->columns + (long)r * a->v : NULL;
  Softmax s = a->rows[r] = row_softmax(z, NULL, a->v, temperature, NULL);
  if (s.log_total != s.log_total) return;
  uint32_t start = absorb_row(0, a->seeds[r], a->positions[r]);
  int v = a->v;
  float *bound = scratch((size_t)v), top = (float)s.top, log_total = (float)s.log_total;
  if (columns)
    for (int i = 0; i < v; i++) {
      float b = gumbel_bound(finish(absorb(start, (uint32_t)columns[i]), 16));
      bound[i] = eligible[i] ? shift(z[i], temperature, top) - log_total + b : -INFINITY;
    }
  else
    for (int i = 0; i < v; i++)
      bound[i] = shift(z[i], temperature, top) - log_total + gumbel_bound(finish(absorb(start, (uint32_t)i), 16));
  float highest = largest(bound, v), threshold = highest;
  double best = -INFINITY;
  int token = 0;
  // first the tokens with the highest bound, then all that reach the score of one
  for (int pass = 0; pass < 2; pass++) {
    best = -INFINITY;
    for (int i = 0; i < v; i += SCAN) {
      int end = least(i + SCAN, v), any = 0;
      for (int j = i; j < end; j++) any |= bound[j] >= threshold;
      for (int j = i; any && j < end; j++) {
        if (bound[j] < threshold) continue;
        uint32_t h = finish(absorb(start, (uint32_t)(columns ? columns[j] : j)), 16);
        double score = (double)log_prob(shift(z[j], temperature, top), s.log_total) + gumbel_of_hash(h);
        if (score > best) best = score, token = j;
      }
    }
    threshold = (float)best - BOUND_SLACK;
  }
  a->tokens[r] = token;
  a->logprobs[r] = log_prob(shift(z[token], temperature, top), s.log_total);
}

// tokens and their log p [n]. Where tokens are cut, `eligible` [n][v] says which are left and `columns` [n][v] which
// column of the noise each takes; else both are NULL, and a token takes its own. p is that of all tokens.
int sample_tokens(const Sampling *a) {
  for_rows(a->n, sample_row, a);
  return all_finite(a->rows, a->n);
}
