// Single operations, each rounded once. Nothing here needs a library or an
// operating system: a compiler for C11 and IEEE 754 compiles it for a CPU and for a GPU.
#ifndef ARITHMETIC_H
#define ARITHMETIC_H
#include <stddef.h>
#include <stdint.h>

enum { LANES = 16 };  // rule 3: partial sums of a row

#define INLINE static inline __attribute__((always_inline))
#define INFINITE __builtin_inff()
#define NOT_A_NUMBER __builtin_nan("")

INLINE int least(int a, int b) { return a < b ? a : b; }
INLINE long multiple_of_16(long n) { return (n + 15) & ~15L; }

// Numbers as their bits, and bits as their number
INLINE float as_float(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}

INLINE uint32_t as_bits(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
}

INLINE double as_double(uint64_t bits) {
  double x;
  __builtin_memcpy(&x, &bits, 8);
  return x;
}

INLINE uint64_t as_bits64(double x) {
  uint64_t bits;
  __builtin_memcpy(&bits, &x, 8);
  return bits;
}

// |x|, exactly
INLINE float abs32(float x) { return as_float(as_bits(x) & 0x7fffffffu); }
INLINE double abs64(double x) { return as_double(as_bits64(x) & 0x7fffffffffffffffu); }

// size >= 0 with the sign of x
INLINE float with_sign(float size, float x) { return as_float(as_bits(size) | (as_bits(x) & 0x80000000u)); }

// Infinity and NaN have the largest exponent
INLINE int is_finite32(float x) { return (as_bits(x) & 0x7fffffffu) < 0x7f800000u; }
INLINE int is_finite64(double x) { return (as_bits64(x) & 0x7fffffffffffffffu) < 0x7ff0000000000000u; }

INLINE float sqrt32(float x) { return __builtin_sqrtf(x); }
INLINE double sqrt64(double x) { return __builtin_sqrt(x); }

// a b + c in float32, rounded once
#if defined(__FMA__) || defined(__aarch64__) || defined(__NVPTX__)
INLINE float fma32(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
// A CPU without fma: the product is exact in float64, the sum is rounded to odd there, and 53 bits of that
// round to the right 24.
INLINE float fma32(float a, float b, float c) {
  double product = (double)a * b;
  double sum = product + c;
  double rest = sum - product;
  double error = (product - (sum - rest)) + (c - rest);
  uint64_t bits = as_bits64(sum);
  int inexact = error > 0 || error < 0;
  int away = (error > 0) == (sum > 0);
  if (inexact && !(bits & 1)) bits += away ? 1 : -1;
  return (float)as_double(bits);
}
#endif
#endif
