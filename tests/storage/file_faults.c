// Preloaded into a process that saves: counts the calls that change files under one directory, and at one of them kills
// the process or lets the call fail; or writes all of them down, with their bytes. `file_faults.py` drives it.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static char root[PATH_MAX];
static long num_calls, fault_at;  // calls are counted from 1
static int fault_errno;           // 0: kill -9
static int refuses_exchange;
static int log_descriptor = -1;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

void tte_faults_arm(const char* directory, long at, int code, int no_exchange, const char* log_path) {
  snprintf(root, sizeof root, "%s", directory);
  num_calls = 0;
  fault_at = at;
  fault_errno = code;
  refuses_exchange = no_exchange;
  log_descriptor = -1;
  if (log_path[0]) {
    static int (*real)(const char*, int, ...) = NULL;
    if (!real) *(void**)&real = dlsym(RTLD_NEXT, "open");
    log_descriptor = real(log_path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  }
}

long tte_faults_count(void) { return num_calls; }

static int is_watched(const char* path) { return root[0] && strncmp(path, root, strlen(root)) == 0; }

// The absolute path of `path` seen from a directory descriptor; of the descriptor itself without one.
static void resolve(int directory, const char* path, char* result) {
  char link[64];
  char base[PATH_MAX] = "";
  if (path && path[0] == '/') {
    snprintf(result, PATH_MAX, "%s", path);
    return;
  }
  snprintf(link, sizeof link, directory == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", directory);
  const ssize_t size = readlink(link, base, sizeof base - 1);
  if (size < 0) base[0] = 0;
  if (path) {
    snprintf(result, PATH_MAX, "%.2000s/%.2000s", base, path);
  } else {
    snprintf(result, PATH_MAX, "%s", base);
  }
}

static void write_log(const char* name, const char* first, const char* second, long offset,
                      const struct iovec* pieces, int num_pieces) {
  static ssize_t (*real_write)(int, const void*, size_t) = NULL;
  if (log_descriptor < 0) return;
  if (!real_write) *(void**)&real_write = dlsym(RTLD_NEXT, "write");
  size_t total = 0;
  for (int i = 0; i < num_pieces; ++i) total += pieces[i].iov_len;
  char line[3 * PATH_MAX];
  const int size = snprintf(line, sizeof line, "%s\t%s\t%s\t%ld\t%zu\n", name, first, second, offset, total);
  if (real_write(log_descriptor, line, (size_t)size) != size) abort();
  for (int i = 0; i < num_pieces; ++i) {
    if (real_write(log_descriptor, pieces[i].iov_base, pieces[i].iov_len) != (ssize_t)pieces[i].iov_len) abort();
  }
}

// Counts a call. 1: it is to fail, with errno set. 2: it is the last one of this process, which may do half of it.
static int count(const char* name, const char* first, const char* second, long offset, const struct iovec* pieces,
                 int num_pieces) {
  if (!is_watched(first)) return 0;
  pthread_mutex_lock(&mutex);
  const long call = ++num_calls;
  if (call != fault_at) write_log(name, first, second, offset, pieces, num_pieces);
  pthread_mutex_unlock(&mutex);
  if (call != fault_at) return 0;
  if (fault_errno) {
    errno = fault_errno;
    return 1;
  }
  return 2;
}

__attribute__((noreturn)) static void die(void) {
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

#define REAL(name, result, arguments)   \
  static result(*real) arguments = NULL; \
  if (!real) *(void**)&real = dlsym(RTLD_NEXT, name)
#define FAIL_OR_DIE(verdict)   \
  do {                         \
    if (verdict == 1) return -1; \
    if (verdict == 2) die();   \
  } while (0)

static int counted_open(int directory, const char* path, int flags) {
  char full[PATH_MAX];
  if (!(flags & (O_CREAT | O_TRUNC))) return 0;
  resolve(directory, path, full);
  return count("create", full, "", 0, NULL, 0);
}

#define DEFINE_OPEN(function)                            \
  int function(const char* path, int flags, ...) {       \
    REAL(#function, int, (const char*, int, ...));     \
    va_list arguments;                                   \
    va_start(arguments, flags);                          \
    const int mode = va_arg(arguments, int);             \
    va_end(arguments);                                   \
    const int verdict = counted_open(AT_FDCWD, path, flags); \
    FAIL_OR_DIE(verdict);                                \
    return real(path, flags, mode);                      \
  }
DEFINE_OPEN(open)
DEFINE_OPEN(open64)

#define DEFINE_OPENAT(function)                              \
  int function(int directory, const char* path, int flags, ...) { \
    REAL(#function, int, (int, const char*, int, ...));    \
    va_list arguments;                                       \
    va_start(arguments, flags);                              \
    const int mode = va_arg(arguments, int);                 \
    va_end(arguments);                                       \
    const int verdict = counted_open(directory, path, flags);   \
    FAIL_OR_DIE(verdict);                                    \
    return real(directory, path, flags, mode);               \
  }
DEFINE_OPENAT(openat)
DEFINE_OPENAT(openat64)

ssize_t write(int descriptor, const void* data, size_t size) {
  REAL("write", ssize_t, (int, const void*, size_t));
  char full[PATH_MAX];
  if (!root[0]) return real(descriptor, data, size);
  resolve(descriptor, NULL, full);
  const struct iovec piece = {(void*)data, size};
  const int verdict = count("append", full, "", 0, &piece, 1);
  if (verdict == 2 && real(descriptor, data, size / 2) >= 0) die();
  FAIL_OR_DIE(verdict);
  return real(descriptor, data, size);
}

#define DEFINE_PWRITEV(function)                                                          \
  ssize_t function(int descriptor, const struct iovec* pieces, int num_pieces, off_t offset) { \
    REAL(#function, ssize_t, (int, const struct iovec*, int, off_t));                    \
    char full[PATH_MAX];                                                                  \
    if (!root[0]) return real(descriptor, pieces, num_pieces, offset);                    \
    resolve(descriptor, NULL, full);                                                      \
    const int verdict = count("write", full, "", (long)offset, pieces, num_pieces);       \
    if (verdict == 2 && real(descriptor, pieces, (num_pieces + 1) / 2, offset) >= 0) die(); \
    FAIL_OR_DIE(verdict);                                                                 \
    return real(descriptor, pieces, num_pieces, offset);                                  \
  }
DEFINE_PWRITEV(pwritev)
DEFINE_PWRITEV(pwritev64)

int fsync(int descriptor) {
  REAL("fsync", int, (int));
  char full[PATH_MAX];
  resolve(descriptor, NULL, full);
  const int verdict = count("fsync", full, "", 0, NULL, 0);
  FAIL_OR_DIE(verdict);
  return real(descriptor);
}

static int counted_pair(const char* name, int from, const char* first, int to, const char* second) {
  char one[PATH_MAX], other[PATH_MAX];
  resolve(from, first, one);
  resolve(to, second, other);
  return count(name, one, other, 0, NULL, 0);
}

int rename(const char* first, const char* second) {
  REAL("rename", int, (const char*, const char*));
  const int verdict = counted_pair("rename", AT_FDCWD, first, AT_FDCWD, second);
  FAIL_OR_DIE(verdict);
  return real(first, second);
}

int renameat(int from, const char* first, int to, const char* second) {
  REAL("renameat", int, (int, const char*, int, const char*));
  const int verdict = counted_pair("rename", from, first, to, second);
  FAIL_OR_DIE(verdict);
  return real(from, first, to, second);
}

int renameat2(int from, const char* first, int to, const char* second, unsigned int flags) {
  REAL("renameat2", int, (int, const char*, int, const char*, unsigned int));
  const int verdict = counted_pair(flags == RENAME_EXCHANGE ? "exchange" : "rename", from, first, to, second);
  FAIL_OR_DIE(verdict);
  if (refuses_exchange && flags == RENAME_EXCHANGE) {
    errno = EINVAL;
    return -1;
  }
  return real(from, first, to, second, flags);
}

static int counted_one(const char* name, int directory, const char* path) {
  char full[PATH_MAX];
  resolve(directory, path, full);
  return count(name, full, "", 0, NULL, 0);
}

int unlink(const char* path) {
  REAL("unlink", int, (const char*));
  const int verdict = counted_one("unlink", AT_FDCWD, path);
  FAIL_OR_DIE(verdict);
  return real(path);
}

int unlinkat(int directory, const char* path, int flags) {
  REAL("unlinkat", int, (int, const char*, int));
  const int verdict = counted_one(flags & AT_REMOVEDIR ? "rmdir" : "unlink", directory, path);
  FAIL_OR_DIE(verdict);
  return real(directory, path, flags);
}

int rmdir(const char* path) {
  REAL("rmdir", int, (const char*));
  const int verdict = counted_one("rmdir", AT_FDCWD, path);
  FAIL_OR_DIE(verdict);
  return real(path);
}

int mkdir(const char* path, mode_t mode) {
  REAL("mkdir", int, (const char*, mode_t));
  const int verdict = counted_one("mkdir", AT_FDCWD, path);
  FAIL_OR_DIE(verdict);
  return real(path, mode);
}
