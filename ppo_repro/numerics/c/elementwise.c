// Elementary functions of arrays: y_i = f(x_i)
#include "elementary.h"

#define OVER_ARRAY(name, type, f) \
  void name(const type *x, type *y, long n) { \
    for (long i = 0; i < n; i++) y[i] = f(x[i]); \
  }

// 1 / (1 + e^-x), exact to 1e-15, relative
INLINE double sigmoid64(double x) { return 1.0 / (1.0 + exp64(-x)); }

// ln(1 + e^x) = max(x, 0) + ln(1 + e^-|x|)
INLINE double softplus64(double x) {
  return (x > 0 ? x : 0) + log1p64(exp64(-abs64(x)));
}

OVER_ARRAY(exp_float32, float, exp32)
OVER_ARRAY(sigmoid_float32, float, sigmoid32)
OVER_ARRAY(tanh_float32, float, tanh32)
OVER_ARRAY(erf_float32, float, erf32)
OVER_ARRAY(exp_float64, double, exp64)
OVER_ARRAY(log_float64, double, log64)
OVER_ARRAY(sigmoid_float64, double, sigmoid64)
OVER_ARRAY(softplus_float64, double, softplus64)

void sin_cos_float64(const double *x, double *sine, double *cosine, long n) {
  for (long i = 0; i < n; i++) sin_cos64(x[i], sine + i, cosine + i);
}
