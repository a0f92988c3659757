// Precision high: a block's numbers become integers, whose products have an exact sum, in any order.
//
//   X = clip(rint(x 2^s), -4095, 4095), ties to even: 2^s brings the block's largest |x| into [2048, 4096),
//       but s is at most 63
//   block = (float)(sum of X W) (2^-sx 2^-sw)
//
// |sum of X W| <= 128 4095^2 < 2^31, and the scales are 2^-63 .. 2^48, so the last product is exact. A block
// with a NaN, or with a number of 2^60 or above, has the scale NaN. definition: product.exact
//
// In memory a block is the float 2^-s, followed by pairs of integers of 16 bits, each pair in the memory of a
// float. So tiles step through floats in both precisions, with one term in each float or with two.
//
// The remainders X' and W' keep bits that X and W lose beside an outlier. A block is mostly small if more
// than half of its numbers are not zero and have |X| < 32. A product adds remainders if a block of w is
// mostly small, or in the forward pass a block of x. Gradients of weights never add remainders.
//
//   X' = rint((x 2^s - X) 2^11)
//   block += (float)(sum of X W' + X' W) (2^-sx 2^-sw 2^-11)
//
// |X'| <= 2^11, so this sum is below 2^31 too. In memory each block of a product is followed by a second one,
// the float 2^-11 if the block is mostly small, else 0, and then the integers X'.
#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

typedef int Ints __attribute__((ext_vector_type(COLS), aligned(4)));
typedef short Shorts __attribute__((ext_vector_type(COLS), aligned(2)));

enum { LARGEST_INTEGER = 4095, SMALL_INTEGER = 32, BLOCK_STEPS = 1 + BLOCK / 2 };
#define REMAINDER_SCALE 0x1p11f

INLINE int pairs_of(int terms) { return (terms + 1) / 2; }  // a zero follows an odd number of terms

// Returns the number of floats of `terms` terms, from the beginning of a block on
INLINE int steps_of(Precision precision, int terms) {
  if (precision == PRECISION_HIGHEST) return terms;
  int rest = terms % BLOCK;
  return terms / BLOCK * BLOCK_STEPS + (rest ? 1 + pairs_of(rest) : 0);
}

// Returns the same number for x or w of a product, which have remainders
INLINE int product_steps(Precision precision, int terms) {
  return steps_of(precision, terms) << (precision == PRECISION_HIGH);
}

// ------------------------------------------------------------------------------------------------- a chain

// sum + low x low w + high x high w, the low and high 16 bits of each element
INLINE Ints add_pairs(Ints sum, int x, Ints w) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpwssd_epi32((__m512i)sum, _mm512_set1_epi32(x), (__m512i)w);
#elif defined(__AVX512BW__)
  return sum + (Ints)_mm512_madd_epi16(_mm512_set1_epi32(x), (__m512i)w);
#elif defined(__AVXVNNI__)
  const __m256i pair = _mm256_set1_epi32(x);
  sum.lo = (__typeof__(sum.lo))_mm256_dpwssd_avx_epi32((__m256i)sum.lo, pair, (__m256i)w.lo);
  sum.hi = (__typeof__(sum.hi))_mm256_dpwssd_avx_epi32((__m256i)sum.hi, pair, (__m256i)w.hi);
  return sum;
#elif defined(__AVX2__)
  const __m256i pair = _mm256_set1_epi32(x);
  sum.lo += (__typeof__(sum.lo))_mm256_madd_epi16(pair, (__m256i)w.lo);
  sum.hi += (__typeof__(sum.hi))_mm256_madd_epi16(pair, (__m256i)w.hi);
  return sum;
#elif defined(__SSE2__)
  const __m128i pair = _mm_set1_epi32(x);
  sum.lo.lo += (__typeof__(sum.lo.lo))_mm_madd_epi16(pair, (__m128i)w.lo.lo);
  sum.lo.hi += (__typeof__(sum.lo.lo))_mm_madd_epi16(pair, (__m128i)w.lo.hi);
  sum.hi.lo += (__typeof__(sum.lo.lo))_mm_madd_epi16(pair, (__m128i)w.hi.lo);
  sum.hi.hi += (__typeof__(sum.lo.lo))_mm_madd_epi16(pair, (__m128i)w.hi.hi);
  return sum;
#else
  return sum + (Ints)((int16_t)x) * ((w << 16) >> 16) + (Ints)(x >> 16) * (w >> 16);
#endif
}

// One step of a sum: x is a float, or a pair for 16 pairs
INLINE Wide chain_step(const float *x, Wide w, Wide sum, const int is_high) {
  return is_high ? (Wide)add_pairs((Ints)sum, (int)as_bits(*x), (Ints)w) : fma_wide((Wide)*x, w, sum);
}

// The sum of a block, from the sum of its steps and the scales before them
INLINE Wide sum_of_block(Wide sum, float x_scale, Wide w_scale, const int is_high) {
  return is_high ? __builtin_convertvector((Ints)sum, Wide) * (x_scale * w_scale) : sum;
}

// ---------------------------------------------------------------------------------- from numbers to integers

typedef struct {
  Wide up;    // 2^s
  Wide down;  // 2^-s, or NaN
} Scales;

INLINE Ints size_bits(Wide x) { return (Ints)x & 0x7fffffff; }

// Returns the scales of blocks from the bits of their largest |x|
INLINE Scales scales_of(Ints largest) {
  const Ints limit = 127 + 60;
  const Ints exponent = __builtin_elementwise_max(largest >> 23, (Ints)(127 + 11 - 63));
  Ints down = (exponent - 11) << 23;
  down = exponent >= limit ? (Ints)0x7fc00000 : down;
  return (Scales){.up = (Wide)((127 + 127 + 11 - exponent) << 23), .down = (Wide)down};
}

INLINE Ints integers_of(Wide x, Wide up) {
  const Wide whole = 0x1.8p23f;  // between 2^23 and 2^24 a float is an integer, so the sum rounds
  const Ints n = (Ints)(x * up + whole) - (Ints)whole;
  const Ints most = LARGEST_INTEGER;
  return __builtin_elementwise_max(__builtin_elementwise_min(n, most), -most);
}

// The remainders of integers X
INLINE Ints remainders_of(Wide x, Wide up, Ints X) {
  return integers_of(x * up - __builtin_convertvector(X, Wide), (Wide)REMAINDER_SCALE);
}

// Returns 1 for each number that is not zero and becomes a small integer
INLINE Ints small_ones(Wide x, Ints X) {
  return (X < SMALL_INTEGER) & (X > -SMALL_INTEGER) & (x != 0.0f) & 1;
}

// Returns the first float of remainders, from the number of small integers among n
INLINE Wide remainder_weight(Ints small, int n) {
  return (Wide)((2 * small > n) & (Ints)(Wide)(1.0f / REMAINDER_SCALE));
}

// The integers of the terms k .. k + 15 of a row, to their place in a block
INLINE void put_row(float *block, int k, Ints X) {
  *(Shorts *)(block + k / 2) = __builtin_convertvector(X, Shorts);
}

// The integers of n terms. Of a whole block the size is a constant, which makes vectors.
INLINE void copy_integers(float *to, const float *integers, int n) {
  if (n == BLOCK) copy_floats(to, integers, BLOCK / 2);
  else copy_floats(to, integers, pairs_of(n));
}

// A row x [terms] to its blocks, each with its remainders; where a row is not `asked`, none is mostly small
static void integer_row(const float *x, int terms, int asked, float *to) {
  for (int k0 = 0; k0 < terms; k0 += BLOCK) {
    const int n = least(BLOCK, terms - k0);
    float *rest = to + steps_of(PRECISION_HIGH, n);
    float padded[BLOCK];
    const float *block = x + k0;
    if (n < BLOCK) {
      zero_floats(padded, BLOCK);
      copy_floats(padded, block, n);
      block = padded;
    }
    Ints largest = 0;
    for (int k = 0; k < BLOCK; k += COLS)
      largest = __builtin_elementwise_max(largest, size_bits(wide_at(block + k)));
    const Scales scales = scales_of((Ints)__builtin_reduce_max(largest));
    float integers[BLOCK / 2];
    float remainders[BLOCK / 2];
    Ints small = 0;
    for (int k = 0; k < BLOCK; k += COLS) {
      const Wide some = wide_at(block + k);
      const Ints X = integers_of(some, scales.up);
      small += small_ones(some, X);
      put_row(integers, k, X);
      put_row(remainders, k, remainders_of(some, scales.up, X));
    }
    copy_integers(to + 1, integers, n);
    copy_integers(rest + 1, remainders, n);
    to[0] = scales.down[0];
    rest[0] = asked ? remainder_weight((Ints)__builtin_reduce_add(small), n)[0] : 0.0f;
    to = rest + steps_of(PRECISION_HIGH, n);
  }
}

INLINE Wide some_of(const float *from, int cols) {
  if (cols == COLS) return wide_at(from);
  float columns[COLS] = {0};
  copy_floats(columns, from, cols);
  return wide_at(columns);
}

// One block of each of `cols` <= 16 columns, from [terms][ld], to [steps][16], and its remainders to `rest`
// unless NULL; zeros beyond `cols`
INLINE void integer_columns(const float *from, long ld, int terms, const int cols, float *to, float *rest) {
  Ints largest = 0;
  for (int t = 0; t < terms; t++)
    largest = __builtin_elementwise_max(largest, size_bits(some_of(from + t * ld, cols)));
  const Scales scales = scales_of(largest);
  Ints small = 0;
  *(Wide *)to = scales.down;
  for (int pair = 0; pair < pairs_of(terms); pair++) {
    Ints integers = 0;
    Ints remainders = 0;
    for (int i = 0; i < 2; i++) {
      const int t = 2 * pair + i;
      const Wide x = t < terms ? some_of(from + t * ld, cols) : (Wide)0.0f;
      const Ints X = integers_of(x, scales.up);
      integers |= (X & 0xffff) << 16 * i;
      if (!rest) continue;
      small += small_ones(x, X);
      remainders |= (remainders_of(x, scales.up, X) & 0xffff) << 16 * i;
    }
    *(Ints *)(to + (1 + pair) * COLS) = integers;
    if (rest) *(Ints *)(rest + (1 + pair) * COLS) = remainders;
  }
  if (rest) *(Wide *)rest = remainder_weight(small, terms);
}

// One block of w with its remainders, to [2 steps][16]: of each of `cols` rows [cols][ld], or columns
static void integer_panel(const float *from, long ld, int terms, int cols, int by_columns, float *to) {
  if (by_columns) {
    integer_columns(from, ld, terms, cols, to, to + steps_of(PRECISION_HIGH, terms) * COLS);
    return;
  }
  for (int j = 0; j < COLS; j++) {
    float row[2 * BLOCK_STEPS] = {0};
    if (j < cols) integer_row(from + j * ld, terms, 1, row);
    for (int i = 0; i < product_steps(PRECISION_HIGH, terms); i++) to[i * COLS + j] = row[i];
  }
}
