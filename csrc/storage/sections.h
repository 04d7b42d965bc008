// The envelope of indexes and footers: a header, sections that a reader may skip, and a digest over all of it.
//
//     magic (8 bytes) | version u32 | needed_version u32 | features u32 | reserved u32 | num_bytes u64
//     section: tag u32 | flags u32 | num_bytes u64 | payload | zeros up to a multiple of 8
//     digest u64: XXH3 of everything before it
//
// `num_bytes` counts all of it, the digest included. A reader refuses a `needed_version` above its own, a feature bit
// and a required section (flag bit 0) that it does not know, and skips every other unknown section.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace torchtitan_ext::storage {

constexpr uint32_t kFormatVersion = 1;
constexpr uint32_t kRequiredSection = 1;  // bit 0 of a section's flags

struct Section {
  uint32_t tag = 0;
  uint32_t flags = 0;
  std::string_view bytes;
  int64_t offset = 0;  // of the payload, in the file
};

struct NewSection {
  uint32_t tag = 0;
  uint32_t flags = 0;
  std::string bytes;
};

std::string seal(std::string_view magic, const std::vector<NewSection>& sections);

// How many bytes sealed bytes have, by their header, the first `kSealedHeaderBytes` of them, which begin at byte `base`
// of the file that `where` names. Throws FormatError.
constexpr int64_t kSealedHeaderBytes = 32;
uint64_t sealed_bytes(std::string_view header, std::string_view magic, const std::string& where, int64_t base);

// The first section of sealed bytes of which only the beginning is there, at least that section. The digest stands at
// their end, so it is not compared. Throws FormatError.
Section first_section(std::string_view bytes, std::string_view magic, const std::string& where);

// The sections of sealed bytes, whose first byte is byte `base` of the file that `where` names; `known_tags` are those
// that the caller understands. Throws FormatError.
std::vector<Section> unseal(std::string_view bytes, std::string_view magic, const std::vector<uint32_t>& known_tags,
                            const std::string& where, int64_t base);

}  // namespace torchtitan_ext::storage
