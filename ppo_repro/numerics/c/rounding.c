// Rounding on purpose to the number formats of other stacks: what a float32 number becomes there, as a float32 number.
// Floating formats round to nearest, ties to even. Formats of 8 bits have a scale for each row, max |x| / largest;
// beyond their largest they saturate, where 16 bits overflow to infinity. Micikevicius et al., 2022.
#include "kernels.h"

typedef struct { int dropped, smallest; float largest, beyond; } Format;  // bits dropped, exponent of the smallest normal
static const Format FORMATS[] = {
    [FORMAT_BFLOAT16] = {16, -126, 0x1.fep127f, INFINITY}, [FORMAT_FLOAT16] = {13, -14, 65504.0f, INFINITY},
    [FORMAT_FLOAT8_E4M3] = {20, -6, 448.0f, 448.0f},              [FORMAT_FLOAT8_E5M2] = {21, -14, 57344.0f, 57344.0f},
    [FORMAT_INT8] = {0, 0, 127.0f, 127.0f},
};

INLINE float power_of_two(int exponent) { return as_float((uint32_t)(exponent + 127) << 23); }

static float round_float(const Format *f, float x) {
  if (!isfinite(x)) return x;
  float magnitude = fabsf(x), y;
  if (f->smallest > -126 && magnitude < power_of_two(f->smallest)) {
    // float32 has the spacing of the format's denormal numbers around this number
    volatile float start = 1.5f * power_of_two(f->smallest + f->dropped);
    volatile float shifted = magnitude + start;
    y = shifted - start;
  } else {
    uint32_t bits = as_bits(magnitude), odd = (bits >> f->dropped) & 1;
    y = as_float((bits + ((1u << (f->dropped - 1)) - 1) + odd) & -(1u << f->dropped));
  }
  return copysignf(y > f->largest ? f->beyond : y, x);
}

// A row in place; `scaled`: formats of 8 bits take the row's scale, else 1 (the usual scale of a cache in fp8)
static void round_row(int format, int scaled, float *x, long n) {
  if (format == FORMAT_FLOAT32) return;
  const Format *f = &FORMATS[format];
  float scale = 1.0f;
  if (format == FORMAT_INT8 || (scaled && format >= FORMAT_FLOAT8_E4M3)) {
    float top = 0.0f;
    for (long i = 0; i < n; i++) top = fabsf(x[i]) > top || isnan(x[i]) ? fabsf(x[i]) : top;
    scale = top / f->largest;
    if (!(scale > 0.0f)) {
      for (long i = 0; i < n; i++) x[i] = 0.0f * x[i];
      return;
    }
  }
  for (long i = 0; i < n; i++) {
    float here = x[i] / scale, y;
    if (format == FORMAT_INT8) {
      y = rintf(here);
      y = y > f->largest ? f->largest : y < -f->largest ? -f->largest : y;
    } else {
      y = round_float(f, here);
    }
    x[i] = y * scale;
  }
}

typedef struct { int format; float *x; long n; } Rounded;
static void rounded_row(const void *argument, int t) {
  const Rounded *a = argument;
  round_row(a->format, 1, a->x + t * a->n, a->n);
}

// Rows [rows][n] in place
static void round_rows(int format, float *x, int rows, long n) {
  if (format != FORMAT_FLOAT32) for_rows(rows, rounded_row, &(Rounded){format, x, n});
}

void round_tensor(NumberFormat format, int scaled, float *x, long rows, long n) {
  for (long i = 0; i < rows; i++) round_row(format, scaled, x + i * n, n);
}
