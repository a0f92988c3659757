// Rows of hidden states: sums, norms, rotations, activations, and their derivatives. One text for CPU and
// GPU: lanes.h.
#include "elementary.h"
#include "operations.h"

// -------------------------------------------------------------------------------------------------- row sums

// The sum of rule 3, not yet rounded to float32. Products of two float32 are exact in float64.
// definition: row_sums.row_sum
static double dot_rows(const float *a, const float *b, int n) {
  LANE_VALUES(double, sum, 0.0);
  IN_LANES(i, n, LANE(sum) += (double)a[i] * b[i];);
  return join_lanes(sum);
}

static double sum_row(const float *a, int n) {
  LANE_VALUES(double, sum, 0.0);
  IN_LANES(i, n, LANE(sum) += a[i];);
  return join_lanes(sum);
}

#if !defined(GPU_KERNELS) && !defined(GPU_HOST)
double row_dot(const float *a, const float *b, int n) { return dot_rows(a, b, n); }
#endif

// The largest of n > 0 elements, whose order does not matter
static float largest(const float *a, int n) {
  LANE_VALUES(float, top, a[0]);
  IN_LANES(i, n, LANE(top) = a[i] > LANE(top) ? a[i] : LANE(top););
  return largest_lane(top);
}

// ----------------------------------------------------------------------------------------------------- norms

// The factor of an element; 1 + w is rounded first. definition: rows.norm_factor.
INLINE float norm_factor(const NormKind kind, float w) { return kind == NORM_RMS_OFFSET ? 1.0f + w : w; }

// Rules 3 and 5, definition: rows.norm. With h = (x - mean) r and
// r = float32(1 / sqrt(mean of (x - mean)^2 + eps)):
//   y = h w, y = h (1 + w), or y = fma(h, w, b). The first two kinds have no mean: it is 0 there.
// x, w, b, y [n]; writes *r, and *mean if the kind has one. Returns whether the sum of squares is finite.
INLINE int norm(const NormKind kind, float eps, const float *w, const float *b, const float *x, int n,
                float *r, float *mean, float *y) {
  const int centered = kind == NORM_LAYER;
  float center = 0.0f;
  if (centered) center = *mean = (float)(sum_row(x, n) / n);
  LANE_VALUES(double, lanes, 0.0);
  IN_LANES(i, n, {
    float h = centered ? x[i] - center : x[i];
    LANE(lanes) += (double)h * h;
  });
  const double squares = join_lanes(lanes);
  const float factor = *r = (float)(1.0 / sqrt64(squares / n + eps));
  EACH_OF_MANY(i, n) {
    float h = (centered ? fixed_at(x, i) - center : fixed_at(x, i)) * factor;
    y[i] = centered ? fma32(h, fixed_at(w, i), b[i]) : h * norm_factor(kind, fixed_at(w, i));
  }
  return is_finite64(squares);
}

// Rules 3 and 5, definition: rows.norm_backward: from dy to dx; r and mean are from the forward
// pass. With g = dy w:
//   dx = r fma(-h, mean of g h, g), or r (fma(..) - mean of g) for a kind with a mean
// plus `residual` unless NULL. All rows [n]. dx may be dy.
INLINE void norm_backward(const NormKind kind, const float *w, const float *dy, const float *x, int n,
                          float r, float mean, const float *residual, float *dx) {
  const int centered = kind == NORM_LAYER;
  LANE_VALUES(double, products, 0.0);
  LANE_VALUES(double, sums, 0.0);
  IN_LANES(i, n, {
    float g = dy[i] * norm_factor(kind, w[i]);
    float h = (centered ? x[i] - mean : x[i]) * r;
    LANE(products) += (double)g * h;
    if (centered) LANE(sums) += (double)g;
  });
  const float mean_product = (float)(join_lanes(products) / n);
  const float mean_g = centered ? (float)(join_lanes(sums) / n) : 0.0f;
  EACH(i, n) {
    float g = dy[i] * norm_factor(kind, w[i]);
    float h = (centered ? x[i] - mean : x[i]) * r;
    float change = fma32(-h, mean_product, g);
    if (centered) change = change - mean_g;
    dx[i] = residual ? residual[i] + r * change : r * change;
  }
}

// A call for each kind of norm, so that the kind is a constant in its loops
#define OF_NORM_KIND(function)                                        \
  switch (a->kind) {                                                  \
    case NORM_RMS: function(a, row, NORM_RMS); break;                 \
    case NORM_RMS_OFFSET: function(a, row, NORM_RMS_OFFSET); break;   \
    case NORM_LAYER: function(a, row, NORM_LAYER); break;             \
  }

// Norms of rows x [rows][n] -> y [rows][n], r [rows] and mean [rows]
typedef struct {
  NormKind kind;
  float eps;
  int n;
  int number;  // of the norm in the model: the value of *not_finite if a row is not finite, see model_forward
  int *not_finite;
  const float *w;
  const float *b;
  const float *x;
  float *r;
  float *mean;
  float *y;
} Norm;

INLINE void norm_one(const Norm *a, int row, const NormKind kind) {
  long at = (long)row * a->n;
  int finite = norm(kind, a->eps, a->w, a->b, a->x + at, a->n, a->r + row, a->mean + row, a->y + at);
  if (!finite) set_flag(a->not_finite, a->number);
}

ROW(norm_row, Norm) { OF_NORM_KIND(norm_one) }

// From dy to dx, both [rows][n]
typedef struct {
  NormKind kind;
  int n;
  const float *w;
  const float *x;
  const float *r;
  const float *mean;
  const float *dy;
  const float *residual;  // [rows][n], or NULL
  float *dx;
} NormBackward;

INLINE void norm_backward_one(const NormBackward *a, int row, const NormKind kind) {
  long at = (long)row * a->n;
  const float *residual = a->residual ? a->residual + at : NULL;
  norm_backward(kind, a->w, a->dy + at, a->x + at, a->n, a->r[row], a->mean[row], residual, a->dx + at);
}

ROW(norm_backward_row, NormBackward) { OF_NORM_KIND(norm_backward_one) }

// ------------------------------------------------------------------------------------------------- rotations

// Rule 5, definition: rows.rotate: (a, b) -> (a c - b s, b c + a s) for the elements (d, d + half) of
// a head, with s times `way`: 1 forward, -1 backward. cosine and sine [half]; y may be x.
INLINE void rotate(const float *x, const float *cosine, const float *sine, const float way, int half,
                   float *y) {
  EACH(d, half) {
    float a = x[d];
    float b = x[d + half];
    float c = cosine[d];
    float s = way * sine[d];
    y[d] = a * c - b * s;
    y[d + half] = b * c + a * s;
  }
}

// ----------------------------------------------------------------------------------------------- activations

// Rule 5, definition: rows.activate. Each activation has a function and its derivative.

#define ROOT_HALF 0.707106781f
#define ROOT_2_PI 0.797884561f         // sqrt(2 / pi)
#define INVERSE_ROOT_2PI 0.398942280f  // 1 / sqrt(2 pi)
#define CUBIC 0.044715f

INLINE float silu(float x) { return x * sigmoid32(x); }
INLINE float silu_slope(float x) {
  float s = sigmoid32(x);
  return s * fma32(x, 1.0f - s, 1.0f);
}

INLINE float gelu(float x) { return 0.5f * x * (1.0f + erf32(x * ROOT_HALF)); }
INLINE float gelu_slope(float x) {
  float cdf = 0.5f * (1.0f + erf32(x * ROOT_HALF));
  return fma32(x * INVERSE_ROOT_2PI, exp32(-0.5f * x * x), cdf);
}

INLINE float gelu_tanh(float x) {
  return 0.5f * x * (1.0f + tanh32(ROOT_2_PI * fma32(CUBIC * x * x, x, x)));
}
INLINE float gelu_tanh_slope(float x) {
  float t = tanh32(ROOT_2_PI * fma32(CUBIC * x * x, x, x));
  float inner_slope = ROOT_2_PI * fma32(3.0f * CUBIC * x, x, 1.0f);
  return fma32(0.5f * x * (1.0f - t * t), inner_slope, 0.5f * (1.0f + t));
}

// A line for each ActivationKind. The switches below have no default, so the compiler names a kind without a
// line.
#define ACTIVATIONS(WITH)          \
  WITH(ACT_SILU, silu, silu_slope) \
  WITH(ACT_GELU, gelu, gelu_slope) \
  WITH(ACT_GELU_TANH, gelu_tanh, gelu_tanh_slope)

INLINE float activation(const ActivationKind kind, float x) {
#define VALUE(kind, value, slope) \
  case kind: return value(x);
  switch (kind) { ACTIVATIONS(VALUE) }
  __builtin_unreachable();
}

INLINE float activation_slope(const ActivationKind kind, float x) {
#define SLOPE(kind, value, slope) \
  case kind: return slope(x);
  switch (kind) { ACTIVATIONS(SLOPE) }
  __builtin_unreachable();
}

// `gated`: x [rows][2 n] has n gates, then n ups; y = act(gate) up. Else x [rows][n], y = act(x). y [rows][n]
typedef struct {
  ActivationKind kind;
  int gated;
  int n;
  const float *x;
  float *y;
} Activation;

enum { ACTIVATION_ROW = 256 };  // short, so that a few tokens are enough rows for a GPU
INLINE int activation_rows(int n) { return (n + ACTIVATION_ROW - 1) / ACTIVATION_ROW; }

INLINE void activation_one(const Activation *a, int row, const ActivationKind kind) {
  const int n = a->n;
  const int begin = row % activation_rows(n) * ACTIVATION_ROW;
  const long token = row / activation_rows(n);
  const int count = least(ACTIVATION_ROW, n - begin);
  const float *x = a->x + token * n * (a->gated ? 2 : 1) + begin;
  float *y = a->y + token * n + begin;
  if (a->gated) {
    EACH_OF_MANY(i, count) y[i] = activation(kind, fixed_at(x, i)) * fixed_at(x, n + i);
  } else {
    EACH_OF_MANY(i, count) y[i] = activation(kind, fixed_at(x, i));
  }
}

// The kind is a constant in each loop.
ROW(activation_row, Activation) {
#define ONE(kind, value, slope) \
  case kind: activation_one(a, row, kind); break;
  switch (a->kind) { ACTIVATIONS(ONE) }
}

// From dy [rows][n] to dx, which has the shape of x
typedef struct {
  ActivationKind kind;
  int gated;
  int n;
  const float *x;
  const float *dy;
  float *dx;
} ActivationBackward;

INLINE void activation_backward_one(const ActivationBackward *a, int row, const ActivationKind kind) {
  const int n = a->n;
  const float *x = a->x + (long)row * n * (a->gated ? 2 : 1);
  const float *dy = a->dy + (long)row * n;
  float *dx = a->dx + (long)row * n * (a->gated ? 2 : 1);
  if (a->gated) {
    EACH(i, n) {
      dx[n + i] = dy[i] * activation(kind, x[i]);
      dx[i] = dy[i] * x[n + i] * activation_slope(kind, x[i]);
    }
  } else {
    EACH(i, n) dx[i] = dy[i] * activation_slope(kind, x[i]);
  }
}

ROW(activation_backward_row, ActivationBackward) {
#define BACKWARD_ONE(kind, value, slope) \
  case kind: activation_backward_one(a, row, kind); break;
  switch (a->kind) { ACTIVATIONS(BACKWARD_ONE) }
}

// ------------------------------------------------------------------------------- embeddings, sums and copies

typedef struct {
  int hidden;
  NumberFormat format;
  float scale;
  const float *embedding;  // [vocabulary][hidden]
  const float *positions;  // [positions][hidden], or NULL
  const int *ids;          // [tokens]
  const int *position;     // [tokens]
  float *out;              // [tokens][hidden]
} Embedding;

// definition: network.embed
ROW(embedding_row, Embedding) {
  const int n = a->hidden;
  const float *entry = a->embedding + (long)a->ids[row] * n;
  float *out = a->out + (long)row * n;
  EACH(i, n) out[i] = entry[i] * a->scale;
  if (a->positions) {
    const float *position = a->positions + (long)a->position[row] * n;
    EACH(i, n) out[i] = out[i] + position[i];
  }
  round_row(a->format, 0, out, n);
}

// y [rows][n] = scale x; y may be x
typedef struct {
  int n;
  float scale;
  const float *x;
  float *y;
} Scaling;

ROW(scale_row, Scaling) {
  const float *x = a->x + (long)row * a->n;
  float *y = a->y + (long)row * a->n;
  EACH(i, a->n) y[i] = a->scale * x[i];
}

// y [rows][n] = x + change; y may be one of them
typedef struct {
  int n;
  const float *x;
  const float *change;
  float *y;
} Addition;

ROW(add_row, Addition) {
  const long at = (long)row * a->n;
  const float *x = a->x + at;
  const float *change = a->change + at;
  float *y = a->y + at;
  EACH(i, a->n) y[i] = x[i] + change[i];
}

// Keys and values of a prefix, for one head of a layer
typedef struct {
  long step;  // floats from one head of a layer to the next
  long from;
  long to;
  int n;
  float *keys;
  float *values;
} PrefixCopy;

ROW(copy_prefix_row, PrefixCopy) {
  float *keys = a->keys + row * a->step;
  float *values = a->values + row * a->step;
  EACH(i, a->n) keys[a->to + i] = keys[a->from + i];
  EACH(i, a->n) values[a->to + i] = values[a->from + i];
}
