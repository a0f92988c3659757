// What the first use of the library checks: the CPU's state and a known answer.

// The bits of 1e-40 x 1, computed now: 0 if denormal numbers are flushed in the calling thread
EXPORT uint32_t denormal_product(void) {
  volatile float small = 1e-40f, one = 1.0f;
  return as_bits(small * one);
}

// The i-th number of a fixed sequence in [-1, 1)
static float numbered(uint32_t i) {
  i = (i ^ (i >> 16)) * 0x7feb352du;
  i = (i ^ (i >> 15)) * 0x846ca68bu;
  return (float)(int32_t)(i ^ (i >> 16)) * 0x1p-31f;
}

// FNV-1a, gone on with over the bytes of some floats
static uint64_t hashed(uint64_t hash, const float *values, long count) {
  for (long i = 0; i < count; i++)
    for (int shift = 0; shift < 32; shift += 8)
      hash = (hash ^ ((as_bits(values[i]) >> shift) & 255)) * 0x100000001b3u;
  return hash;
}

// The digest of 64 sums of 300 products each
EXPORT uint64_t known_answer(void) {
  float y[64] = {0};
  for (uint32_t n = 0; n < 64; n++)
    for (uint32_t from = 0; from < 300; from += BLOCK) {
      float block = 0;
      for (uint32_t k = from; k < from + BLOCK && k < 300; k++)
        block = fma32(numbered(n * 300 + k), numbered(k + 7), block);
      y[n] += block;
    }
  return hashed(0xcbf29ce484222325u, y, 64);
}
