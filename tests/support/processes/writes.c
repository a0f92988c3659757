/* Counts every change that a process makes below one folder, and ends the process at a chosen one.

   Preloaded. `writes_watch(folder, at)` begins: the change of that number, from 1, is not made, and the process is
   killed; of a write the first half of the bytes is made. `writes_count` says how many there were. The calls are those
   by which Python, Rust and C change files; what they miss shows as a file that no change made. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define REAL(name)            \
    static typeof(&name) real; \
    if (!real) real = (typeof(&name))dlsym(RTLD_NEXT, #name)

static char folder[PATH_MAX];
static long at = -1, count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void writes_watch(const char *path, long number) {
    strncpy(folder, path, sizeof folder - 1);
    count = 0;
    at = number;
}
long writes_count(void) { return count; }

static int below(const char *path) { return folder[0] && strncmp(path, folder, strlen(folder)) == 0; }

static int below_at(int directory, const char *path) {
    if (path[0] == '/' || directory == AT_FDCWD) return below(path);
    char link[64], real[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
    ssize_t size = readlink(link, real, sizeof real - 1);
    if (size < 0) return 0;
    real[size] = 0;
    return below(real);
}

static int below_fd(int descriptor) { return folder[0] && below_at(descriptor, "x"); }

/* whether the change that comes is the last one */
static int is_chosen(void) {
    pthread_mutex_lock(&lock);
    int chosen = ++count == at;
    pthread_mutex_unlock(&lock);
    return chosen;
}
static void end(void) { kill(getpid(), SIGKILL); for (;;) pause(); }
static void change(int watched) { if (watched && is_chosen()) end(); }

#define WRITES(flags) (((flags) & O_CREAT) || ((flags) & O_TRUNC))
#define OPEN(name)                                                                         \
    int name(const char *path, int flags, ...) {                                           \
        REAL(name);                                       \
        va_list more; va_start(more, flags); mode_t mode = va_arg(more, int); va_end(more); \
        change(WRITES(flags) && below(path));                                              \
        return real(path, flags, mode);                                                    \
    }
#define OPENAT(name)                                                                       \
    int name(int directory, const char *path, int flags, ...) {                            \
        REAL(name);                                  \
        va_list more; va_start(more, flags); mode_t mode = va_arg(more, int); va_end(more); \
        change(WRITES(flags) && below_at(directory, path));                                \
        return real(directory, path, flags, mode);                                         \
    }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

ssize_t write(int descriptor, const void *data, size_t size) {
    REAL(write);
    if (below_fd(descriptor) && is_chosen()) {
        real(descriptor, data, size / 2);
        end();
    }
    return real(descriptor, data, size);
}
ssize_t writev(int descriptor, const struct iovec *pieces, int number) {
    REAL(writev);
    if (below_fd(descriptor) && is_chosen()) {
        real(descriptor, pieces, number / 2);
        end();
    }
    return real(descriptor, pieces, number);
}
int fsync(int descriptor) {
    REAL(fsync);
    change(below_fd(descriptor));
    return real(descriptor);
}
#define TRUNCATE(name)                                \
    int name(int descriptor, off_t size) {            \
        REAL(name);              \
        change(below_fd(descriptor));                 \
        return real(descriptor, size);                \
    }
TRUNCATE(ftruncate)
TRUNCATE(ftruncate64)

#define ONE(name)                                     \
    int name(const char *path) {                      \
        REAL(name);            \
        change(below(path));                          \
        return real(path);                            \
    }
ONE(unlink)
ONE(rmdir)
int mkdir(const char *path, mode_t mode) {
    REAL(mkdir);
    change(below(path));
    return real(path, mode);
}
int unlinkat(int directory, const char *path, int flags) {
    REAL(unlinkat);
    change(below_at(directory, path));
    return real(directory, path, flags);
}
int rename(const char *from, const char *to) {
    REAL(rename);
    change(below(to));
    return real(from, to);
}
int renameat(int from_directory, const char *from, int to_directory, const char *to) {
    REAL(renameat);
    change(below_at(to_directory, to));
    return real(from_directory, from, to_directory, to);
}
