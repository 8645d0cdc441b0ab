// Element types, sizes and names of the container: what reader and writer both check. Pure functions.
#include <algorithm>
#include <array>
#include <functional>
#include <limits>

#include "absl/strings/str_cat.h"
#include "engine/outside_name.h"
#include "engine/safetensors.h"
#include "engine/safetensors_header.h"

namespace moed {
namespace {

struct DtypeRow {
  const char* name;
  int bits;
};

// In the order of StDtype.
constexpr std::array<DtypeRow, 22> kDtypes = {{
    {"BOOL", 8},        {"U8", 8},          {"I8", 8},      {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8},
    {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16},    {"BF16", 16},
    {"I32", 32},        {"U32", 32},        {"F32", 32},    {"C64", 64},    {"F64", 64},    {"I64", 64},
    {"U64", 64},        {"F4", 4},          {"F6_E2M3", 6}, {"F6_E3M2", 6},
}};
static_assert(kDtypes.size() == static_cast<size_t>(StDtype::kF6E3m2) + 1);

}  // namespace

int StDtypeBits(StDtype dtype) { return kDtypes[static_cast<size_t>(dtype)].bits; }

const char* StDtypeName(StDtype dtype) { return kDtypes[static_cast<size_t>(dtype)].name; }

bool DtypeFromName(const std::string& name, StDtype* dtype) {
  for (size_t i = 0; i < kDtypes.size(); ++i) {
    if (name != kDtypes[i].name) continue;
    *dtype = static_cast<StDtype>(i);
    return true;
  }
  return false;
}

int64_t TensorInfo::elements() const {
  int64_t count = 1;
  for (const int64_t dimension : shape) count *= dimension;
  return count;
}

std::string ShapeText(std::span<const int64_t> shape) {
  std::string out = "[";
  for (size_t i = 0; i < shape.size(); ++i) absl::StrAppend(&out, i == 0 ? "" : ", ", shape[i]);
  return absl::StrCat(out, "]");
}

absl::StatusOr<uint64_t> TensorBytes(StDtype dtype, std::span<const int64_t> shape) {
  const auto what = [dtype, shape] { return absl::StrCat(StDtypeName(dtype), " ", ShapeText(shape)); };
  if (shape.size() > kMaxRank)
    return absl::InvalidArgumentError(absl::StrCat("more than ", kMaxRank, " dimensions: ", what()));
  const uint64_t bits = static_cast<uint64_t>(StDtypeBits(dtype));
  // Counted in bits, and below 2^63, so that element counts, byte counts and their products fit into int64 everywhere.
  uint64_t total = bits;
  bool empty = false;
  for (const int64_t dimension : shape) {
    if (dimension < 0) return absl::InvalidArgumentError(absl::StrCat("a negative dimension in ", what()));
    empty = empty || dimension == 0;
    if (dimension == 0) continue;
    if (total > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()) / static_cast<uint64_t>(dimension)) {
      return absl::InvalidArgumentError(absl::StrCat("the size of ", what(), " overflows"));
    }
    total *= static_cast<uint64_t>(dimension);
  }
  if (dtype == StDtype::kF4 && !shape.empty() && shape.back() % 2 != 0) {
    return absl::InvalidArgumentError(absl::StrCat("F4 needs an even last dimension, found ", ShapeText(shape)));
  }
  if (empty) return 0;
  if (total % 8 != 0) return absl::InvalidArgumentError(absl::StrCat(what(), " has ", total, " bits, not whole bytes"));
  return total / 8;
}

bool Utf8Checker::Feed(uint8_t byte) {
  if (left_ > 0) {
    if (byte < low_ || byte > high_) return false;
    --left_;
    low_ = 0x80;
    high_ = 0xBF;
    return true;
  }
  if (byte < 0x80) return true;
  if (byte < 0xC2 || byte > 0xF4) return false;
  left_ = byte < 0xE0 ? 1 : byte < 0xF0 ? 2 : 3;
  // The first continuation byte is narrower after these: overlong forms, surrogates, beyond U+10FFFF.
  if (byte == 0xE0) low_ = 0xA0;
  if (byte == 0xED) high_ = 0x9F;
  if (byte == 0xF0) low_ = 0x90;
  if (byte == 0xF4) high_ = 0x8F;
  return true;
}

bool IsUtf8(const std::string& text) {
  Utf8Checker checker;
  for (const char c : text) {
    if (!checker.Feed(static_cast<uint8_t>(c))) return false;
  }
  return checker.complete();
}

std::array<uint64_t, 2> HashName(const std::string& name) {
  uint64_t fnv = 0xCBF29CE484222325ull;
  for (const char c : name) fnv = (fnv ^ static_cast<uint8_t>(c)) * 0x100000001B3ull;
  return {std::hash<std::string>()(name), fnv};
}

std::string QuotedName(const std::string& name) {
  constexpr size_t kShown = 120;
  std::string out = "\"";
  for (size_t i = 0; i < std::min(name.size(), kShown); ++i) {
    const uint8_t byte = static_cast<uint8_t>(name[i]);
    if (byte < 0x20 || byte == 0x7F) {
      absl::StrAppend(&out, "\\x", absl::Hex(byte, absl::kZeroPad2));
    } else {
      out.push_back(name[i]);
    }
  }
  // Never cut inside a character: messages travel as UTF-8.
  if (name.size() > kShown) {
    while (!IsUtf8(out)) out.pop_back();
    absl::StrAppend(&out, "...");
  }
  return absl::StrCat(out, "\"");
}

}  // namespace moed
