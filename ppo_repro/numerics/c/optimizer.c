// What follows the backward passes of a step: the join of partial sums of gradients, the norm of all gradients, AdamW.
#include "kernels.h"

enum { NORM_BLOCK = 4096 };        // the law: elements of a block of the norm
enum { PIECE = 4 * NORM_BLOCK };   // elements of a task: free

INLINE int pieces_in(long n) { return (int)((n + PIECE - 1) / PIECE); }
INLINE long piece_length(long n, long at) { return n - at < PIECE ? n - at : PIECE; }

// -------------------------------------------------------------------------------------------------- sums of slots

typedef struct { const Sums *sums; long n; } Join;

static void join_task(void *argument, int index) {
  const Join *j = argument;
  const Sums *s = j->sums;
  long at = (long)index * PIECE, n = piece_length(j->n, at);
  float *total = s->level[0] + at;
  if (!s->open) memset(total, 0, sizeof(float) * (size_t)n);
  for (int i = 0; i < s->levels; i++)
    if ((s->first >> i) & 1) add_vector(total, s->level[i + 1] + at, n);
}

// The whole tree of `n` sums in level[0], where no rows are left: slot `first` is the last one with rows (`open`), or
// has none. total = level[0] or +0; then total = total + level[i + 1] for each bit i of `first`, by rising i
void join_sums(const Sums *sums, long n) {
  if (sums->first == 1 << sums->levels) return;
  Join j = {sums, n};
  parallel_for(pieces_in(n), join_task, &j);
}

// ------------------------------------------------------------------------------------------- tensors of an optimizer

typedef struct { const float *g; long n; double *blocks; } Squares;

static void squares_task(void *argument, int index) {
  const Squares *s = argument;
  long end = (long)index * PIECE + piece_length(s->n, (long)index * PIECE);
  for (long at = (long)index * PIECE; at < end; at += NORM_BLOCK)
    s->blocks[at / NORM_BLOCK] = dot_rows(s->g + at, s->g + at, least(NORM_BLOCK, (int)(end - at)));
}

// square = sum g^2 of each tensor: blocks of 4,096 elements, their results added in order from +0. Returns the sum of
// `square` of all tensors in order from +0. It is NaN or infinite if and only if a gradient is: none overflows float64.
double gradient_squares(Trained *tensors, int count) {
  double sum = 0.0;
  for (Trained *t = tensors; t < tensors + count; t++) {
    Squares s = {t->g, t->n, (double *)shared_scratch(SCRATCH_SQUARES, 2 * (size_t)(t->n / NORM_BLOCK + 1))};
    parallel_for(pieces_in(t->n), squares_task, &s);
    t->square = 0.0;
    for (long at = 0; at < t->n; at += NORM_BLOCK) t->square += s.blocks[at / NORM_BLOCK];
    sum += t->square;
  }
  return sum;
}

// ------------------------------------------------------------------------------------------------------------ AdamW

// c = clip g;  m = beta1 m + (rest1 c);  v = beta2 v + ((rest2 c) c);
// p = keep p - (rate m) / (sqrt(v) unroot + eps): each a b + c by fma, all else rounded once
static void adamw_piece(float *restrict p, const float *restrict g, float *restrict m, float *restrict v, int n,
                        const Step s) {
  for (int i = 0; i < n; i++) {
    float c = s.clip * g[i];
    m[i] = fma32(s.beta1, m[i], s.rest1 * c);
    v[i] = fma32(s.beta2, v[i], s.rest2 * c * c);
    p[i] = fma32(s.keep, p[i], -(s.rate * m[i] / fma32(sqrtf(v[i]), s.unroot, s.eps)));
  }
}

typedef struct { const Trained *tensor; const Step *step; } Adamw;

static void adamw_task(void *argument, int index) {
  const Adamw *a = argument;
  const Trained *t = a->tensor;
  long at = (long)index * PIECE;
  adamw_piece(t->p + at, t->g + at, t->m + at, t->v + at, (int)piece_length(t->n, at), *a->step);
}

void adamw(const Trained *tensors, int count, const Step *step) {
  for (int t = 0; t < count; t++) parallel_for(pieces_in(tensors[t].n), adamw_task, &(Adamw){tensors + t, step});
}
