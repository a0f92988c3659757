// Deliberate rounding of float32 numbers to the number formats of other stacks. The results are float32
// numbers. Floating formats round to nearest, ties to even. Formats of 8 bits have a scale for each row,
// max |x| / largest. A number beyond the largest becomes the largest in 8 bits, and infinity in 16 bits.
// Micikevicius et al., 2022.
#include "operations.h"

typedef struct {
  int dropped;   // bits of float32 that the format lacks
  int smallest;  // exponent of its smallest normal number
  float largest;
  float beyond;  // the result for larger numbers
} Format;

INLINE Format format_of(const NumberFormat format) {
  switch (format) {
    case FORMAT_BFLOAT16: return (Format){16, -126, 0x1.fep127f, INFINITE};
    case FORMAT_FLOAT16: return (Format){13, -14, 65504.0f, INFINITE};
    case FORMAT_FLOAT8_E4M3: return (Format){20, -6, 448.0f, 448.0f};
    case FORMAT_FLOAT8_E5M2: return (Format){21, -14, 57344.0f, 57344.0f};
    case FORMAT_INT8: return (Format){0, 0, 127.0f, 127.0f};
    case FORMAT_FLOAT32: break;
  }
  return (Format){0};
}

INLINE float power_of_two(int exponent) { return as_float((uint32_t)(exponent + 127) << 23); }

// To the nearest number of a floating format; definition: rounding.nearest
INLINE float round_float(const Format f, float x) {
  if (x != x) return x;
  const float size = abs32(x);
  float y;
  if (f.smallest > -126 && size < power_of_two(f.smallest)) {
    // around this number float32 has the spacing of the format's denormal numbers
    float start = 1.5f * power_of_two(f.smallest + f.dropped);
    y = (size + start) - start;
  } else {
    uint32_t bits = as_bits(size);
    uint32_t odd = (bits >> f.dropped) & 1;
    uint32_t half = (1u << (f.dropped - 1)) - 1;
    y = as_float((bits + half + odd) & -(1u << f.dropped));
  }
  return with_sign(y > f.largest ? f.beyond : y, x);
}

// To the nearest integer of int8
INLINE float round_integer(const Format f, float x) {
  float y = __builtin_rintf(x);
  if (y > f.largest) return f.largest;
  return y < -f.largest ? -f.largest : y;
}

// The scale of a row: its largest |x| over the format's largest number, NaN if an element is
INLINE float scale_of(const Format f, const float *x, int n) {
  LANE_VALUES(uint32_t, size, 0);
  IN_LANES(i, n, {
    uint32_t bits = as_bits(x[i]) & 0x7fffffffu;
    LANE(size) = bits > LANE(size) ? bits : LANE(size);
  });
  return as_float(largest_bits(size)) / f.largest;
}

// definition: rounding.rounded: a row x [n] in place. `scaled`: formats of 8 bits take the row's
// scale, else 1 (the usual scale of a cache in fp8); int8 always has one.
static void round_row(NumberFormat format, int scaled, float *x, int n) {
  if (format == FORMAT_FLOAT32) return;
  const Format f = format_of(format);
  const int eight_bits = format >= FORMAT_FLOAT8_E4M3;
  float scale = 1.0f;
  if (format == FORMAT_INT8 || (scaled && eight_bits)) {
    scale = scale_of(f, x, n);
    if (!(scale > 0.0f)) {  // zeros, or a NaN
      EACH(i, n) x[i] = 0.0f * x[i];
      return;
    }
  }
  EACH(i, n) {
    float scaled_x = x[i] / scale;
    float y = format == FORMAT_INT8 ? round_integer(f, scaled_x) : round_float(f, scaled_x);
    x[i] = y * scale;
  }
}

typedef struct {
  NumberFormat format;
  int scaled;
  float *x;
  int n;
} Rounding;

ROW(rounding_row, Rounding) { round_row(a->format, a->scaled, a->x + (long)row * a->n, a->n); }

// ===================================================================================================== calls
// The code below runs on the host, see operations.h.
#ifndef GPU_KERNELS

// Rows x [rows][n] in place; `scaled`: see round_row
void round_tensor(NumberFormat format, int scaled, float *x, long rows, long n) {
  if (format == FORMAT_FLOAT32) return;
  for_rows((int)rows, rounding_row, &(Rounding){.format = format, .scaled = scaled, .x = x, .n = (int)n});
}

static void round_rows(NumberFormat format, float *x, int rows, int n) {
  round_tensor(format, 1, x, rows, n);
}
#endif
