// Runs a kernel on the host: blocks one after the other, the threads of a block as fibers that change at
// barriers and shuffles. Threads take turns in rising, falling or shuffled order; two threads that a barrier
// is missing between thus see each other's numbers early in one order and late in another, and the bits
// differ.
//
// What a kernel must not do shows: shared memory holds NaN at first and ends at a page without access,
// asynchronous copies arrive no sooner than they are waited for, and a barrier or a shuffle that some threads
// miss ends the process.
#define _GNU_SOURCE
#include "emulate.h"

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

enum { MOST_THREADS = 256, WARP = 32, LANES = 16, COPIES = 512, PAGE = 4096 };
enum { STACK = 1 << 18 };  // of PTX as C, where each register is a variable

// Where a thread waits
typedef enum { RUNS, AT_LANES, AT_WARP, AT_BARRIER, DONE } State;

// A copy that has begun
typedef struct {
  float *to;
  const float *from;
  int size;
  int bytes;
  int group;
} Copy;

typedef struct {
  State state;
  int begun;
  int copies;
  int group;  // of the copies that begin now
  jmp_buf here;
  ucontext_t start;
  Copy copy[COPIES];
} Fiber;

float *shared_memory;
int emulated_thread;
int emulated_threads;
int emulated_thread_block[3];
int emulated_thread_blocks[3];

static Fiber *fibers;
static char *stacks;
static jmp_buf scheduler;
static uint32_t exchanged[MOST_THREADS];
static Function kernel;
static const void *const *arguments;

static void fail(const char *what) {
  fprintf(stderr, "emulator: %s (block %d, %d, %d, thread %d)\n", what, emulated_thread_block[0], emulated_thread_block[1],
          emulated_thread_block[2], emulated_thread);
  abort();
}

// ----------------------------------------------------------------------------------- what machine.h declares

static void pause_at(State state) {
  Fiber *f = &fibers[emulated_thread];
  f->state = state;
  if (!_setjmp(f->here)) _longjmp(scheduler, 1);
}

void barrier(void) { pause_at(AT_BARRIER); }
void meet_lanes(void) { pause_at(AT_LANES); }

uint32_t other_lane(uint32_t x, int mask) {
  exchanged[emulated_thread] = x;
  meet_lanes();
  uint32_t y = exchanged[emulated_thread ^ mask];
  meet_lanes();
  return y;
}

// Fails where two of the 8 lines of a matrix lie in the same banks.
void load_matrices(const float *line, uint32_t m[4]) {
  static const float *lines[MOST_THREADS];
  const int lane = emulated_thread % WARP;
  const int warp = emulated_thread - lane;
  lines[emulated_thread] = line;
  pause_at(AT_WARP);
  for (int i = 0; i < 4; i++) {
    unsigned banks = 0;
    for (int r = 0; r < 8; r++) banks |= 1u << ((uintptr_t)lines[warp + 8 * i + r] / 16 % 8);
    if (banks != 0xff) fail("two lines of a matrix in the same banks");
    memcpy(&m[i], lines[warp + 8 * i + lane / 4] + lane % 4, 4);
  }
  pause_at(AT_WARP);
}

int any_of_warp(uint32_t x) {
  const int warp = emulated_thread - emulated_thread % WARP;
  exchanged[emulated_thread] = x;
  pause_at(AT_WARP);
  uint32_t any = 0;
  for (int lane = 0; lane < WARP; lane++) any |= exchanged[warp + lane];
  pause_at(AT_WARP);
  return any != 0;
}

void multiply_bytes(uint32_t c[4], const uint32_t a[4], const uint32_t b[2]) {
  static uint32_t as[MOST_THREADS][4];
  static uint32_t bs[MOST_THREADS][2];
  const int lane = emulated_thread % WARP;
  const int warp = emulated_thread - lane;
  memcpy(as[emulated_thread], a, sizeof *as);
  memcpy(bs[emulated_thread], b, sizeof *bs);
  pause_at(AT_WARP);
  for (int i = 0; i < 4; i++) {
    const int row = 4 * (lane / 4);  // the first thread of those that have the row, and of the column
    const int column = 4 * (lane % 4 * 2 + i % 2);
    for (int k = 0; k < 32; k++) {
      const uint32_t x = as[warp + row + k % 16 / 4][2 * (k / 16) + i / 2];
      const uint32_t w = bs[warp + column + k % 16 / 4][k / 16];
      c[i] += (uint32_t)((int8_t)(x >> 8 * (k % 4)) * (int8_t)(w >> 8 * (k % 4)));
    }
  }
  pause_at(AT_WARP);
}

void copy_later(float *to, const float *from, int size, int bytes) {
  Fiber *f = &fibers[emulated_thread];
  if (f->copies == COPIES) fail("too many copies");
  if (((uintptr_t)to | (uintptr_t)from) % (unsigned)size) fail("a copy is not aligned");
  f->copy[f->copies++] = (Copy){to, from, size, bytes, f->group};
}

void commit_copies(void) { fibers[emulated_thread].group++; }

void wait_copies(int groups) {
  Fiber *f = &fibers[emulated_thread];
  int kept = 0;
  for (int i = 0; i < f->copies; i++) {
    const Copy c = f->copy[i];
    if (c.group >= f->group - groups) {
      f->copy[kept++] = c;
      continue;
    }
    memcpy(c.to, c.from, (size_t)c.bytes);
    memset((char *)c.to + c.bytes, 0, (size_t)(c.size - c.bytes));
  }
  f->copies = kept;
}

// ---------------------------------------------------------------------------------------------------- fibers

// A fiber runs one thread after another, of block after block.
static void run_threads(void) {
  for (;;) {
    kernel(arguments[0], arguments[1]);
    pause_at(DONE);
  }
}

// Runs a thread until it waits
static void resume(int thread) {
  Fiber *f = &fibers[thread];
  emulated_thread = thread;
  f->state = RUNS;
  if (_setjmp(scheduler)) return;
  if (f->begun) _longjmp(f->here, 1);
  f->begun = 1;
  getcontext(&f->start);
  f->start.uc_stack.ss_sp = stacks + (size_t)thread * STACK;
  f->start.uc_stack.ss_size = STACK;
  f->start.uc_link = NULL;
  makecontext(&f->start, run_threads, 0);
  setcontext(&f->start);
}

// The i-th of n in an order. SHUFFLED is a permutation where n is a power of two, and else rising.
static int place(int i, int n, Order order, uint32_t seed) {
  if (order == FALLING) return n - 1 - i;
  if (order == RISING || n & (n - 1)) return i;
  return (int)((uint32_t)i * (2 * (seed % 97) + 1) + seed) & (n - 1);
}

static uint32_t next_seed(void) {
  static uint32_t seed = 1;
  seed = seed * 1664525u + 1013904223u;
  return seed >> 8;
}

// The 16 lanes from `first` on run until all wait for other lanes, or are done.
static State run_lanes(int first, Order order) {
  State state;
  do {
    const uint32_t seed = next_seed();
    for (int i = 0; i < LANES; i++) resume(first + place(i, LANES, order, seed));
    state = fibers[first].state;
    for (int i = 0; i < LANES; i++)
      if (fibers[first + i].state != state) fail("16 lanes part at a shuffle or a barrier");
  } while (state == AT_LANES);
  return state;
}

// The 32 lanes of a warp run until all are at a barrier, or done.
static void run_warp(int first, Order order) {
  State state;
  do {
    state = run_lanes(first, order);
    if (run_lanes(first + LANES, order) != state) fail("the halves of a warp part");
  } while (state == AT_WARP);
}

static void run_block(Order order) {
  const int warps = emulated_threads / WARP;
  State state;
  for (int i = 0; i < emulated_threads; i++) fibers[i].copies = fibers[i].group = 0;
  do {
    const uint32_t seed = next_seed();
    for (int i = 0; i < warps; i++) run_warp(WARP * place(i, warps, order, seed), order);
    state = fibers[0].state;
    for (int i = 0; i < emulated_threads; i++)
      if (fibers[i].state != state) fail("a barrier that not all threads reach");
  } while (state != DONE);
}

void emulate(Function function, const void *const *with, const int *blocks, int threads, long shared_bytes,
             Order order) {
  if (threads % 32 || threads > MOST_THREADS) fail("threads of a block");
  if (!fibers) {
    fibers = calloc(MOST_THREADS, sizeof(Fiber));
    stacks = malloc((size_t)MOST_THREADS * STACK);
  }
  const size_t bytes = ((size_t)shared_bytes + PAGE - 1) / PAGE * PAGE;
  char *memory = mmap(NULL, bytes + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (!fibers || !stacks || memory == MAP_FAILED || mprotect(memory + bytes, PAGE, PROT_NONE)) abort();
  shared_memory = (float *)(memory + (bytes - (size_t)shared_bytes) / 16 * 16);
  kernel = function;
  arguments = with;
  emulated_threads = threads;
  for (int i = 0; i < 3; i++) emulated_thread_blocks[i] = blocks[i];
  for (emulated_thread_block[2] = 0; emulated_thread_block[2] < blocks[2]; emulated_thread_block[2]++)
    for (emulated_thread_block[1] = 0; emulated_thread_block[1] < blocks[1]; emulated_thread_block[1]++)
      for (emulated_thread_block[0] = 0; emulated_thread_block[0] < blocks[0]; emulated_thread_block[0]++) {
        memset(memory, 0xff, bytes);
        run_block(order);
      }
  munmap(memory, bytes + PAGE);
}
