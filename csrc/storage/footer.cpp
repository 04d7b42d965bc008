#include "storage/footer.h"

#include <algorithm>
#include <optional>

#include "storage/bytes.h"
#include "storage/digest.h"
#include "storage/sections.h"

namespace torchtitan_ext::storage {
namespace {

constexpr std::string_view kMagic = "TTEFOOTR", kTrailerMagic = "TTETRAIL";
constexpr uint32_t kOriginTag = 1, kBlocksTag = 2;
constexpr uint32_t kXxh3 = 1;
constexpr uint64_t kTrailerBytes = 24;
// A footer has a checksum for each block, blocks of at least this size, and little else.
constexpr int64_t kLeastBlockBytes = 64;
constexpr int64_t kOtherBytes = 1 << 16;

void parse_origin(ByteReader reader, Footer& footer) {
  std::ranges::copy(reader.raw(footer.save_id.size()), footer.save_id.begin());
  footer.rank = reader.number<uint32_t>();
}

void parse_blocks(ByteReader reader, Footer& footer, int64_t footer_offset) {
  footer.covered_bytes = reader.number<int64_t>();
  footer.block_bytes = reader.number<uint32_t>();
  const auto algorithm = reader.number<uint32_t>();
  if (algorithm != kXxh3) throw_format_error(reader.where(), reader.byte(), "unknown checksum ", algorithm);
  if (footer.covered_bytes != footer_offset || footer.block_bytes == 0) {
    throw_format_error(reader.where(), reader.byte(), "checksums cover ", footer.covered_bytes, " bytes, expected ",
                       footer_offset);
  }
  const int64_t num_blocks = (footer.covered_bytes - 1) / footer.block_bytes + 1;
  if (static_cast<uint64_t>(footer_offset == 0 ? 0 : num_blocks) != reader.left() / sizeof(uint64_t)) {
    throw_format_error(reader.where(), reader.byte(), "has ", reader.left() / sizeof(uint64_t), " checksums, expected ",
                       num_blocks);
  }
  footer.checksums.resize(reader.left() / sizeof(uint64_t));
  for (uint64_t& checksum : footer.checksums) checksum = reader.number<uint64_t>();
}

}  // namespace

std::string encode_footer(const Footer& footer) {
  ByteWriter origin;
  for (const uint8_t byte : footer.save_id) origin.number(byte);
  origin.number(footer.rank);
  ByteWriter blocks;
  blocks.number(footer.covered_bytes).number(footer.block_bytes).number(kXxh3);
  for (const uint64_t checksum : footer.checksums) blocks.number(checksum);
  ByteWriter out;
  out.raw(seal(kMagic, {{kOriginTag, 0, origin.take()}, {kBlocksTag, kRequiredSection, blocks.take()}}));
  const auto sealed_bytes = static_cast<uint64_t>(out.size());
  out.number(footer.covered_bytes).number(sealed_bytes).raw(kTrailerMagic);
  return out.take();
}

Footer parse_footer(std::string_view bytes, const std::string& where, int64_t offset) {
  if (bytes.size() < kTrailerBytes || !bytes.ends_with(kTrailerMagic)) {
    throw_format_error(where, offset + static_cast<int64_t>(bytes.size()),
                       "the file does not end with a footer: it is cut");
  }
  ByteReader trailer(bytes.substr(bytes.size() - kTrailerBytes), where, offset);
  if (trailer.number<int64_t>() != offset || trailer.number<uint64_t>() != bytes.size() - kTrailerBytes) {
    throw_format_error(where, offset, "the end of the file points to another footer");
  }
  Footer footer;
  bool has_blocks = false;
  const std::string_view sealed = bytes.substr(0, bytes.size() - kTrailerBytes);
  for (const Section& section : unseal(sealed, kMagic, {kOriginTag, kBlocksTag}, where, offset)) {
    ByteReader reader(section.bytes, where, section.offset);
    if (section.tag == kOriginTag) parse_origin(reader, footer);
    if (section.tag == kBlocksTag) parse_blocks(reader, footer, offset);
    has_blocks |= section.tag == kBlocksTag;
  }
  if (!has_blocks) throw_format_error(where, offset, "the footer has no checksums");
  return footer;
}

std::string read_footer(const File& file, int64_t offset, int64_t num_bytes) {
  const auto read = [&](int64_t begin, int64_t count) {
    std::string bytes(static_cast<size_t>(count), '\0');
    iovec piece{bytes.data(), bytes.size()};
    file.read_at({&piece, 1}, begin);
    return bytes;
  };
  const int64_t footer_bytes = num_bytes - offset;
  const std::string head = read(offset, std::min(footer_bytes, kSealedHeaderBytes));
  const uint64_t said = sealed_bytes(head, kMagic, file.path(), offset) + kTrailerBytes;
  if (said != static_cast<uint64_t>(footer_bytes) || footer_bytes > kOtherBytes + offset / kLeastBlockBytes * 8) {
    throw_format_error(file.path(), offset, "the footer says that it has ", said, " bytes, and it has ", footer_bytes,
                       ", behind ", offset, " bytes that it covers");
  }
  return read(offset, footer_bytes);
}

std::optional<FoundFooter> find_footer(const File& file) {
  const int64_t num_bytes = file.num_bytes();
  const int64_t trailer_offset = num_bytes - static_cast<int64_t>(kTrailerBytes);
  if (trailer_offset < 0) return std::nullopt;
  std::string trailer(kTrailerBytes, '\0');
  iovec piece{trailer.data(), trailer.size()};
  file.read_at({&piece, 1}, trailer_offset);
  if (!trailer.ends_with(kTrailerMagic)) return std::nullopt;
  const auto offset = ByteReader(trailer, file.path(), trailer_offset).number<int64_t>();
  if (offset < 0 || offset > trailer_offset) {
    throw_format_error(file.path(), trailer_offset, "the footer begins at byte ", offset, ", outside of the file");
  }
  const std::string bytes = read_footer(file, offset, num_bytes);
  return FoundFooter{num_bytes, digest_of(bytes), parse_footer(bytes, file.path(), offset)};
}

}  // namespace torchtitan_ext::storage
