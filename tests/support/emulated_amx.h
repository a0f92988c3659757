// AMX on CPUs without it: clang's `-include` puts this before the kernels, whose instructions become
// functions of C.
//
// They do what Intel's manual says (volume 2, LDTILECFG to TILEZERO), for one thread: eight registers of 16
// rows of 64 bytes. Where the processor would fault, the process says why and aborts. It does so too without
// the system's permission. Not emulated: time, and a fault for an address without memory.
#pragma once
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define __AMX_INT8__ 1
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbssd
#define _tile_loadconfig amx_load_configuration
#define _tile_release amx_release
#define _tile_loadd amx_load
#define _tile_stored amx_store
#define _tile_zero amx_zero
#define _tile_dpbssd amx_add_products
#define syscall amx_system_call

enum { AMX_REGISTERS = 8, AMX_ROWS = 16, AMX_BYTES = 64 };

static int amx_permitted;  // of the process
static _Thread_local struct {
  int configured;
  int rows[AMX_REGISTERS];
  int bytes[AMX_REGISTERS];  // of a row
  int8_t data[AMX_REGISTERS][AMX_ROWS][AMX_BYTES];
} amx;

static inline void amx_check(int right, const char *rule) {
  if (right) return;
  fprintf(stderr, "AMX fault: not so: %s\n", rule);
  abort();
}
#define AMX_CHECK(rule) amx_check(rule, #rule)

// arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) of Linux
static inline long amx_system_call(long number, ...) {
  va_list arguments;
  va_start(arguments, number);
  const long code = va_arg(arguments, long);
  const long feature = va_arg(arguments, long);
  va_end(arguments);
  if (number != 158 || code != 0x1023 || feature != 18) return -1;
  amx_permitted = 1;
  return 0;
}

static inline void amx_load_configuration(const void *memory) {
  const uint8_t *bytes = memory;
  AMX_CHECK(amx_permitted);
  AMX_CHECK(bytes[0] == 1);  // the palette
  for (int i = 1; i < 16; i++) AMX_CHECK(!bytes[i]);
  memset(&amx, 0, sizeof amx);
  for (int i = 0; i < 16; i++) {
    const int row_bytes = bytes[16 + 2 * i] | bytes[17 + 2 * i] << 8;
    const int rows = bytes[48 + i];
    AMX_CHECK(!row_bytes == !rows);
    AMX_CHECK(i < AMX_REGISTERS || !rows);
    AMX_CHECK(row_bytes <= AMX_BYTES && rows <= AMX_ROWS);
    if (i >= AMX_REGISTERS) continue;
    amx.rows[i] = rows;
    amx.bytes[i] = row_bytes;
  }
  amx.configured = 1;
}

static inline void amx_release(void) { memset(&amx, 0, sizeof amx); }

static inline void amx_zero(int to) {
  AMX_CHECK(amx.configured && amx.rows[to]);
  memset(amx.data[to], 0, sizeof amx.data[to]);
}

static inline void amx_load(int to, const void *from, long stride) {
  amx_zero(to);
  for (int i = 0; i < amx.rows[to]; i++)
    memcpy(amx.data[to][i], (const char *)from + i * stride, (size_t)amx.bytes[to]);
}

static inline void amx_store(int from, void *to, long stride) {
  AMX_CHECK(amx.configured && amx.rows[from]);
  for (int i = 0; i < amx.rows[from]; i++)
    memcpy((char *)to + i * stride, amx.data[from][i], (size_t)amx.bytes[from]);
}

static inline void amx_add_products(int to, int a, int b) {
  AMX_CHECK(amx.configured && amx.rows[to] && amx.rows[a] && amx.rows[b]);
  AMX_CHECK(to != a && a != b && b != to);
  AMX_CHECK(amx.rows[to] == amx.rows[a]);
  AMX_CHECK(amx.bytes[to] == amx.bytes[b]);
  AMX_CHECK(amx.bytes[a] == 4 * amx.rows[b]);
  AMX_CHECK(amx.bytes[to] % 4 == 0);
  for (int i = 0; i < amx.rows[to]; i++) {
    uint32_t sums[AMX_BYTES / 4];  // which wrap
    memcpy(sums, amx.data[to][i], sizeof sums);
    for (int k = 0; k < amx.rows[b]; k++)
      for (int j = 0; j < amx.bytes[to] / 4; j++)
        for (int byte = 0; byte < 4; byte++)
          sums[j] += (uint32_t)(amx.data[a][i][4 * k + byte] * amx.data[b][k][4 * j + byte]);
    memcpy(amx.data[to][i], sums, sizeof sums);
  }
}
