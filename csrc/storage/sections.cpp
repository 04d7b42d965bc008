#include "storage/sections.h"

#include <algorithm>

#include "storage/bytes.h"
#include "storage/digest.h"

namespace torchtitan_ext::storage {
namespace {

constexpr uint64_t kSectionHeaderBytes = 16;
constexpr uint64_t kDigestBytes = 8;
constexpr uint64_t kAlignment = 8;

// Returns the size that the header says.
uint64_t check_header(ByteReader& reader, std::string_view magic) {
  if (reader.raw(magic.size()) != magic) {
    throw_format_error(reader.where(), reader.byte(), "is not ", magic, ": other bytes stand there");
  }
  const auto version = reader.number<uint32_t>();
  const auto needed = reader.number<uint32_t>();
  const auto features = reader.number<uint32_t>();
  reader.number<uint32_t>();
  if (needed > kFormatVersion) {
    throw_format_error(reader.where(), reader.byte(), "format version ", version, " needs a reader of version ", needed,
                       ", this one has ", kFormatVersion, "; upgrade torchtitan_ext");
  }
  if (features != 0) {
    throw_format_error(reader.where(), reader.byte(), "needs features ", features,
                       " that this reader does not have; upgrade torchtitan_ext");
  }
  return reader.number<uint64_t>();
}

Section read_section(ByteReader& reader) {
  Section section;
  section.tag = reader.number<uint32_t>();
  section.flags = reader.number<uint32_t>();
  const auto num_bytes = reader.number<uint64_t>();
  section.offset = reader.byte();
  section.bytes = reader.raw(num_bytes);
  return section;
}

}  // namespace

std::string seal(std::string_view magic, const std::vector<NewSection>& sections) {
  uint64_t num_bytes = kSealedHeaderBytes + kDigestBytes;
  for (const NewSection& section : sections) {
    num_bytes += kSectionHeaderBytes + (section.bytes.size() + kAlignment - 1) / kAlignment * kAlignment;
  }
  ByteWriter writer;
  writer.raw(magic).number(kFormatVersion).number(kFormatVersion).number(uint32_t{0}).number(uint32_t{0});
  writer.number(num_bytes);
  for (const NewSection& section : sections) {
    writer.number(section.tag).number(section.flags).number(static_cast<uint64_t>(section.bytes.size()));
    writer.raw(section.bytes).pad_to(kAlignment);
  }
  writer.number(digest_of(writer.bytes()));
  return writer.take();
}

uint64_t sealed_bytes(std::string_view header, std::string_view magic, const std::string& where, int64_t base) {
  ByteReader reader(header, where, base);
  return check_header(reader, magic);
}

Section first_section(std::string_view bytes, std::string_view magic, const std::string& where) {
  ByteReader reader(bytes, where);
  check_header(reader, magic);
  return read_section(reader);
}

std::vector<Section> unseal(std::string_view bytes, std::string_view magic, const std::vector<uint32_t>& known_tags,
                            const std::string& where, int64_t base) {
  ByteReader reader(bytes, where, base);
  const uint64_t said = check_header(reader, magic);
  if (said != bytes.size()) {
    throw_format_error(where, reader.byte(), "has ", bytes.size(), " bytes, expected ", said);
  }
  if (reader.left() < kDigestBytes) throw_format_error(where, reader.byte(), "ends too early: it has no digest");
  ByteReader digest(bytes.substr(bytes.size() - kDigestBytes), where, base);
  if (digest.number<uint64_t>() != digest_of(bytes.substr(0, bytes.size() - kDigestBytes))) {
    throw_format_error(where, base, "its ", bytes.size(), " bytes do not match their digest: it is damaged");
  }
  std::vector<Section> sections;
  while (reader.left() > kDigestBytes) {
    const Section section = read_section(reader);
    reader.raw((kAlignment - section.bytes.size() % kAlignment) % kAlignment);
    const bool is_known = std::ranges::find(known_tags, section.tag) != known_tags.end();
    if (!is_known && (section.flags & kRequiredSection) != 0) {
      throw_format_error(where, section.offset, "needs section ", section.tag,
                         " that this reader does not know; upgrade torchtitan_ext");
    }
    if (is_known) sections.push_back(section);
  }
  if (reader.left() != kDigestBytes) throw_format_error(where, reader.byte(), "a section reaches into the digest");
  return sections;
}

}  // namespace torchtitan_ext::storage
