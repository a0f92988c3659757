// What is computed row by row: sums of rows, norms, rotations, activations, and their derivatives.
#include "elementary.h"
#include "kernels.h"

// --------------------------------------------------------------------------------------------------------- row sums

// A sum of float64 lanes: halves are added until one lane is left. Lane l has summed elements l, l + 16, ...
INLINE double join_lanes(double *lane) {
  for (int width = LANES / 2; width; width /= 2)
    for (int l = 0; l < width; l++) lane[l] += lane[l + width];
  return lane[0];
}

// Law: lane l adds elements l, l + 16, ... in float64; the lanes are joined by halves.
#define ROW_SUM(n, term, result)                                   \
  do {                                                             \
    double lane_[LANES] = {0};                                     \
    int i_ = 0;                                                    \
    for (; i_ + LANES <= (n); i_ += LANES)                         \
      for (int l_ = 0; l_ < LANES; l_++) {                         \
        const int i = i_ + l_;                                     \
        lane_[l_] += (term);                                       \
      }                                                            \
    for (int l_ = 0; i_ + l_ < (n); l_++) {                        \
      const int i = i_ + l_;                                       \
      lane_[l_] += (term);                                         \
    }                                                              \
    (result) = join_lanes(lane_);                                  \
  } while (0)

static double dot_rows(const float *restrict a, const float *restrict b, int n) {
  double sum;
  ROW_SUM(n, (double)a[i] * b[i], sum);
  return sum;
}

static double sum_row(const float *restrict a, int n) {
  double sum;
  ROW_SUM(n, a[i], sum);
  return sum;
}

// For the tests, which look at sums before they are rounded
double row_dot(const float *a, const float *b, int n) { return dot_rows(a, b, n); }

// The largest element; no order matters
static float largest(const float *a, int n) {
  float lane[16], top = a[0];
  for (int l = 0; l < 16; l++) lane[l] = a[0];
  int i = 0;
  for (; i + 16 <= n; i += 16)
    for (int l = 0; l < 16; l++) lane[l] = a[i + l] > lane[l] ? a[i + l] : lane[l];
  for (; i < n; i++) top = a[i] > top ? a[i] : top;
  for (int l = 0; l < 16; l++) top = lane[l] > top ? lane[l] : top;
  return top;
}

// ------------------------------------------------------------------------------------------------------------ norms

// r = 1 / sqrt(mean (x - m)^2 + eps), m = 0 without a mean; y = (x - m) r w, or with 1 + w, or fma((x - m) r, w, b).
// 0 where a sum is not finite.
static int norm(int kind, float eps, const NormWeights *w, const float *restrict x, int n, float *r, float *mean, float *restrict y) {
  double squares;
  float m = 0.0f;
  if (kind == NORM_LAYER) {
    m = *mean = (float)(sum_row(x, n) / n);
    ROW_SUM(n, (double)(x[i] - m) * (x[i] - m), squares);
  } else {
    squares = dot_rows(x, x, n);
  }
  const float factor = *r = (float)(1.0 / sqrt(squares / n + eps));
  const float *restrict scale = w->w, *restrict b = w->b;
  if (kind == NORM_LAYER)
    for (int i = 0; i < n; i++) y[i] = fma32((x[i] - m) * factor, scale[i], b[i]);
  else if (kind == NORM_RMS_OFFSET)
    for (int i = 0; i < n; i++) y[i] = x[i] * factor * (1.0f + scale[i]);
  else
    for (int i = 0; i < n; i++) y[i] = x[i] * factor * scale[i];
  return isfinite(squares);
}

// With g = dy w and h = (x - m) r: dx = residual + r fma(-h, mean(g h), g), less r mean(g) where there is a mean
static void norm_backward(int kind, const NormWeights *w, const float *restrict dy, const float *restrict x, int n, float r,
                          float m, const float *restrict residual, float *restrict dx) {
  const float *restrict scale = w->w;
  double products, sum = 0.0;
  if (kind == NORM_LAYER) {
    ROW_SUM(n, (double)(dy[i] * scale[i]) * ((x[i] - m) * r), products);
    ROW_SUM(n, (double)(dy[i] * scale[i]), sum);
  } else if (kind == NORM_RMS_OFFSET) {
    ROW_SUM(n, (double)(dy[i] * (1.0f + scale[i])) * (x[i] * r), products);
  } else {
    ROW_SUM(n, (double)(dy[i] * scale[i]) * (x[i] * r), products);
  }
  const float mean = (float)(products / n), shift = (float)(sum / n);
#define DERIVATIVE(g, h, end) \
  for (int i = 0; i < n; i++) dx[i] = residual ? residual[i] + r * (fma32(-(h), mean, g) end) : r * (fma32(-(h), mean, g) end)
  if (kind == NORM_LAYER) DERIVATIVE(dy[i] * scale[i], (x[i] - m) * r, -shift);
  else if (kind == NORM_RMS_OFFSET) DERIVATIVE(dy[i] * (1.0f + scale[i]), x[i] * r, );
  else DERIVATIVE(dy[i] * scale[i], x[i] * r, );
#undef DERIVATIVE
}

// The same of rows [rows][n]. `place` names the norm where its input is not finite.
typedef struct {
  int kind; float eps; const NormWeights *w; int n, place;
  const float *x; float *r, *mean, *y;
  const float *dy, *residual; float *dx;
} Norm;

static int not_finite;  // 0, or the first place of a pass whose numbers are infinite or NaN

static void norm_row(const void *argument, int t) {
  const Norm *a = argument;
  long at = (long)t * a->n;
  if (!norm(a->kind, a->eps, a->w, a->x + at, a->n, a->r + t, a->mean + t, a->y + at) && !__atomic_load_n(&not_finite, __ATOMIC_RELAXED))
    __atomic_store_n(&not_finite, a->place, __ATOMIC_RELAXED);
}

static void norm_backward_row(const void *argument, int t) {
  const Norm *a = argument;
  long at = (long)t * a->n;
  norm_backward(a->kind, a->w, a->dy + at, a->x + at, a->n, a->r[t], a->mean[t], a->residual ? a->residual + at : NULL, a->dx + at);
}

// -------------------------------------------------------------------------------------------------------- rotations

// (a, b) -> (a c - b s, b c + a s) of the pairs (i, i + half), s times `way`: 1, or -1 to turn back; y may be x
INLINE void rotate(const float *x, const float *c, const float *s, const float way, int half, float *y) {
  for (int i = 0; i < half; i++) {
    float a = x[i], b = x[i + half], sine = way * s[i];
    y[i] = a * c[i] - b * sine;
    y[i + half] = b * c[i] + a * sine;
  }
}

// ------------------------------------------------------------------------------------------------------ activations

static const float ROOT_HALF = 0.707106781f, ROOT_2_PI = 0.797884561f, CUBIC = 0.044715f, INVERSE_ROOT_2PI = 0.398942280f;

// The function, and its derivative
INLINE float activation(int kind, float x) {
  if (kind == ACT_SILU) return x * sigmoid32(x);
  if (kind == ACT_GELU) return 0.5f * x * (1.0f + erf32(x * ROOT_HALF));
  return 0.5f * x * (1.0f + tanh32(ROOT_2_PI * fma32(CUBIC * x * x, x, x)));
}

INLINE float activation_slope(int kind, float x) {
  if (kind == ACT_SILU) {
    float s = sigmoid32(x);
    return s * fma32(x, 1.0f - s, 1.0f);
  }
  if (kind == ACT_GELU) return fma32(x * INVERSE_ROOT_2PI, exp32(-0.5f * x * x), 0.5f * (1.0f + erf32(x * ROOT_HALF)));
  float t = tanh32(ROOT_2_PI * fma32(CUBIC * x * x, x, x));
  return fma32(0.5f * x * (1.0f - t * t), ROOT_2_PI * fma32(3.0f * CUBIC * x, x, 1.0f), 0.5f * (1.0f + t));
}

// y = act(gate) up of rows [gate, up], or y = act(x) of rows without gates
typedef struct { int kind, gated, n; const float *x; float *y; const float *dy; float *dx; } Activation;

INLINE void act_row(const Activation *a, long t, const int kind) {
  const float *restrict x = a->x + t * a->n * (a->gated ? 2 : 1);
  float *restrict y = a->y + t * a->n;
  if (a->gated)
    for (int i = 0; i < a->n; i++) y[i] = activation(kind, x[i]) * x[a->n + i];
  else
    for (int i = 0; i < a->n; i++) y[i] = activation(kind, x[i]);
}

INLINE void act_backward_row(const Activation *a, long t, const int kind) {
  int n = a->n;
  const float *restrict x = a->x + t * n * (a->gated ? 2 : 1), *restrict dy = a->dy + t * n;
  float *restrict dx = a->dx + t * n * (a->gated ? 2 : 1);
  if (a->gated)
    for (int i = 0; i < n; i++) {
      dx[n + i] = dy[i] * activation(kind, x[i]);
      dx[i] = dy[i] * x[n + i] * activation_slope(kind, x[i]);
    }
  else
    for (int i = 0; i < n; i++) dx[i] = dy[i] * activation_slope(kind, x[i]);
}

#define OF_KIND(function)                                             \
  switch (a->kind) {                                                  \
    case ACT_SILU: function(a, t, ACT_SILU); break;                   \
    case ACT_GELU: function(a, t, ACT_GELU); break;                   \
    case ACT_GELU_TANH: function(a, t, ACT_GELU_TANH); break;         \
  }
static void activation_row(const void *argument, int t) {
  const Activation *a = argument;
  OF_KIND(act_row)
}
static void activation_backward_row(const void *argument, int t) {
  const Activation *a = argument;
  OF_KIND(act_backward_row)
}
