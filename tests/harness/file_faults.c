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
static int fault_is_late;         // of a rename: it takes effect, and fails all the same
static int refuses_exchange;
static int log_descriptor = -1;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

void tte_faults_arm(const char* directory, long at, int code, int is_late, int no_exchange, const char* log_path) {
  snprintf(root, sizeof root, "%s", directory);
  num_calls = 0;
  fault_at = at;
  fault_errno = code;
  fault_is_late = is_late;
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

// Writes a call down, with its bytes; one that has failed under another name.
static long logged(long result, const char* name, const char* first, const char* second, long offset,
                   const struct iovec* pieces, int num_pieces) {
  static ssize_t (*real_write)(int, const void*, size_t) = NULL;
  const int code = errno;
  if (log_descriptor < 0 || !is_watched(first)) return result;
  if (result < 0) name = "failed";
  pthread_mutex_lock(&mutex);
  if (!real_write) *(void**)&real_write = dlsym(RTLD_NEXT, "write");
  size_t total = 0;
  for (int i = 0; i < num_pieces; ++i) total += pieces[i].iov_len;
  char line[3 * PATH_MAX];
  const int size = snprintf(line, sizeof line, "%s\t%s\t%s\t%ld\t%zu\n", name, first, second, offset, total);
  if (real_write(log_descriptor, line, (size_t)size) != size) abort();
  for (int i = 0; i < num_pieces; ++i) {
    if (real_write(log_descriptor, pieces[i].iov_base, pieces[i].iov_len) != (ssize_t)pieces[i].iov_len) abort();
  }
  pthread_mutex_unlock(&mutex);
  errno = code;
  return result;
}

// Counts a call. 1: it is to fail, with errno set. 2: it is the last one of this process, which may do half of it. 3: it
// is to fail after it has taken effect.
static int count(const char* first) {
  if (!is_watched(first)) return 0;
  pthread_mutex_lock(&mutex);
  const long call = ++num_calls;
  pthread_mutex_unlock(&mutex);
  if (call != fault_at) return 0;
  if (fault_is_late) return 3;
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

#define REAL(name, result, arguments)    \
  static result(*real) arguments = NULL; \
  if (!real) *(void**)&real = dlsym(RTLD_NEXT, name)
#define FAIL_OR_DIE(verdict)     \
  do {                           \
    if (verdict == 1) return -1; \
    if (verdict == 2) die();     \
  } while (0)

static int has_no_name(int flags) { return (flags & O_TMPFILE) == O_TMPFILE; }
static int changes_files(int flags) { return (flags & (O_CREAT | O_TRUNC)) || has_no_name(flags); }

// A file without a name is known by what its descriptor shows.
static int created(int descriptor, int flags, char* full) {
  if (descriptor >= 0 && has_no_name(flags)) resolve(descriptor, NULL, full);
  return (int)logged(descriptor, "create", full, "", 0, NULL, 0);
}

#define DEFINE_OPEN(function)                                                    \
  int function(const char* path, int flags, ...) {                               \
    REAL(#function, int, (const char*, int, ...));                               \
    va_list arguments;                                                           \
    va_start(arguments, flags);                                                  \
    const int mode = va_arg(arguments, int);                                     \
    va_end(arguments);                                                           \
    if (!changes_files(flags)) return real(path, flags, mode);                   \
    char full[PATH_MAX];                                                         \
    resolve(AT_FDCWD, path, full);                                               \
    const int verdict = count(full);                                             \
    FAIL_OR_DIE(verdict);                                                        \
    return created(real(path, flags, mode), flags, full);                        \
  }
DEFINE_OPEN(open)
DEFINE_OPEN(open64)

#define DEFINE_OPENAT(function)                                                             \
  int function(int directory, const char* path, int flags, ...) {                           \
    REAL(#function, int, (int, const char*, int, ...));                                     \
    va_list arguments;                                                                      \
    va_start(arguments, flags);                                                             \
    const int mode = va_arg(arguments, int);                                                \
    va_end(arguments);                                                                      \
    if (!changes_files(flags)) return real(directory, path, flags, mode);                   \
    char full[PATH_MAX];                                                                    \
    resolve(directory, path, full);                                                         \
    const int verdict = count(full);                                                        \
    FAIL_OR_DIE(verdict);                                                                   \
    return created(real(directory, path, flags, mode), flags, full);                        \
  }
DEFINE_OPENAT(openat)
DEFINE_OPENAT(openat64)

ssize_t write(int descriptor, const void* data, size_t size) {
  REAL("write", ssize_t, (int, const void*, size_t));
  char full[PATH_MAX];
  if (!root[0]) return real(descriptor, data, size);
  resolve(descriptor, NULL, full);
  const struct iovec piece = {(void*)data, size};
  const int verdict = count(full);
  if (verdict == 2 && real(descriptor, data, size / 2) >= 0) die();
  FAIL_OR_DIE(verdict);
  return logged(real(descriptor, data, size), "append", full, "", 0, &piece, 1);
}

#define DEFINE_PWRITEV(function)                                                                                      \
  ssize_t function(int descriptor, const struct iovec* pieces, int num_pieces, off_t offset) {                        \
    REAL(#function, ssize_t, (int, const struct iovec*, int, off_t));                                                 \
    char full[PATH_MAX];                                                                                              \
    if (!root[0]) return real(descriptor, pieces, num_pieces, offset);                                                \
    resolve(descriptor, NULL, full);                                                                                  \
    const int verdict = count(full);                                                                                  \
    if (verdict == 2 && real(descriptor, pieces, (num_pieces + 1) / 2, offset) >= 0) die();                           \
    FAIL_OR_DIE(verdict);                                                                                             \
    return logged(real(descriptor, pieces, num_pieces, offset), "write", full, "", (long)offset, pieces, num_pieces); \
  }
DEFINE_PWRITEV(pwritev)
DEFINE_PWRITEV(pwritev64)

int fsync(int descriptor) {
  REAL("fsync", int, (int));
  char full[PATH_MAX];
  resolve(descriptor, NULL, full);
  const int verdict = count(full);
  FAIL_OR_DIE(verdict);
  return (int)logged(real(descriptor), "fsync", full, "", 0, NULL, 0);
}

#define RENAME(kind, from, first, to, second, call)                   \
  char one[PATH_MAX], other[PATH_MAX];                                \
  resolve(from, first, one);                                          \
  resolve(to, second, other);                                         \
  const int verdict = count(one);                                     \
  FAIL_OR_DIE(verdict);                                               \
  const int result = (int)logged(call, kind, one, other, 0, NULL, 0); \
  if (verdict == 3) errno = fault_errno;                              \
  return verdict == 3 ? -1 : result

int rename(const char* first, const char* second) {
  REAL("rename", int, (const char*, const char*));
  RENAME("rename", AT_FDCWD, first, AT_FDCWD, second, real(first, second));
}

int renameat(int from, const char* first, int to, const char* second) {
  REAL("renameat", int, (int, const char*, int, const char*));
  RENAME("rename", from, first, to, second, real(from, first, to, second));
}

int renameat2(int from, const char* first, int to, const char* second, unsigned int flags) {
  REAL("renameat2", int, (int, const char*, int, const char*, unsigned int));
  if (refuses_exchange && flags == RENAME_EXCHANGE) {
    errno = EINVAL;
    return -1;
  }
  const char* kind = flags == RENAME_EXCHANGE ? "exchange" : "rename";
  RENAME(kind, from, first, to, second, real(from, first, to, second, flags));
}

int linkat(int from, const char* first, int to, const char* second, int flags) {
  REAL("linkat", int, (int, const char*, int, const char*, int));
  char file[PATH_MAX];
  const ssize_t size = flags & AT_SYMLINK_FOLLOW ? readlink(first, file, sizeof file - 1) : -1;
  if (size >= 0) file[size] = 0;
  RENAME("link", from, size < 0 ? first : file, to, second, real(from, first, to, second, flags));
}

#define CHANGE(kind, directory, path, call) \
  char full[PATH_MAX];                      \
  resolve(directory, path, full);           \
  const int verdict = count(full);          \
  FAIL_OR_DIE(verdict);                     \
  return (int)logged(call, kind, full, "", 0, NULL, 0)

int unlink(const char* path) {
  REAL("unlink", int, (const char*));
  CHANGE("unlink", AT_FDCWD, path, real(path));
}

int unlinkat(int directory, const char* path, int flags) {
  REAL("unlinkat", int, (int, const char*, int));
  CHANGE(flags & AT_REMOVEDIR ? "rmdir" : "unlink", directory, path, real(directory, path, flags));
}

int rmdir(const char* path) {
  REAL("rmdir", int, (const char*));
  CHANGE("rmdir", AT_FDCWD, path, real(path));
}

int mkdir(const char* path, mode_t mode) {
  REAL("mkdir", int, (const char*, mode_t));
  CHANGE("mkdir", AT_FDCWD, path, real(path, mode));
}
