// What goes wrong with files: the system refuses, or bytes are not what the format says.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "core/check.h"

namespace torchtitan_ext::storage {

// A system call failed. `code` is its errno; an OSError in Python.
class IoError : public std::runtime_error {
 public:
  IoError(int code, std::string path, const std::string& what)
      : std::runtime_error(what), code_(code), path_(std::move(path)) {}

  int code() const { return code_; }
  const std::string& path() const { return path_; }

 private:
  int code_;
  std::string path_;
};

// Bytes of a file are damaged, or newer than this reader. The text names the file and the byte.
class FormatError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <typename... Parts>
[[noreturn]] void throw_format_error(const std::string& where, int64_t byte, const Parts&... parts) {
  throw FormatError(core::concat(where, ": byte ", byte, ": ", parts...));
}

}  // namespace torchtitan_ext::storage
