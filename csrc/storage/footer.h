// What stands behind the last record of a rank file: checksums of its blocks, and which save it belongs to.
//
//     sealed sections (sections.h, magic "TTEFOOTR") | offset of the footer u64 | its sealed bytes u64 | "TTETRAIL"
//
// Block i is bytes [i * block_bytes, (i + 1) * block_bytes) of the file, the last one ends where the footer begins. A
// reader without the index finds the footer by the last 24 bytes.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "storage/file.h"

namespace torchtitan_ext::storage {

using SaveId = std::array<uint8_t, 16>;

struct Footer {
  SaveId save_id{};
  uint32_t rank = 0;
  uint32_t block_bytes = 0;
  int64_t covered_bytes = 0;
  std::vector<uint64_t> checksums;  // XXH3 of each block
};

std::string encode_footer(const Footer& footer);

// `bytes` are the end of a file from byte `offset` on, trailer included. Throws FormatError.
Footer parse_footer(std::string_view bytes, const std::string& where, int64_t offset);

// The end of a file of so many bytes from byte `offset` on, trailer included. Whoever says where it begins may have made it
// up, so memory is taken only for what can be a footer. Throws FormatError.
std::string read_footer(const File& file, int64_t offset, int64_t num_bytes);

// The footer of a file of which no index tells; none where the file does not end as one with a footer does. Throws
// FormatError where it is damaged.
struct FoundFooter {
  int64_t num_bytes = 0;  // of the file
  uint64_t digest = 0;    // of all bytes of the footer
  Footer footer;          // lies behind the bytes that it covers
};
std::optional<FoundFooter> find_footer(const File& file);

}  // namespace torchtitan_ext::storage
