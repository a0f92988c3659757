// Elementary functions, written out: no branches, so that loops over them vectorise, and no library but sqrt
// and fma.
//
// float32 functions use fma32; float64 functions use + - * / only, because a baseline CPU has no float64 fma.
// Errors are in units in the last place of the result (ulp); `tests/numerics/test_elementary.py` measures
// them. Coefficients: Cephes (Moshier, 1992: expf.c, logf.c, tanhf.c, ndtrf.c), fdlibm (Sun, 1993: e_log.c);
// reduction of arguments by Cody and Waite, Software Manual for the Elementary Functions, 1980.
#ifndef ELEMENTARY_H
#define ELEMENTARY_H
#include "arithmetic.h"

// x + ROUND - ROUND is x rounded to an integer, which the low bits of the sum are
#define ROUND32 12582912.0f           // 1.5 2^23
#define ROUND64 6755399441055744.0    // 1.5 2^52
#define LOG2_E 1.4426950408889634
#define LN2 0.6931471805599453
// ln 2 in two parts: the first has so few bits that its products with exponents are exact
#define LN2_HIGH32 0.693359375f
#define LN2_LOW32 -2.12194440e-4f
#define LN2_HIGH64 6.93147180369123816490e-01
#define LN2_LOW64 1.90821492927058770002e-10

// e^x for every x, 1.01 ulp: denormal below -87.3, 0 below -103.98, infinite above 88.73; NaN of NaN.
// x = n ln 2 + r; a polynomial in r; times 2^n in two factors, because 2^n may be no normal number.
INLINE float exp32(float x) {
  x = x < -105.0f ? -105.0f : x;
  x = x > 89.5f ? 89.5f : x;
  float sum = fma32(x, (float)LOG2_E, ROUND32);
  float n = sum - ROUND32;
  float r = fma32(n, -LN2_LOW32, fma32(n, -LN2_HIGH32, x));
  float y = fma32(r, 1.9875691500e-4f, 1.3981999507e-3f);
  y = fma32(y, r, 8.3334519073e-3f);
  y = fma32(y, r, 4.1665795894e-2f);
  y = fma32(y, r, 1.6666665459e-1f);
  y = fma32(y, r, 5.0000001201e-1f);
  y = fma32(y, r * r, r) + 1.0f;
  int32_t whole = (int32_t)(as_bits(sum) - as_bits(ROUND32));
  int32_t half = whole >> 1;
  return y * as_float((uint32_t)(half + 127) << 23) * as_float((uint32_t)(whole - half + 127) << 23);
}

// 1 / (1 + e^-x) for every x, 2.5 ulp; 0 below -88.73
INLINE float sigmoid32(float x) { return 1.0f / (1.0f + exp32(-x)); }

// tanh x for every x, 1.4 ulp: an odd polynomial below 0.625, else 1 - 2 / (e^2|x| + 1)
INLINE float tanh32(float x) {
  float size = abs32(x);
  float z = x * x;
  float y = fma32(z, -5.70498872745e-3f, 2.06390887954e-2f);
  y = fma32(y, z, -5.37397155531e-2f);
  y = fma32(y, z, 1.33314422036e-1f);
  y = fma32(y, z, -3.33332819422e-1f);
  float small = fma32(y * z, x, x);
  float large = 1.0f - 2.0f / (exp32(2.0f * size) + 1.0f);
  return size < 0.625f ? small : with_sign(large, x);
}

// cap tanh(x / cap), and its derivative from the result. definition: rows.soft_cap
INLINE float soft_cap(float x, float cap) { return cap * tanh32(x / cap); }
INLINE float soft_cap_slope(float y, float cap) {
  float t = y / cap;
  return fma32(-t, t, 1.0f);
}

// erf x = 2 / sqrt(pi) integral of e^-t^2 from 0 to x, for every x, 1.2 ulp: an odd polynomial below 1, else
// 1 - e^-q(|x|). The minimax polynomial q is within 1.1e-9 of -ln(1 - erf) where that matters, up to 3.95.
INLINE float erf32(float x) {
  float size = abs32(x);
  float z = x * x;
  float y = fma32(z, 7.853861353153693e-5f, -8.010193625184903e-4f);
  y = fma32(y, z, 5.188327685732524e-3f);
  y = fma32(y, z, -2.685381193529856e-2f);
  y = fma32(y, z, 1.128358514861418e-1f);
  y = fma32(y, z, -3.761262582423300e-1f);
  y = fma32(y, z, 1.28379165726710e-1f);
  float small = fma32(y, x, x);
  float t = size > 4.0f ? 4.0f : size;
  float q = fma32(t, -1.86379095736e-4f, 2.94765740237e-3f);
  q = fma32(q, t, -2.18380605712e-2f);
  q = fma32(q, t, 1.03106747723e-1f);
  q = fma32(q, t, 6.38144840332e-1f);
  q = fma32(q, t, 1.12708918582f);
  q = fma32(q, t, 3.41524044237e-4f);
  float large = 1.0f - exp32(-q);
  return size < 1.0f ? small : with_sign(large, x);
}

// ln x of a positive normal x, 1 ulp. x = m 2^e with sqrt(1/2) <= m < sqrt(2), f = m - 1, s = f / (2 + f),
// ln m = f - f^2 / 2 + s (f^2 / 2 + R(s^2)).
INLINE double log64(double x) {
  uint64_t bits = as_bits64(x) + (0x3ff0000000000000u - 0x3fe6a09e00000000u);
  double e = as_double((bits >> 52) | as_bits64(4503599627370496.0)) - (4503599627370496.0 + 1023.0);
  double f = as_double((bits & 0x000fffffffffffffu) + 0x3fe6a09e00000000u) - 1.0;
  double half = 0.5 * f * f;
  double s = f / (2.0 + f);
  double z = s * s;
  double y = 1.479819860511658591e-01;
  y = y * z + 1.531383769920937332e-01;
  y = y * z + 1.818357216161805012e-01;
  y = y * z + 2.222219843214978396e-01;
  y = y * z + 2.857142874366239149e-01;
  y = y * z + 3.999999999940941908e-01;
  y = y * z + 6.666666666666735130e-01;
  return e * LN2_HIGH64 - ((half - (s * (half + y * z) + e * LN2_LOW64)) - f);
}

// ln(1 + x) of x >= 0, 1.3 ulp: ln of the rounded sum, and what the rounding took away
INLINE double log1p64(double x) {
  double sum = 1.0 + x;
  return log64(sum) + (x - (sum - 1.0)) / sum;
}

// e^x, 1 ulp, of x clamped to [-708, 709], where the result is a normal number; e^0 is exactly 1
INLINE double exp64(double x) {
  x = x < -708.0 ? -708.0 : x;
  x = x > 709.0 ? 709.0 : x;
  double sum = x * LOG2_E + ROUND64;
  double n = sum - ROUND64;
  double r = (x - n * LN2_HIGH64) - n * LN2_LOW64;
  double y = 1.0 / 6227020800.0;  // 1 / 13!
  y = y * r + 1.0 / 479001600.0;
  y = y * r + 1.0 / 39916800.0;
  y = y * r + 1.0 / 3628800.0;
  y = y * r + 1.0 / 362880.0;
  y = y * r + 1.0 / 40320.0;
  y = y * r + 1.0 / 5040.0;
  y = y * r + 1.0 / 720.0;
  y = y * r + 1.0 / 120.0;
  y = y * r + 1.0 / 24.0;
  y = y * r + 1.0 / 6.0;
  y = y * r + 0.5;
  y = y * (r * r) + r + 1.0;
  return y * as_double((as_bits64(sum) + 1023) << 52);
}

// sin x and cos x of 0 <= x < 2^20 radians, absolute error below 2e-16. x = n pi/2 + r, |r| <= pi/4; pi/2 is
// in three parts of 33 bits, whose products with n are exact; polynomials in r.
INLINE void sin_cos64(double x, double *sine, double *cosine) {
  double sum = x * 6.36619772367581382433e-01 + ROUND64;
  double n = sum - ROUND64;
  double high = x - n * 1.57079632673412561417e+00;
  double r = (high - n * 6.07710050630396597660e-11) - n * 2.02226624879595063154e-21;
  double z = r * r;
  double s = -1.0 / 1307674368000.0;   // 1 / 15!
  double c = 1.0 / 20922789888000.0;   // 1 / 16!
  s = s * z + 1.0 / 6227020800.0;
  s = s * z - 1.0 / 39916800.0;
  s = s * z + 1.0 / 362880.0;
  s = s * z - 1.0 / 5040.0;
  s = s * z + 1.0 / 120.0;
  s = s * z - 1.0 / 6.0;
  s = s * z * r + r;
  c = c * z - 1.0 / 87178291200.0;
  c = c * z + 1.0 / 479001600.0;
  c = c * z - 1.0 / 3628800.0;
  c = c * z + 1.0 / 40320.0;
  c = c * z - 1.0 / 720.0;
  c = c * z + 1.0 / 24.0;
  c = c * (z * z) - 0.5 * z + 1.0;
  uint64_t quadrant = as_bits64(sum);
  uint64_t odd = 0 - (quadrant & 1);  // sine and cosine change places
  uint64_t other = (as_bits64(s) ^ as_bits64(c)) & odd;
  *sine = as_double((as_bits64(s) ^ other) ^ ((quadrant & 2) << 62));
  *cosine = as_double((as_bits64(c) ^ other) ^ (((quadrant + 1) & 2) << 62));
}
#endif
