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
  static File open(std::string path);
  File(File&& other) noexcept;
  File& operator=(File&&) = delete;
  ~File();

  // `pieces` are used up.
  void write_at(std::span<iovec> pieces, int64_t offset) const;
  // Reads all bytes of all pieces; a file that ends before is an IoError (ENODATA).
  void read_at(std::span<iovec> pieces, int64_t offset) const;
  int64_t num_bytes() const;
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

// The whole content of a file of at most `max_bytes`.
std::string read_file(const std::string& path, int64_t max_bytes);

}  // namespace torchtitan_ext::storage
