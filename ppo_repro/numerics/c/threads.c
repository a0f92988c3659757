// One pool of threads. A task is an index; which thread takes it changes no result.
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#ifdef __linux__
#include <malloc.h>
#endif

#include "kernels.h"

enum { MOST_WORKERS = 255, SPINS = 20000 };

static struct {
  pthread_t workers[MOST_WORKERS];
  int count;  // workers besides the caller
  // tasks of the job << 24 | the next of them: one number, so that a worker that wakes late takes no task of a job that
  // is over for one of the next job
  atomic_ullong ticket;
  atomic_int job, done, sleepers, stop;
  Task task;
  void *argument;
  pthread_mutex_t lock;
  pthread_cond_t wake;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

INLINE void relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

enum { TASK_BITS = 24 };
#define TASK_MASK ((1ULL << TASK_BITS) - 1)

static void take_tasks(void) {
  for (;;) {
    uint64_t ticket = atomic_fetch_add(&pool.ticket, 1), index = ticket & TASK_MASK;
    if (index >= ticket >> TASK_BITS) return;
    pool.task(pool.argument, (int)index);  // of this job, which is not over before this task is
    atomic_fetch_add(&pool.done, 1);
  }
}

static void await_job(int seen) {
  for (int spin = 0; spin < SPINS; spin++) {
    if (atomic_load(&pool.job) != seen) return;
    relax();
  }
  pthread_mutex_lock(&pool.lock);
  atomic_fetch_add(&pool.sleepers, 1);
  while (atomic_load(&pool.job) == seen) pthread_cond_wait(&pool.wake, &pool.lock);
  atomic_fetch_sub(&pool.sleepers, 1);
  pthread_mutex_unlock(&pool.lock);
}

static void next_job(void) {
  atomic_fetch_add(&pool.job, 1);
  if (!atomic_load(&pool.sleepers)) return;
  pthread_mutex_lock(&pool.lock);
  pthread_cond_broadcast(&pool.wake);
  pthread_mutex_unlock(&pool.lock);
}

static void *work(void *seen) {
  for (int job = (int)(intptr_t)seen;;) {
    await_job(job);
    job = atomic_load(&pool.job);
    if (atomic_load(&pool.stop)) return NULL;
    take_tasks();
  }
}

// Waits for the tasks, not for the workers: one that sleeps wakes after milliseconds, when others have done its part.
static void parallel_for(int total, Task task, void *argument) {
  if (!pool.count || total < 2 || total > (int)TASK_MASK) {
    for (int i = 0; i < total; i++) task(argument, i);
    return;
  }
  pool.task = task, pool.argument = argument;
  atomic_store(&pool.done, 0);
  atomic_store(&pool.ticket, (uint64_t)total << TASK_BITS);
  next_job();
  take_tasks();
  for (int spin = 0; atomic_load(&pool.done) < total; spin++) spin < SPINS ? relax() : (void)sched_yield();
}

// 0, or -1 where the system gives no more threads; then there is one.
int set_threads(int threads) {
  int wanted = threads - 1 < MOST_WORKERS ? threads - 1 : MOST_WORKERS;
  if (wanted == pool.count) return 0;
  atomic_store(&pool.stop, 1);
  next_job();
  for (int i = 0; i < pool.count; i++) pthread_join(pool.workers[i], NULL);
  atomic_store(&pool.stop, 0);
  intptr_t seen = atomic_load(&pool.job);
  for (pool.count = 0; pool.count < wanted; pool.count++)
    if (pthread_create(&pool.workers[pool.count], NULL, work, (void *)seen)) {
      set_threads(1);
      return -1;
    }
  return 0;
}

// In a forked process there are no workers: it begins with one thread.
void forget_workers(void) {
  pool.count = 0;
  atomic_store(&pool.sleepers, 0);
  pool.lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
  pool.wake = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
}

static float *grown(float *memory, size_t *size, size_t floats) {
  if (floats <= *size && memory) return memory;
  free(memory);
  *size = (size_t)round16((long)floats + 1);
  memory = aligned_alloc(64, *size * sizeof(float));
  if (!memory) abort();
  return memory;
}

static float *scratch(size_t floats) {
  static _Thread_local float *memory;
  static _Thread_local size_t size;
  return memory = grown(memory, &size, floats);
}

static float *shared_memory[SCRATCH_AREAS];
static size_t shared_size[SCRATCH_AREAS];

static float *shared_scratch(ScratchArea area, size_t floats) {
  return shared_memory[area] = grown(shared_memory[area], &shared_size[area], floats);
}

void free_scratch(void) {
  for (int i = 0; i < SCRATCH_AREAS; i++) free(shared_memory[i]), shared_memory[i] = NULL, shared_size[i] = 0;
}

// As many items in a task as give every thread four tasks, at most `most`
static int task_size(long items, int others, int most) {
  long each = items * others / (4 * (pool.count + 1));
  return each < 1 ? 1 : each > most ? most : (int)each;
}

// Give free memory back to the system: large blocks that were freed may stay in the heap of the C library.
void trim_heap(void) {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}
