/* What a lazily revalidating network file system, and a wall clock that is set, do to a process; for LD_PRELOAD.
 *
 * Each process is a client of its own, as if it ran on a machine of its own. Affected are paths below SLOW_BELOW.
 *
 * - Attributes: an NFS client asks the server for the times and the size of a file at most every acregmin seconds (3),
 *   and answers stat() from memory meanwhile. Opening a file asks anew (close-to-open consistency), and so does what the
 *   client itself does to it. The data that is read is that of the server.
 * - Names: it remembers that a name was not there (a negative entry of its lookup cache) until it sees that the folder
 *   has changed; it looks when the folder is opened, else only as its attributes expire: here after SLOW_NAMES_S seconds.
 * - CLOCK_REALTIME is set off by the seconds that the file SLOW_CLOCK tells, as by an administrator or by NTP.
 *   CLOCK_MONOTONIC is not.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define ATTRIBUTES_S 3.0
#define SLOTS 4096
#define LONGEST 400
/* The function of that name that the C library has. */
#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

enum kind { FREE, THERE, MISSING };

/* What the client remembers of a path. One that falls into the same slot displaces it, as in any cache. */
static struct known {
    enum kind kind;
    char path[LONGEST];
    double at;
    struct timespec modified, changed;
    off_t size;
} table[SLOTS];
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static const char *below;
static double names_s;

static void lock(void) { pthread_mutex_lock(&mutex); }
static void unlock(void) { pthread_mutex_unlock(&mutex); }

__attribute__((constructor)) static void start(void) {
    below = getenv("SLOW_BELOW");
    const char *text = getenv("SLOW_NAMES_S");
    names_s = text ? atof(text) : 0.0;
    pthread_atfork(lock, unlock, unlock);
}

static double now(void) {
    struct timespec t;
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Puts the whole path of a name in a folder into a text; false if it is none of those that are affected. */
static int affected(int folder, const char *name, char path[LONGEST]) {
    if (!below || !name) return 0;
    int before = errno, length = 0;
    if (name[0] != '/') {
        char link[64];
        snprintf(link, sizeof link, folder == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", folder);
        length = (int)readlink(link, path, LONGEST - 1);
        errno = before;
        if (length <= 0) return 0;
    }
    length += snprintf(path + length, (size_t)(LONGEST - length), "%s%s", length && name[0] ? "/" : "", name);
    if (length >= LONGEST) return 0;
    while (length > 1 && path[length - 1] == '/') path[--length] = 0;
    size_t size = strlen(below);
    return !strncmp(path, below, size) && (path[size] == '/' || !path[size]);
}

static struct known *slot(const char *path) {
    unsigned hash = 2166136261u;
    for (const char *letter = path; *letter; letter++) hash = (hash ^ (unsigned char)*letter) * 16777619u;
    return &table[hash % SLOTS];
}

static struct known *remembered(const char *path, enum kind kind, double seconds) {
    struct known *known = slot(path);
    int holds = known->kind == kind && !strcmp(known->path, path) && now() < known->at + seconds;
    return holds ? known : NULL;
}

static struct known *remember(const char *path, enum kind kind) {
    struct known *known = slot(path);
    known->kind = kind;
    strcpy(known->path, path);
    known->at = now();
    return known;
}

/* Forgets a path, about which the client has just asked; of a folder also what was not in it. */
static void forget(const char *path, int is_folder) {
    struct known *known = slot(path);
    if (!strcmp(known->path, path)) known->kind = FREE;
    size_t size = strlen(path);
    for (known = table; is_folder && known < table + SLOTS; known++)
        if (known->kind == MISSING && !strncmp(known->path, path, size) && known->path[size] == '/' &&
            !strchr(known->path + size + 1, '/'))
            known->kind = FREE;
}

/* Whether the client answers that a name is not there without asking; sets errno. */
static int is_missing(const char *path) {
    lock();
    int missing = remembered(path, MISSING, names_s) != NULL;
    unlock();
    if (missing) errno = ENOENT;
    return missing;
}

/* Notes what the server has answered about a name. */
static void note(const char *path, int result) {
    if (result >= 0 || errno != ENOENT) return;
    lock();
    remember(path, MISSING);
    unlock();
}

/* -- names ------------------------------------------------------------------------------------------------------ */

static int opened(int folder, const char *name, int flags, mode_t mode) {
    static int (*real)(int, const char *, int, ...);
    if (!real) real = NEXT(openat);
    char path[LONGEST];
    if (!affected(folder, name, path)) return real(folder, name, flags, mode);
    if (!(flags & O_CREAT) && is_missing(path)) return -1;
    int file = real(folder, name, flags, mode);
    note(path, file);
    if (file >= 0) {
        struct stat found;
        int is_folder = !syscall(SYS_fstat, file, &found) && S_ISDIR(found.st_mode);
        lock();
        forget(path, is_folder);
        unlock();
    }
    return file;
}

#define MODE(mode)                                            \
    mode_t mode = 0;                                          \
    if (flags & (O_CREAT | O_TMPFILE)) {                      \
        va_list arguments;                                    \
        va_start(arguments, flags);                           \
        mode = va_arg(arguments, mode_t);                     \
        va_end(arguments);                                    \
    }

int open(const char *name, int flags, ...) { MODE(mode) return opened(AT_FDCWD, name, flags, mode); }
int open64(const char *name, int flags, ...) { MODE(mode) return opened(AT_FDCWD, name, flags, mode); }
int openat(int folder, const char *name, int flags, ...) { MODE(mode) return opened(folder, name, flags, mode); }
int openat64(int folder, const char *name, int flags, ...) { MODE(mode) return opened(folder, name, flags, mode); }

DIR *opendir(const char *name) {
    char path[LONGEST];
    DIR *folder = NEXT(opendir)(name);
    if (folder && affected(AT_FDCWD, name, path)) {
        lock();
        forget(path, 1);
        unlock();
    }
    return folder;
}

int faccessat(int folder, const char *name, int how, int flags) {
    char path[LONGEST];
    if (!affected(folder, name, path)) return NEXT(faccessat)(folder, name, how, flags);
    if (is_missing(path)) return -1;
    int result = NEXT(faccessat)(folder, name, how, flags);
    note(path, result);
    return result;
}
int access(const char *name, int how) { return faccessat(AT_FDCWD, name, how, 0); }

/* What the client itself does to a name, it knows of. */
static int done(int result, int folder, const char *name) {
    char path[LONGEST];
    if (affected(folder, name, path)) {
        lock();
        forget(path, 0);
        unlock();
    }
    return result;
}
int link(const char *from, const char *to) { return done(NEXT(link)(from, to), AT_FDCWD, to); }
int linkat(int a, const char *from, int b, const char *to, int flags) {
    return done(NEXT(linkat)(a, from, b, to, flags), b, to);
}
int rename(const char *from, const char *to) {
    return done(done(NEXT(rename)(from, to), AT_FDCWD, to), AT_FDCWD, from);
}
int renameat(int a, const char *from, int b, const char *to) {
    return done(done(NEXT(renameat)(a, from, b, to), b, to), a, from);
}
int mkdir(const char *name, mode_t mode) { return done(NEXT(mkdir)(name, mode), AT_FDCWD, name); }
int unlink(const char *name) { return done(NEXT(unlink)(name), AT_FDCWD, name); }
int unlinkat(int folder, const char *name, int flags) { return done(NEXT(unlinkat)(folder, name, flags), folder, name); }

/* -- attributes ------------------------------------------------------------------------------------------------- */

/* Tells attributes that were just read, or those that the client remembers in their place. */
static void tell(const char *path, struct timespec *modified, struct timespec *changed, off_t *size) {
    lock();
    struct known *known = remembered(path, THERE, ATTRIBUTES_S);
    if (known) {
        *modified = known->modified, *changed = known->changed, *size = known->size;
    } else {
        known = remember(path, THERE);
        known->modified = *modified, known->changed = *changed, known->size = *size;
    }
    unlock();
}

static int examined(int folder, const char *name, struct stat *found, int flags) {
    static int (*real)(int, const char *, struct stat *, int);
    if (!real) real = NEXT(fstatat);
    char path[LONGEST];
    int is_open = name && !name[0];
    /* A file that the process itself writes. */
    if ((is_open && (fcntl(folder, F_GETFL) & O_ACCMODE) != O_RDONLY) || !affected(folder, name, path))
        return real(folder, name, found, flags);
    if (!is_open && is_missing(path)) return -1;
    int result = real(folder, name, found, flags);
    note(path, result);
    if (!result) tell(path, &found->st_mtim, &found->st_ctim, &found->st_size);
    return result;
}

/* On 64 bits the structures are the same. */
int fstatat(int folder, const char *name, struct stat *found, int flags) { return examined(folder, name, found, flags); }
int stat(const char *name, struct stat *found) { return examined(AT_FDCWD, name, found, 0); }
int lstat(const char *name, struct stat *found) { return examined(AT_FDCWD, name, found, AT_SYMLINK_NOFOLLOW); }
int fstat(int file, struct stat *found) { return examined(file, "", found, AT_EMPTY_PATH); }
int fstatat64(int folder, const char *name, struct stat64 *found, int flags) {
    return examined(folder, name, (struct stat *)found, flags);
}
int stat64(const char *name, struct stat64 *found) { return stat(name, (struct stat *)found); }
int lstat64(const char *name, struct stat64 *found) { return lstat(name, (struct stat *)found); }
int fstat64(int file, struct stat64 *found) { return fstat(file, (struct stat *)found); }

int statx(int folder, const char *name, int flags, unsigned mask, struct statx *found) {
    char path[LONGEST];
    int result = NEXT(statx)(folder, name, flags, mask, found);
    if (!result && affected(folder, name, path)) {
        struct timespec modified = {found->stx_mtime.tv_sec, found->stx_mtime.tv_nsec};
        struct timespec changed = {found->stx_ctime.tv_sec, found->stx_ctime.tv_nsec};
        off_t size = (off_t)found->stx_size;
        tell(path, &modified, &changed, &size);
        found->stx_mtime.tv_sec = modified.tv_sec, found->stx_mtime.tv_nsec = (unsigned)modified.tv_nsec;
        found->stx_ctime.tv_sec = changed.tv_sec, found->stx_ctime.tv_nsec = (unsigned)changed.tv_nsec;
        found->stx_size = (unsigned long long)size;
    }
    return result;
}

/* -- the wall clock --------------------------------------------------------------------------------------------- */

static time_t offset(void) {
    const char *path = getenv("SLOW_CLOCK");
    char text[32] = "";
    int before = errno, file = path ? (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC) : -1;
    if (file >= 0) {
        ssize_t length = read(file, text, sizeof text - 1);
        text[length > 0 ? length : 0] = 0;
        syscall(SYS_close, file);
    }
    errno = before;
    return (time_t)atoll(text);
}

int clock_gettime(clockid_t clock, struct timespec *t) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = NEXT(clock_gettime);
    int result = real(clock, t);
    if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) t->tv_sec += offset();
    return result;
}

int gettimeofday(struct timeval *restrict t, void *restrict zone) {
    int result = NEXT(gettimeofday)(t, zone);
    if (!result) t->tv_sec += offset();
    return result;
}

time_t time(time_t *t) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (t) *t = found.tv_sec;
    return found.tv_sec;
}
