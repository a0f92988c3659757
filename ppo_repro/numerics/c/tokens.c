// Rows of logits: probabilities of tokens, their gradients, top-k and top-p, noise, sampling.
//
// A row z [v] stands for p = softmax(z / temperature) over the eligible tokens (bytes [v]; NULL: all). Sums
// over the vocabulary follow rule 3. If the shifted logits of a row are not finite, its log_total is NaN, and
// the functions of the interface return 0. The structs are in interface.h.
#include "elementary.h"
#include "operations.h"

INLINE float shifted_logit(float z, float temperature, float top) { return z / temperature - top; }

// definition: tokens.log_p
INLINE float log_prob(float shifted, double log_total) { return (float)((double)shifted - log_total); }

// Row `row` of an array [n][v]; NULL of NULL
INLINE const uint8_t *eligible_row(const uint8_t *eligible, int row, int v) {
  return eligible ? eligible + (long)row * v : NULL;
}

// ------------------------------------------------------------------------------------- what follows the head

// definition: tokens.scale_logits
ROW(scale_logits_row, LogitScale) {
  float *z = a->logits + (long)row * a->v;
  EACH(i, a->v) z[i] = z[i] / a->divisor;
  if (!a->cap) return;
  EACH(i, a->v) z[i] = soft_cap(z[i], a->cap);
}

// definition: tokens.scale_logits_gradient
ROW(scale_logits_gradient_row, LogitScale) {
  const long at = (long)row * a->v;  // without a cap there may be no logits
  const float *d = a->d_logits + at;
  float *gradient = a->gradient + at;
  EACH(i, a->v) {
    const float of_cap = a->cap ? d[i] * soft_cap_slope(a->logits[at + i], a->cap) : d[i];
    gradient[i] = of_cap / a->divisor;
  }
}

// ------------------------------------------------------------------------------------------ softmax of a row

// The largest z / temperature over the eligible tokens; +0 if zeros of both signs are the largest
INLINE float row_top(const float *z, const uint8_t *eligible, int v, float temperature) {
  LANE_VALUES(float, top, -INFINITE);
  IN_LANES(i, v, {
    float x = fixed_at(z, i) / temperature;
    if (eligible) x = eligible[i] ? x : -INFINITE;
    LANE(top) = x > LANE(top) ? x : LANE(top);
  });
  return largest_lane(top) + 0.0f;
}

// Rule 3, definition: tokens.softmax. Unless `squares` is NULL, also the mean of shifted logits, and
// the sum of e^2.
INLINE Softmax softmax_of(const float *z, const uint8_t *eligible, int v, float temperature,
                          double *squares) {
  const float top = row_top(z, eligible, v, temperature);
  LANE_VALUES(double, total, 0.0);
  LANE_VALUES(double, weighted, 0.0);
  LANE_VALUES(double, square, 0.0);
  LANE_VALUES(uint32_t, size, 0);  // bits of the largest |shifted|: infinity and NaN are largest
  IN_LANES(i, v, {
    float shifted = shifted_logit(fixed_at(z, i), temperature, top);
    float e = exp32(shifted);
    uint32_t bits = as_bits(shifted) & 0x7fffffffu;
    LANE(size) = bits > LANE(size) ? bits : LANE(size);
    if (eligible) e = eligible[i] ? e : 0.0f;
    LANE(total) += (double)e;
    if (squares) LANE(weighted) += (double)e * (double)shifted;
    if (squares) LANE(square) += (double)e * (double)e;
  });
  const int finite = largest_bits(size) < as_bits(INFINITE);
  Softmax s = {.top = top, .total = join_lanes(total)};
  s.log_total = finite ? log64(s.total) : NOT_A_NUMBER;
  if (squares) {
    s.mean = join_lanes(weighted) / s.total;
    *squares = join_lanes(square);
  }
  return s;
}

INLINE Softmax row_softmax(const float *z, const uint8_t *eligible, int v, float temperature,
                           double *squares) {
  if (is_one(temperature)) return softmax_of(z, eligible, v, 1.0f, squares);
  return softmax_of(z, eligible, v, temperature, squares);
}

INLINE void check_finite(Softmax s, int *not_finite) {
  if (s.log_total != s.log_total) set_flag(not_finite, 1);
}

// ------------------------------------------------------------------------------------- statistics of a token

typedef struct {
  Statistics of;
  int *not_finite;
} StatisticsRows;

// definition: tokens.cumulative, rule 3. Tokens have the order of top-p, by z / temperature.
INLINE float cumulative_probability(const Statistics *of, const float *z, const uint8_t *eligible, int target,
                                    Softmax s) {
  const float top = (float)s.top;
  const float own = z[target] / of->temperature;
  LANE_VALUES(double, total, 0.0);
  IN_LANES(i, of->v, {
    float x = fixed_at(z, i) / of->temperature;
    float e = exp32(x - top);
    e = x > own || (x == own && i <= target) ? e : 0.0f;
    if (eligible) e = eligible[i] ? e : 0.0f;
    LANE(total) += (double)e;
  });
  const double before = join_lanes(total);
  return (float)(eligible && !eligible[target] ? NOT_A_NUMBER : before / s.total);
}

// definition: tokens.statistics: log p of the target, the entropy log_total - mean, the sum of p^2
ROW(statistics_row, StatisticsRows) {
  const Statistics *of = &a->of;
  const float *z = of->logits + row * of->ld;
  double squares;
  Softmax s;
  if (of->eligible) {
    s = row_softmax(z, of->eligible + (long)row * of->v, of->v, of->temperature, &squares);
  } else {
    s = row_softmax(z, NULL, of->v, of->temperature, &squares);
  }
  float shifted = shifted_logit(z[of->targets[row]], of->temperature, (float)s.top);
  of->logprobs[row] = log_prob(shifted, s.log_total);
  of->entropies[row] = (float)(s.log_total - s.mean);
  of->squares[row] = (float)(squares / (s.total * s.total));
  of->rows[row] = s;
  if (of->cumulative) {
    const uint8_t *eligible = eligible_row(of->eligible, row, of->v);
    of->cumulative[row] = cumulative_probability(of, z, eligible, (int)of->targets[row], s);
  }
  check_finite(s, a->not_finite);
}

// definition: tokens.statistics_gradient, from d_logprobs and d_entropies to the logits:
//   d log p_t / d z_i = ([i = t] - p_i) / temperature
//   d entropy / d z_i = -p_i (shifted_i - mean) / temperature
ROW(statistics_gradient_row, Statistics) {
  const float *z = a->logits + row * a->ld;
  const float temperature = a->temperature;
  const uint8_t *eligible = eligible_row(a->eligible, row, a->v);
  const Softmax s = a->rows[row];
  const float top = (float)s.top;
  const float inverse = (float)(1.0 / s.total);
  const float mean = (float)s.mean;
  const float d_logprob = a->d_logprobs[row];
  const float d_entropy = a->d_entropies[row];
  float *out = a->gradient + (long)row * a->v;
  if (d_logprob == 0 && d_entropy == 0) {
    EACH(i, a->v) out[i] = 0.0f;
    return;
  }
  EACH_OF_MANY(i, a->v) {
    float shifted = shifted_logit(fixed_at(z, i), temperature, top);
    float p = exp32(shifted) * inverse;
    out[i] = (0.0f - p * fma32(d_entropy, shifted - mean, d_logprob)) / temperature;
  }
  if (eligible) {
    EACH(i, a->v) out[i] = eligible[i] ? out[i] : 0.0f;
  }
  MEET_LANES;
  ONE_LANE {
    const int64_t target = a->targets[row];
    float shifted = shifted_logit(z[target], temperature, top);
    float p = eligible && !eligible[target] ? 0.0f : exp32(shifted) * inverse;
    out[target] = (d_logprob - p * fma32(d_entropy, shifted - mean, d_logprob)) / temperature;
  }
}

// ------------------------------------------------------------------------------- Kullback-Leibler divergence

typedef struct {
  Divergence of;
  int *not_finite;
} DivergenceRows;

// Sum of e_p (shifted_p - shifted_q) / total_p, by rule 3
INLINE double mean_difference(const float *p_logits, const float *q_logits, const uint8_t *eligible, int v,
                              float temperature, Softmax p, Softmax q) {
  const float p_top = (float)p.top;
  const float q_top = (float)q.top;
  LANE_VALUES(double, sum, 0.0);
  IN_LANES(i, v, {
    float p_shifted = shifted_logit(p_logits[i], temperature, p_top);
    float q_shifted = shifted_logit(q_logits[i], temperature, q_top);
    float e = exp32(p_shifted);
    if (eligible) e = eligible[i] ? e : 0.0f;
    LANE(sum) += (double)e * ((double)p_shifted - (double)q_shifted);
  });
  return join_lanes(sum) / p.total;
}

INLINE void divergence_one(const DivergenceRows *a, int row, const uint8_t *eligible) {
  const Divergence *of = &a->of;
  const float *p_logits = of->p_logits + row * of->p_ld;
  const float *q_logits = of->q_logits + row * of->q_ld;
  Softmax p = row_softmax(p_logits, eligible, of->v, of->temperature, NULL);
  Softmax q = row_softmax(q_logits, eligible, of->v, of->temperature, NULL);
  p.mean = mean_difference(p_logits, q_logits, eligible, of->v, of->temperature, p, q);
  of->out[row] = (float)(p.mean + (q.log_total - p.log_total));
  of->p[row] = p;
  of->q[row] = q;
  check_finite(p, a->not_finite);
  check_finite(q, a->not_finite);
}

// definition: tokens.divergence: sum p (log p - log q) = mean + log_total_q - log_total_p
ROW(divergence_row, DivergenceRows) {
  if (a->of.eligible) {
    divergence_one(a, row, a->of.eligible + (long)row * a->of.v);
  } else {
    divergence_one(a, row, NULL);
  }
}

// definition: tokens.divergence_gradient, in the logits of p, times the row's seed:
//   d KL / d z_i = p_i ((shifted_p_i - shifted_q_i) - mean) / temperature
ROW(divergence_gradient_row, Divergence) {
  const float *p_logits = a->p_logits + row * a->p_ld;
  const float *q_logits = a->q_logits + row * a->q_ld;
  const uint8_t *eligible = eligible_row(a->eligible, row, a->v);
  const float temperature = a->temperature;
  const float p_top = (float)a->p[row].top;
  const float q_top = (float)a->q[row].top;
  const float inverse = (float)(1.0 / a->p[row].total);
  const float seed = a->seed[row];
  const double mean = a->p[row].mean;
  float *out = a->gradient + (long)row * a->v;
  EACH(i, a->v) {
    float p_shifted = shifted_logit(p_logits[i], temperature, p_top);
    float q_shifted = shifted_logit(q_logits[i], temperature, q_top);
    float p = exp32(p_shifted) * inverse;
    out[i] = seed * (p * (float)(((double)p_shifted - (double)q_shifted) - mean)) / temperature;
  }
  if (eligible) {
    EACH(i, a->v) out[i] = eligible[i] ? out[i] : 0.0f;
  }
}

// ------------------------------------------------------------------------------------------- top-k and top-p

typedef struct {
  Cut of;
  int *not_finite;
} CutRows;

// definition: sampling.cut. A token is kept while its rank is below top_k (0: no limit) and the mass
// of the tokens before it, added one by one by rank, is at most top_p of the mass of all. `memory` [v] holds
// the exponentials.
ROW(cut_row, CutRows) {
  const int v = a->of.v;
  const float *scaled = a->of.scaled + (long)row * v;
  const int64_t *order = a->of.order + (long)row * v;
  uint8_t *eligible = a->of.eligible + (long)row * v;
  int *rank = a->of.rank + (long)row * v;
  const int most = a->of.top_k ? least(a->of.top_k, v) : v;
  const float top = scaled[order[0]];
  float *e = memory;
  int finite = 1;
  SHARE(i, v) {
    float shifted = scaled[i] - top;
    finite &= is_finite32(shifted);
    e[i] = exp32(shifted);
  }
  finite = all_of_lanes(finite);
  EACH(i, v) eligible[i] = 0;
  MEET_LANES;
  ONE_LANE {
    double total = 0.0;
    double before = 0.0;
    for (int i = 0; i < v; i++) {
      total += e[order[i]];
      rank[order[i]] = i;
    }
    for (int i = 0; i < most && before <= a->of.top_p * total; i++) {
      before += e[order[i]];
      eligible[order[i]] = 1;
    }
    float log_kept = finite ? (float)log64(before / total) : (float)NOT_A_NUMBER;
    a->of.log_kept[row] = log_kept;
    if (log_kept != log_kept) set_flag(a->not_finite, 1);
  }
}

// ----------------------------------------------------------------------------------------------------- noise

INLINE uint32_t roll(uint32_t x, int bits) { return x << bits | x >> (32 - bits); }

// One word of MurmurHash3 x86 32-bit (Appleby, 2011); definition: sampling.murmur3
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
  h = absorb(h, (uint32_t)seed);
  h = absorb(h, (uint32_t)((uint64_t)seed >> 32));
  return absorb(h, (uint32_t)position);
}

// Rule 8, definition: sampling.gumbel_of: Gumbel noise -ln(-ln u) of u = h / (2^32 - 1), with ln u in
// [-DBL_MAX, -2^-32], as SGLang computes it
INLINE double gumbel_of_hash(uint32_t h) {
  double log_u = log64((h ? (double)h : 1.0) / 4294967295.0);
  log_u = h ? log_u : -0x1.fffffffffffffp+1023;
  return -log64(-(log_u < -0x1p-32 ? log_u : -0x1p-32));
}

// An upper bound of the noise of the hash, except for roundings below 1e-5. With y = 2^32 - 1 - h, the noise
// is at most -ln(y / 2^32), because -ln u >= 1 - u. And log2 y >= bits(y) 2^-23 - 127, because chords lie
// below a concave function.
INLINE float gumbel_bound(uint32_t h) {
  int32_t bits = (int32_t)as_bits((float)(0xffffffffu - h));
  return (float)(LN2 * (127 + 32)) - (float)bits * (float)(LN2 * 0x1p-23);
}

// definition: sampling.normal_noise: sqrt(-2 ln u) cos(2 pi w) (Box and Muller, 1958), where u and w
// are (h + 1/2) / 2^32 of hashes h whose first words are 1 and 2
ROW(normal_row, Noise) {
  const uint32_t radius = absorb_row(absorb(0, 1), a->seeds[row], a->positions[row]);
  const uint32_t angle = absorb_row(absorb(0, 2), a->seeds[row], a->positions[row]);
  double *out = a->out + (long)row * a->columns;
  EACH(i, a->columns) {
    double u = ((double)finish(absorb(radius, (uint32_t)i), 20) + 0.5) * 0x1p-32;
    double w = ((double)finish(absorb(angle, (uint32_t)i), 20) + 0.5) * 0x1p-32;
    double sine;
    double cosine;
    sin_cos64(w * 6.283185307179586, &sine, &cosine);
    out[i] = sqrt64(log64(u) * -2.0) * cosine;
  }
}

// -------------------------------------------------------------------------------------------------- sampling

// The bound is a float32 sum, and its roundings stay below this number for every score that can win. Such a
// score is above -17 - 710, because the likeliest of at most 2^24 tokens has a log p above -17, and noise is
// above -710.
#define BOUND_SLACK 1e-3f
enum { GROUP = 256 };  // tokens whose bounds are computed together: free

INLINE int groups_of(int v) { return (v + GROUP - 1) / GROUP; }

typedef struct {
  Sampling of;
  float *highest;  // [n][groups_of(v)]: the largest bound of each group
  int *not_finite;
} SamplingRows;

// The parts of a token's score
typedef struct {
  const float *z;
  const uint8_t *eligible;
  const int *columns;  // NULL: a token's column is its id
  uint32_t start;      // the hash of the row's seed and position
  float temperature;
  float top;
  double log_total;
} Scores;

// The parts of the scores in a row whose softmax is known
INLINE Scores scores_of(const Sampling *of, int row) {
  return (Scores){
      .z = of->logits + row * of->ld,
      .eligible = eligible_row(of->eligible, row, of->v),
      .columns = of->columns ? of->columns + (long)row * of->v : NULL,
      .start = absorb_row(0, of->seeds[row], of->positions[row]),
      .temperature = of->temperature,
      .top = (float)of->rows[row].top,
      .log_total = of->rows[row].log_total,
  };
}

INLINE uint32_t hash_of(const Scores *s, int token) {
  return finish(absorb(s->start, (uint32_t)(s->columns ? s->columns[token] : token)), 16);
}

INLINE float log_prob_of(const Scores *s, int token) {
  return log_prob(shifted_logit(s->z[token], s->temperature, s->top), s->log_total);
}

INLINE double score_of(const Scores *s, int token) {
  return (double)log_prob_of(s, token) + gumbel_of_hash(hash_of(s, token));
}

INLINE float bound_of(const Scores *s, int token) {
  float log_p = shifted_logit(fixed_at(s->z, token), s->temperature, s->top) - (float)s->log_total;
  return log_p + gumbel_bound(hash_of(s, token));
}

// Writes the bounds of a group of tokens to `bound` [GROUP], and returns how many tokens it has
INLINE int write_bounds(const Scores *s, int v, int group, float *bound) {
  const int first = group * GROUP;
  const int count = least(GROUP, v - first);
  if (s->columns) {
    EACH_OF_MANY(i, count) bound[i] = s->eligible[first + i] ? bound_of(s, first + i) : -INFINITE;
  } else if (is_one(s->temperature)) {
    Scores at_one = *s;
    at_one.temperature = 1.0f;
    EACH_OF_MANY(i, count) bound[i] = bound_of(&at_one, first + i);
  } else {
    EACH_OF_MANY(i, count) bound[i] = bound_of(s, first + i);
  }
  MEET_LANES;
  return count;
}

// The largest score of the tokens whose bound reaches the threshold, and the first token that has it. Most
// groups of tokens have no token like this.
INLINE Best best_token(const Scores *s, const float *highest, int v, float threshold, float *bound) {
  Best best = {-INFINITE, 0};
  for (int group = 0; group < groups_of(v); group++) {
    if (highest[group] < threshold) continue;
    const int count = write_bounds(s, v, group, bound);
    SHARE(i, count) {
      if (bound[i] < threshold) continue;
      const int token = group * GROUP + i;
      const double score = score_of(s, token);
      if (score > best.score) best = (Best){score, token};
    }
  }
  return best_of_lanes(best);
}

// Rule 8, definition: sampling.sample: the first token with the largest score log p + noise. A score takes
// two logarithms in float64, and nearly all scores lose. So each token gets an upper bound of its score. Then
// the tokens with the highest bound get a score, and then all tokens whose bound reaches this score, because
// no other token can win. These are three functions, because only the sums of the softmax have an order: on a
// GPU the groups of tokens are computed at once.
ROW(softmax_row, SamplingRows) {
  const Sampling *of = &a->of;
  const Softmax softmax = row_softmax(of->logits + row * of->ld, NULL, of->v, of->temperature, NULL);
  of->rows[row] = softmax;
  check_finite(softmax, a->not_finite);
}

// A row here is a group of tokens. `memory` [GROUP] holds their bounds, here and in sample_row.
ROW(bounds_row, SamplingRows) {
  const int groups = groups_of(a->of.v);
  const Scores s = scores_of(&a->of, row / groups);
  const int count = write_bounds(&s, a->of.v, row % groups, memory);
  a->highest[row] = largest(memory, count);
}

ROW(sample_row, SamplingRows) {
  const Sampling *of = &a->of;
  const Scores s = scores_of(of, row);
  if (s.log_total != s.log_total) return;
  const int groups = groups_of(of->v);
  const float *highest = a->highest + (long)row * groups;
  const Best first = best_token(&s, highest, of->v, largest(highest, groups), memory);
  const Best best = best_token(&s, highest, of->v, (float)first.score - BOUND_SLACK, memory);
  of->tokens[row] = best.element;
  of->logprobs[row] = log_prob_of(&s, best.element);
}

// ===================================================================================================== calls
// The code below runs on the host, see operations.h.
#ifndef GPU_KERNELS

void scale_logits(const LogitScale *of) { for_rows(of->n, scale_logits_row, of); }

void scale_logits_gradient(const LogitScale *of) { for_rows(of->n, scale_logits_gradient_row, of); }

int token_statistics(const Statistics *of) {
  int *not_finite = clear_flag();
  for_rows(of->n, statistics_row, &(StatisticsRows){*of, not_finite});
  return !flag_value(not_finite);
}

void token_statistics_gradient(const Statistics *of) { for_rows(of->n, statistics_gradient_row, of); }

int kl_divergence(const Divergence *of) {
  int *not_finite = clear_flag();
  for_rows(of->n, divergence_row, &(DivergenceRows){*of, not_finite});
  return !flag_value(not_finite);
}

void kl_divergence_gradient(const Divergence *of) { for_rows(of->n, divergence_gradient_row, of); }

int cut_tokens(const Cut *of) {
  int *not_finite = clear_flag();
  for_rows_with_memory(of->n, of->v, cut_row, &(CutRows){*of, not_finite});
  return !flag_value(not_finite);
}

void normal_noise(const Noise *of) { for_rows(of->n, normal_row, of); }

int sample_tokens(const Sampling *of) {
  const int groups = groups_of(of->v);
  float *highest = shared_scratch(SCRATCH_BOUNDS, (size_t)of->n * (size_t)groups);
  const SamplingRows rows = {*of, highest, clear_flag()};
  for_rows(of->n, softmax_row, &rows);
  for_rows_with_memory(of->n * groups, GROUP, bounds_row, &rows);
  for_rows_with_memory(of->n, GROUP, sample_row, &rows);
  return !flag_value(rows.not_finite);
}
#endif
