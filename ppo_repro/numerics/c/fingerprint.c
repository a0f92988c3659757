// A number that follows from the bits of a tensor, to see whether it has changed.
#include "kernels.h"

enum { HASHES = 64, HASHED = 1 << 14 };  // hashes side by side; elements of a task

INLINE uint64_t hash_next(uint64_t hash, uint64_t x) {
  hash = (hash ^ x) * 0x9E3779B97F4A7C15u;
  return hash ^ hash >> 32;
}

// Each step is a bijection of the hash and of x, so one element that changes always shows. The rotation brings the sign,
// on which products of lower bits do not depend, into the next product.
static uint64_t hash_piece(const uint32_t *x, long n) {
  uint32_t hash[HASHES];
  for (int l = 0; l < HASHES; l++) hash[l] = (uint32_t)l;
  long at = 0;
  for (; at + HASHES <= n; at += HASHES)
    for (int l = 0; l < HASHES; l++) {
      uint32_t mixed = hash[l] ^ x[at + l];
      hash[l] = (mixed << 13 | mixed >> 19) * 0x9E3779B1u;
    }
  uint64_t all = (uint64_t)n;
  for (; at < n; at++) all = hash_next(all, x[at]);
  for (int l = 0; l < HASHES; l++) all = hash_next(all, hash[l]);
  return all;
}

typedef struct { const uint32_t *x; long n; uint64_t *hashes; } Hashed;

static void hash_task(void *argument, int index) {
  const Hashed *h = argument;
  long at = (long)index * HASHED, left = h->n - at;
  h->hashes[index] = hash_piece(h->x + at, left < HASHED ? left : HASHED);
}

EXPORT uint64_t fingerprint(const uint32_t *x, long n) {
  int tasks = (int)((n + HASHED - 1) / HASHED);
  uint64_t *hashes = malloc(sizeof(uint64_t) * (size_t)(tasks + 1)), all = (uint64_t)n;
  if (!hashes) abort();
  parallel_for(tasks, hash_task, &(Hashed){x, n, hashes});
  for (int i = 0; i < tasks; i++) all = hash_next(all, hashes[i]);
  free(hashes);
  return all;
}
