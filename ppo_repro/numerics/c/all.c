// The kernels as one unit of compilation. A stand-in until the kernels of the models are here.
#include <math.h>
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#ifndef BLOCK_TERMS
#define BLOCK_TERMS 128
#endif

#if defined(__FMA__) || defined(__aarch64__)
static inline float fma32(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
// The product is exact in float64, the sum is rounded to odd there, and 53 bits of it round to the right 24.
static inline float fma32(float a, float b, float c) {
  double product = (double)a * b, sum = product + c, t = sum - product;
  double error = (product - (sum - t)) + (c - t);
  int64_t bits;
  memcpy(&bits, &sum, 8);
  if ((error > 0 || error < 0) && !(bits & 1)) bits += ((error > 0) == (sum > 0)) ? 1 : -1;
  memcpy(&sum, &bits, 8);
  return (float)sum;
}
#endif

static int thread_count = 1;

EXPORT void set_threads(int count) { thread_count = count; }

// The bits of 1e-40 x 1, computed now: 0 if denormal numbers are flushed in the calling thread.
EXPORT uint32_t denormal_product(void) {
  volatile float small = 1e-40f, one = 1.0f;
  float product = small * one;
  uint32_t bits;
  memcpy(&bits, &product, 4);
  return bits;
}

static float hashed(uint32_t i) {
  i = (i ^ (i >> 16)) * 0x7feb352du;
  i = (i ^ (i >> 15)) * 0x846ca68bu;
  return (float)(int32_t)(i ^ (i >> 16)) * 0x1p-31f;
}

// FNV-1a of 64 sums of 300 products each
EXPORT uint64_t known_answer(void) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (uint32_t n = 0; n < 64; n++) {
    float y = 0;
    for (uint32_t from = 0; from < 300; from += BLOCK_TERMS) {
      float block = 0;
      for (uint32_t k = from; k < from + BLOCK_TERMS && k < 300; k++)
        block = fma32(hashed(n * 300 + k), hashed(k + 7), block);
      y += block;
    }
    uint32_t bits;
    memcpy(&bits, &y, 4);
    for (int byte = 0; byte < 4; byte++) hash = (hash ^ ((bits >> (8 * byte)) & 255)) * 0x100000001b3u;
  }
  return hash;
}
