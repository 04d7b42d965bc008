// A file descriptor whose calls finish what they begin: short transfers and EINTR are gone on with, calls of more than
// 2 GiB and of more than IOV_MAX pieces are cut. Every failure is an IoError that names the file and the byte.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace torchtitan_ext::storage {

class File {
 public:
  // A new file: one of that name is unlinked first, so who reads it keeps what he opened.
  static File create(std::string path);
  // Where a descriptor is given it is that file, whatever lies at the path by now, which is for messages only. The
  // descriptor stays the caller's.
  static File open(std::string path, int descriptor = -1);
  // A file that exists, to write into.
  static File open_for_writing(std::string path);
  File(File&& other) noexcept;
  File& operator=(File&&) = delete;
  ~File();

  // `pieces` are used up.
  void write_at(std::span<iovec> pieces, int64_t offset) const;
  // Reads all bytes of all pieces; a file that ends before is an IoError (ENODATA).
  void read_at(std::span<iovec> pieces, int64_t offset) const;
  // Reads what the page cache holds, without waiting for the disk. False where a byte is not there, or the system cannot
  // tell: the pieces hold part of the bytes then.
  bool read_cached_at(std::span<const iovec> pieces, int64_t offset) const;
  int64_t num_bytes() const;
  // Reserves room for bytes that are written next, so that the file system finds it in one piece. Only a hint: a full
  // disk shows when they are written.
  void reserve(int64_t offset, int64_t num_bytes) const;
  // Asks the system to begin with writing these bytes out. Only a hint: errors show in sync().
  void start_write_back(int64_t offset, int64_t num_bytes) const;
  void sync() const;
  // Errors of writes may show only here.
  void close();

  const std::string& path() const { return path_; }

 private:
  File(std::string path, int descriptor) : path_(std::move(path)), descriptor_(descriptor) {}
  void transfer(std::span<iovec> pieces, int64_t offset, bool is_write) const;

  std::string path_;
  int descriptor_;
};

// Two paths of one file system change places, at once (RENAME_EXCHANGE). An IoError with EINVAL, ENOSYS or EOPNOTSUPP
// where the file system cannot.
void exchange_paths(const std::string& first, const std::string& second);

// Whether a path lies on FUSE, where a rename may be a copy.
bool is_on_fuse(const std::string& path);

// Whether a path lies on a file system of another machine, or of another process (NFS, SMB, 9P, AFS, Ceph, FUSE), where
// several machines that write into one file wait for each other, or overwrite each other's pages.
bool is_on_network(const std::string& path);

// The whole content of a file of at most `max_bytes`.
std::string read_file(const std::string& path, int64_t max_bytes);

}  // namespace torchtitan_ext::storage
