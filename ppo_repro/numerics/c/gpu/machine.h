// The machine that a kernel sees: threads, shared memory, barriers, shuffles, copies. Two forms: zig's clang
// for a GPU (PTX), and the host, where the tests run each thread as a fiber (tests/gpu/emulator). Kernels
// use nothing else of CUDA.
//
// A kernel is one function of one struct, which it gets by value. All thread blocks have their threads in one
// dimension. Shared memory is one array of floats, whose size the launch says.
//
//   KERNEL(name, Struct) { .. }  a kernel; `a` is the struct
//   thread_index, threads        the thread in its thread block, and how many there are
//   thread_block_x, .._y, .._z   the thread block in the grid; thread_blocks_x, .._y how many there are
//   barrier                      waits for all threads of the thread block, and shows what they wrote
//   meet_lanes                   the same for the 16 lanes that compute a row (lanes.h)
//   other_lane(x, mask)          x of the lane whose number differs in the bits `mask`, of 16
//   any_of_warp(x)               whether x is not 0 in one of the 32 threads of a warp, which all call it
//   lowest_bytes(x)              the lowest byte of each of 4 numbers, the first one lowest
//   not_ahead(x)                 x: no loop before keeps a register for what is computed from it
//   load_fixed(p)                *p in global memory, which no thread writes while the kernel runs
//   copy16, copy4                start a copy from global to shared memory of 16 or 4 bytes, zeros after the
//                                first `bytes`; commit_copies ends a group of copies, and wait_copies(n)
//                                waits until only the last n groups of this thread are on their way
//   load_matrices, multiply_bytes
//                                what tensor cores read and compute, by the 32 threads of a warp together. A
//                                warp multiplies 16 rows x 32 terms by 8 columns x 32 terms. Thread 4 g + t
//                                of a warp, g of 0 to 7 and t of 0 to 3, has
//                                  a[0], a[1]  terms 4 t to 4 t + 3 of the rows g and g + 8, a byte each
//                                  a[2], a[3]  the same rows, terms 16 + 4 t to 16 + 4 t + 3
//                                  b[0], b[1]  the same terms of column g
//                                  c[0], c[1]  row g, columns 2 t and 2 t + 1; c[2], c[3]: row g + 8
//                                load_matrices reads 4 matrices of 8 lines of 16 bytes: thread 8 i + r says
//                                where line r of matrix i is, and thread 4 g + t gets in m[i] the bytes 4 t
//                                to 4 t + 3 of line g. (PTX ISA, ldmatrix and mma.m16n8k32)
#ifndef MACHINE_H
#define MACHINE_H
#include "../arithmetic.h"

typedef float Float4 __attribute__((ext_vector_type(4)));

#if defined(__NVPTX__)
// ------------------------------------------------------------------------------------------------- on a GPU

#define SHARED __attribute__((address_space(3)))
#define UNROLL _Pragma("unroll")
#define UNROLL_16 _Pragma("unroll 16")

#define KERNEL(name, Struct)                                      \
  INLINE void name##_thread(const Struct *a);                     \
  __attribute__((device_kernel)) void name(const Struct argument); \
  __attribute__((device_kernel)) void name(const Struct argument) { \
    name##_thread(&argument);                                     \
  }                                                               \
  INLINE void name##_thread(const Struct *a)

// A kernel of two structs, for rows
#define ROW_KERNEL(name, Struct)                                                     \
  __attribute__((device_kernel)) void name(const Struct argument, const RowsOf rows); \
  __attribute__((device_kernel)) void name(const Struct argument, const RowsOf rows)

extern SHARED float shared_memory[] __attribute__((aligned(16)));

INLINE int thread_index(void) { return __nvvm_read_ptx_sreg_tid_x(); }
INLINE int threads(void) { return __nvvm_read_ptx_sreg_ntid_x(); }
INLINE int thread_block_x(void) { return __nvvm_read_ptx_sreg_ctaid_x(); }
INLINE int thread_block_y(void) { return __nvvm_read_ptx_sreg_ctaid_y(); }
INLINE int thread_block_z(void) { return __nvvm_read_ptx_sreg_ctaid_z(); }
INLINE int thread_blocks_x(void) { return __nvvm_read_ptx_sreg_nctaid_x(); }
INLINE int thread_blocks_y(void) { return __nvvm_read_ptx_sreg_nctaid_y(); }

INLINE void barrier(void) { __syncthreads(); }

// A warp of 32 threads computes two rows, whose lanes need not keep step with one another.
INLINE uint32_t lanes_of_row(void) { return 0xffffu << (thread_index() & 16); }
INLINE void meet_lanes(void) { __nvvm_bar_warp_sync(lanes_of_row()); }
INLINE uint32_t other_lane(uint32_t x, int mask) {
  return (uint32_t)__nvvm_shfl_sync_bfly_i32(lanes_of_row(), (int)x, mask, 31);
}

INLINE int any_of_warp(uint32_t x) { return __nvvm_vote_any_sync(0xffffffffu, x != 0); }

INLINE uint32_t shared_address(SHARED const float *p) { return (uint32_t)(__UINTPTR_TYPE__)p; }
INLINE void copy16(SHARED float *to, const float *from, int bytes) {
  __asm__ volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                   :
                   : "r"(shared_address(to)), "l"(from), "r"(bytes)
                   : "memory");
}
INLINE void copy4(SHARED float *to, const float *from, int bytes) {
  __asm__ volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                   :
                   : "r"(shared_address(to)), "l"(from), "r"(bytes)
                   : "memory");
}
INLINE void commit_copies(void) { __asm__ volatile("cp.async.commit_group;" : : : "memory"); }
#define wait_copies(groups) __asm__ volatile("cp.async.wait_group %0;" : : "n"(groups) : "memory")

INLINE void load_matrices(SHARED const float *line, uint32_t m[4]) {
  __asm__ volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                   : "r"(shared_address(line))
                   : "memory");
}
// c += a b, of signed bytes
INLINE void multiply_bytes(uint32_t c[4], const uint32_t a[4], const uint32_t b[2]) {
  __asm__("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
          "{%8, %9}, {%0, %1, %2, %3};"
          : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

INLINE uint32_t lowest_bytes(const uint32_t x[4]) {
  return __nvvm_prmt(__nvvm_prmt(x[0], x[1], 0x0040), __nvvm_prmt(x[2], x[3], 0x0040), 0x5410);
}
INLINE int not_ahead(int x) {
  __asm__ volatile("" : "+r"(x));
  return x;
}
INLINE float load_fixed(const float *p) { return __nvvm_ldg_f(p); }
INLINE Float4 shared4(SHARED const float *p) { return *(SHARED const Float4 *)p; }
INLINE void put_shared4(SHARED float *p, Float4 x) { *(SHARED Float4 *)p = x; }

#else
// ----------------------------------------------------------------------------------------------- on the host

#define SHARED
#define UNROLL
#define UNROLL_16

#define KERNEL(name, Struct)                                      \
  __attribute__((visibility("default"))) void name(const Struct *a); \
  __attribute__((visibility("default"))) void name(const Struct *a)

#define ROW_KERNEL(name, Struct)                                                              \
  static void name##_thread(const Struct argument, const RowsOf rows);                        \
  __attribute__((visibility("default"))) void name(const Struct *argument, const RowsOf *rows); \
  __attribute__((visibility("default"))) void name(const Struct *argument, const RowsOf *rows) { \
    name##_thread(*argument, *rows);                                                          \
  }                                                                                           \
  static void name##_thread(const Struct argument, const RowsOf rows)

// emulate.c has these
extern float *shared_memory;
extern int emulated_thread;
extern int emulated_threads;
extern int emulated_thread_block[3];
extern int emulated_thread_blocks[3];
void barrier(void);
void meet_lanes(void);
uint32_t other_lane(uint32_t x, int mask);
void copy_later(float *to, const float *from, int size, int bytes);
void commit_copies(void);
void wait_copies(int groups);
void load_matrices(const float *line, uint32_t m[4]);
void multiply_bytes(uint32_t c[4], const uint32_t a[4], const uint32_t b[2]);
int any_of_warp(uint32_t x);

INLINE int thread_index(void) { return emulated_thread; }
INLINE int threads(void) { return emulated_threads; }
INLINE int thread_block_x(void) { return emulated_thread_block[0]; }
INLINE int thread_block_y(void) { return emulated_thread_block[1]; }
INLINE int thread_block_z(void) { return emulated_thread_block[2]; }
INLINE int thread_blocks_x(void) { return emulated_thread_blocks[0]; }
INLINE int thread_blocks_y(void) { return emulated_thread_blocks[1]; }

INLINE void copy16(float *to, const float *from, int bytes) { copy_later(to, from, 16, bytes); }
INLINE void copy4(float *to, const float *from, int bytes) { copy_later(to, from, 4, bytes); }

INLINE uint32_t lowest_bytes(const uint32_t x[4]) {
  return (x[0] & 255) | (x[1] & 255) << 8 | (x[2] & 255) << 16 | (x[3] & 255) << 24;
}
INLINE int not_ahead(int x) { return x; }
INLINE float load_fixed(const float *p) { return *p; }
INLINE Float4 shared4(const float *p) { return *(const Float4 *)p; }
INLINE void put_shared4(float *p, Float4 x) { *(Float4 *)p = x; }

#endif
// --------------------------------------------------------------------------------------------------- on both

INLINE Float4 load4(const float *p) { return *(const Float4 *)p; }
INLINE void store4(float *p, Float4 x) { *(Float4 *)p = x; }

// The largest of x here and x of the other lane
INLINE float larger_of_lanes(float x, int mask) {
  float y = as_float(other_lane(as_bits(x), mask));
  return y > x ? y : x;
}

INLINE double double_of_other_lane(double x, int mask) {
  uint64_t bits = as_bits64(x);
  uint64_t low = other_lane((uint32_t)bits, mask);
  uint64_t high = other_lane((uint32_t)(bits >> 32), mask);
  return as_double(high << 32 | low);
}
#endif
