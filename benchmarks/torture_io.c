/* Faults of writes below a folder, one at a time: torture_io.py writes into a shared page which write is to fail, and how.
 * Preloaded into a session's processes. Each function behaves as the system's own one until the page says otherwise. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { NONE, EIO_NOW, SHORT, FULL, KINDS };

/* As in torture_io.py. */
struct page {
    atomic_uint armed;       /* The fault that the next write that fits takes. */
    atomic_int skip;         /* Writes that fit and are let pass before it. */
    atomic_uint half;        /* Whether half of the data is written before the disk is full, or before the error. */
    atomic_uint hits[KINDS]; /* Faults that were taken. */
    char prefix[512];        /* Of the files whose writes fit. */
    char part[64];           /* What their paths have in them. */
};

static struct page *page;

__attribute__((constructor)) static void start(void) {
    const char *path = getenv("FLUID_TORTURE_IO");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *mapped = mmap(NULL, sizeof(struct page), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped != MAP_FAILED) page = mapped;
    close(fd);
}

/* Returns the fault that a write to a file takes. */
static unsigned taken(int fd) {
    if (!page || !atomic_load(&page->armed)) return NONE;
    int before = errno;
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    errno = before;
    if (length <= 0) return NONE;
    path[length] = 0;
    if (strncmp(path, page->prefix, strlen(page->prefix)) || !strstr(path, page->part)) return NONE;
    if (atomic_fetch_sub(&page->skip, 1) > 0) return NONE;
    return atomic_exchange(&page->armed, NONE);
}

/* Writes as a fault has it: WRITE(n) writes the first n of SIZE bytes. */
#define FAULTY(fd, size, WRITE)                                                   \
    do {                                                                          \
        unsigned fault = taken(fd);                                               \
        if (fault == NONE) break;                                                 \
        if (fault == FULL && (size) > 1 && atomic_exchange(&page->half, 0)) {     \
            ssize_t written = WRITE((size) / 2);                                  \
            atomic_store(&page->armed, FULL); /* The rest finds the disk full. */ \
            return written;                                                       \
        }                                                                         \
        atomic_fetch_add(&page->hits[fault], 1);                                  \
        if (fault == SHORT) return WRITE((size) > 1 ? 1 + (size) / 3 : (size));   \
        if (fault == EIO_NOW && (size) > 1 && page->half) WRITE((size) / 2);      \
        errno = fault == FULL ? ENOSPC : EIO;                                     \
        return -1;                                                                \
    } while (0)

#define REAL(name)                    \
    static __typeof__(name) *real; \
    if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

ssize_t write(int fd, const void *data, size_t size) {
    REAL(write);
#define SOME(n) real(fd, data, n)
    FAULTY(fd, size, SOME);
    return SOME(size);
#undef SOME
}

/* A fault cuts within its first part. */
ssize_t writev(int fd, const struct iovec *parts, int count) {
    REAL(writev);
#define SOME(n) write(fd, parts[0].iov_base, n)
    FAULTY(fd, count > 0 ? parts[0].iov_len : 0, SOME);
#undef SOME
    return real(fd, parts, count);
}

#define PWRITE(name)                                                \
    ssize_t name(int fd, const void *data, size_t size, off_t at) { \
        REAL(name);                                                 \
        FAULTY(fd, size, PWRITE_SOME);                              \
        return PWRITE_SOME(size);                                   \
    }
#define PWRITE_SOME(n) real(fd, data, n, at)
PWRITE(pwrite)
PWRITE(pwrite64)

#define SENDFILE(name)                                       \
    ssize_t name(int to, int from, off_t *at, size_t size) { \
        REAL(name);                                          \
        FAULTY(to, size, SENDFILE_SOME);                     \
        return SENDFILE_SOME(size);                          \
    }
#define SENDFILE_SOME(n) real(to, from, at, n)
SENDFILE(sendfile)
SENDFILE(sendfile64)
