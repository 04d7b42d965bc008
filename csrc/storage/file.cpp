#include "storage/file.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <utility>

#include "storage/errors.h"

namespace torchtitan_ext::storage {
namespace {

[[noreturn]] void throw_errno(const std::string& path, const std::string& what) {
  const int code = errno;
  throw IoError(code, path, core::concat(what, ": ", std::strerror(code)));
}

// Linux transfers at most 0x7ffff000 bytes a call; a call that asks for more is cut there anyway.
constexpr size_t kMaxPieces = IOV_MAX;

// Drops `done` bytes from the front.
std::span<iovec> drop_front(std::span<iovec> pieces, size_t done) {
  while (!pieces.empty() && done >= pieces[0].iov_len) {
    done -= pieces[0].iov_len;
    pieces = pieces.subspan(1);
  }
  if (!pieces.empty()) {
    pieces[0].iov_base = static_cast<char*>(pieces[0].iov_base) + done;
    pieces[0].iov_len -= done;
  }
  return pieces;
}

}  // namespace

File File::create(std::string path) {
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) throw_errno(path, "cannot replace the file");
  const int descriptor = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (descriptor < 0) throw_errno(path, "cannot create the file");
  return File(std::move(path), descriptor);
}

File File::open(std::string path, int descriptor) {
  descriptor = descriptor < 0 ? ::open(path.c_str(), O_RDONLY | O_CLOEXEC) : ::fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
  if (descriptor < 0) throw_errno(path, "cannot open the file");
  return File(std::move(path), descriptor);
}

File File::open_for_writing(std::string path) {
  const int descriptor = ::open(path.c_str(), O_WRONLY | O_CLOEXEC);
  if (descriptor < 0) throw_errno(path, "cannot open the file");
  return File(std::move(path), descriptor);
}

File::File(File&& other) noexcept : path_(std::move(other.path_)), descriptor_(std::exchange(other.descriptor_, -1)) {}

File::~File() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void File::transfer(std::span<iovec> pieces, int64_t offset, bool is_write) const {
  pieces = drop_front(pieces, 0);
  while (!pieces.empty()) {
    const int count = static_cast<int>(std::min(pieces.size(), kMaxPieces));
    const ssize_t done = is_write ? ::pwritev(descriptor_, pieces.data(), count, offset)
                                  : ::preadv(descriptor_, pieces.data(), count, offset);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) throw_errno(path_, core::concat(is_write ? "cannot write" : "cannot read", " at byte ", offset));
    if (done == 0) {
      if (is_write)
        errno = ENOSPC;
      else
        errno = ENODATA;
      throw_errno(path_, core::concat(is_write ? "nothing was written" : "the file ends", " at byte ", offset));
    }
    offset += done;
    pieces = drop_front(pieces, static_cast<size_t>(done));
  }
}

void File::write_at(std::span<iovec> pieces, int64_t offset) const { transfer(pieces, offset, true); }

void File::read_at(std::span<iovec> pieces, int64_t offset) const { transfer(pieces, offset, false); }

bool File::read_cached_at(std::span<const iovec> pieces, int64_t offset) const {
#ifdef RWF_NOWAIT
  if (pieces.size() > kMaxPieces) return false;
  ssize_t num_bytes = 0;
  for (const iovec& piece : pieces) num_bytes += static_cast<ssize_t>(piece.iov_len);
  return ::preadv2(descriptor_, pieces.data(), static_cast<int>(pieces.size()), offset, RWF_NOWAIT) == num_bytes;
#else
  (void)pieces;
  (void)offset;
  return false;
#endif
}

int64_t File::num_bytes() const {
  struct stat status{};
  if (::fstat(descriptor_, &status) != 0) throw_errno(path_, "cannot ask for the file's size");
  return status.st_size;
}

void File::reserve(int64_t offset, int64_t num_bytes) const {
#ifdef FALLOC_FL_KEEP_SIZE
  // Never posix_fallocate: where the file system cannot reserve, it writes zeros.
  (void)::fallocate(descriptor_, FALLOC_FL_KEEP_SIZE, offset, num_bytes);
#else
  (void)offset;
  (void)num_bytes;
#endif
}

void File::start_write_back(int64_t offset, int64_t num_bytes) const {
#ifdef SYNC_FILE_RANGE_WRITE
  ::sync_file_range(descriptor_, offset, num_bytes, SYNC_FILE_RANGE_WRITE);
#else
  (void)offset;
  (void)num_bytes;
#endif
}

void File::sync() const {
  while (::fsync(descriptor_) != 0) {
    if (errno != EINTR) throw_errno(path_, "cannot sync the file");
  }
}

void File::close() {
  // Linux closes the descriptor whatever it answers, EINTR too.
  if (::close(std::exchange(descriptor_, -1)) != 0 && errno != EINTR) throw_errno(path_, "cannot close the file");
}

void exchange_paths(const std::string& first, const std::string& second) {
  if (::renameat2(AT_FDCWD, first.c_str(), AT_FDCWD, second.c_str(), RENAME_EXCHANGE) != 0) {
    throw_errno(second, core::concat("cannot exchange it with ", first));
  }
}

namespace {

auto file_system_of(const std::string& path) {
  struct statfs status{};
  if (::statfs(path.c_str(), &status) != 0) throw_errno(path, "cannot ask for the file system");
  return status.f_type;
}

}  // namespace

bool is_on_fuse(const std::string& path) { return file_system_of(path) == FUSE_SUPER_MAGIC; }

bool is_on_network(const std::string& path) {
  constexpr uint32_t kCeph = 0x00c36400, kCifs = 0xff534d42, kSmb2 = 0xfe534d42;  // which linux/magic.h may lack
  switch (static_cast<uint32_t>(file_system_of(path))) {
    case FUSE_SUPER_MAGIC:
    case NFS_SUPER_MAGIC:
    case SMB_SUPER_MAGIC:
    case V9FS_MAGIC:
    case AFS_SUPER_MAGIC:
    case kCeph:
    case kCifs:
    case kSmb2:
      return true;
    default:
      return false;
  }
}

std::string read_file(const std::string& path, int64_t max_bytes) {
  const File file = File::open(path);
  const int64_t num_bytes = file.num_bytes();
  if (num_bytes > max_bytes) {
    throw FormatError(core::concat(path, ": has ", num_bytes, " bytes, expected at most ", max_bytes));
  }
  std::string content(static_cast<size_t>(num_bytes), '\0');
  iovec piece{content.data(), content.size()};
  file.read_at({&piece, 1}, 0);
  return content;
}

}  // namespace torchtitan_ext::storage
