// One pool of threads, for one caller at a time. A task is an index. Any thread may take it, because no task
// writes what another reads.
//
// A job is one call of parallel_for. After a job the workers spin for some microseconds, because the next job
// usually comes at once. Then they sleep. The caller takes tasks too, and waits until all are done.
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#include "kernels.h"

enum {
  MAX_WORKERS = 255,
  SPINS = 20000,
  TASK_BITS = 24
};
#define TASK_MASK ((1ULL << TASK_BITS) - 1)

static struct {
  pthread_t workers[MAX_WORKERS];
  int count;  // workers besides the caller
  // tasks of the job << TASK_BITS | the next task. Both are one number, so that a worker that wakes late
  // never compares a task of one job with the number of tasks of another
  atomic_ullong ticket;
  atomic_int job;   // counts jobs
  atomic_int done;  // tasks of this job
  atomic_int sleepers;
  atomic_int stop;
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

static void take_tasks(void) {
  for (;;) {
    uint64_t ticket = atomic_fetch_add(&pool.ticket, 1);
    uint64_t index = ticket & TASK_MASK;
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
  int job = (int)(intptr_t)seen;
  for (;;) {
    await_job(job);
    job = atomic_load(&pool.job);
    if (atomic_load(&pool.stop)) break;
    take_tasks();
  }
  free_scratch_of_thread();
  return NULL;
}

// Waits for the tasks, not for the workers: a worker that sleeps may wake after milliseconds, when all tasks
// are done. Does nothing in a call that has failed.
static void parallel_for(int total, Task task, void *argument) {
  if (failed()) return;
  // The ticket counts beyond `total`: once for this thread, and twice for a worker that wakes late, which
  // takes a ticket for the job before and then one for this job. The count must not carry into `total`.
  if (!pool.count || total < 2 || total > (int)TASK_MASK - 2 * MAX_WORKERS - 1) {
    for (int i = 0; i < total; i++) task(argument, i);
    return;
  }
  pool.task = task;
  pool.argument = argument;
  atomic_store(&pool.done, 0);
  atomic_store(&pool.ticket, (uint64_t)total << TASK_BITS);
  next_job();
  take_tasks();
  for (int spin = 0; atomic_load(&pool.done) < total; spin++) {
    if (spin < SPINS) relax();
    else sched_yield();
  }
}

// Ends all workers, starts `threads` - 1 others, and returns 0. Returns -1 and changes nothing if no pool can
// have this number of threads. Returns -1 and leaves one thread if the system starts fewer.
int set_threads(int threads) {
  int wanted = threads - 1;
  if (wanted < 0 || wanted > MAX_WORKERS) return -1;
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

// Items of a task, at most `most`: `items` times `others` make about four tasks for every thread.
static int task_size(long items, int others, int most) {
  long each = items * others / (4 * (pool.count + 1));
  return each < 1 ? 1 : each > most ? most : (int)each;
}
