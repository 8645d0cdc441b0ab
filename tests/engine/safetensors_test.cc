// The container reader against well-formed and hostile files.
#include "engine/safetensors.h"

#include <catch2/catch.hpp>

#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/support/sanitizer.h"
#include "tests/support/skip.h"
#include "tests/support/temp_dir.h"

namespace moed {
namespace {

using testing::ReadFile;
using testing::TempDir;
using testing::WriteFile;
using Catch::Matchers::Contains;

std::string LengthBytes(uint64_t n) {
  std::string out(8, '\0');
  for (int i = 0; i < 8; ++i) out[i] = static_cast<char>(n >> (8 * i));
  return out;
}

// A file with this header and `data` zero bytes behind it.
std::string FileWith(const std::string& header, size_t data) {
  return absl::StrCat(LengthBytes(header.size()), header, std::string(data, '\0'));
}

std::string Entry(const std::string& name, const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return absl::StrCat("\"", name, "\":{\"dtype\":\"", dtype, "\",\"shape\":", shape, ",\"data_offsets\":", offsets, "}");
}

// The status of opening a file with exactly these bytes; the message must name the file.
absl::Status OpenBytes(const std::string& bytes) {
  TempDir dir;
  const std::string path = dir.File("bad.safetensors");
  WriteFile(path, bytes);
  const absl::StatusOr<std::unique_ptr<SafetensorsFile>> file = SafetensorsFile::Open(path);
  if (!file.ok()) CHECK_THAT(std::string(file.status().message()), Contains(path));
  return file.status();
}

absl::Status OpenHeader(const std::string& header, size_t data) { return OpenBytes(FileWith(header, data)); }

// Refused as INVALID_ARGUMENT with `text` in the message.
void CheckRefused(const absl::Status& status, const std::string& text) {
  CHECK(status.code() == absl::StatusCode::kInvalidArgument);
  CHECK_THAT(std::string(status.message()), Contains(text));
}

}  // namespace

TEST_CASE("A well-formed file is read with names, dtypes, shapes and bytes") {
  TempDir dir;
  const std::string path = dir.File("good.safetensors");
  // Entries out of data order, metadata, a scalar, an empty tensor, an escaped name, an odd offset, padding.
  const std::string header = absl::StrCat("{\"__metadata__\":{\"format\":\"pt\"},", Entry("b", "F32", "[]", "[3, 7]"), ",",
                                          Entry("a\\u002fb \\ud83d\\ude00", "U8", "[3]", "[0,3]"), ",",
                                          Entry("none", "BF16", "[0,5]", "[7,7]"), "}    ");
  std::string bytes = FileWith(header, 0);
  const float value = 2.5f;
  bytes += "xyz";
  bytes.append(reinterpret_cast<const char*>(&value), 4);
  WriteFile(path, bytes);

  const auto file = SafetensorsFile::Open(path);
  REQUIRE(file.ok());
  CHECK((*file)->tensors().size() == 3);
  CHECK((*file)->path() == path);
  CHECK((*file)->Find("a") == nullptr);

  const TensorInfo* scalar = (*file)->Find("b");
  REQUIRE(scalar != nullptr);
  CHECK(scalar->dtype == StDtype::kF32);
  CHECK(scalar->shape.empty());
  CHECK(scalar->elements() == 1);
  CHECK(scalar->bytes == 4);
  float got = 0;
  std::vector<uint8_t> buffer(4);
  REQUIRE((*file)->Read(*scalar, 0, buffer).ok());
  std::memcpy(&got, buffer.data(), 4);
  CHECK(got == value);

  const TensorInfo* text = (*file)->Find("a/b \xF0\x9F\x98\x80");
  REQUIRE(text != nullptr);
  std::vector<uint8_t> tail(2);
  REQUIRE((*file)->Read(*text, 1, tail).ok());
  CHECK(tail == std::vector<uint8_t>{'y', 'z'});

  const TensorInfo* none = (*file)->Find("none");
  REQUIRE(none != nullptr);
  CHECK(none->elements() == 0);
  CHECK((*file)->Read(*none, 0, {}).ok());
}

TEST_CASE("An object without tensors is a valid file") {
  CHECK(OpenHeader("{}", 0).ok());
  CHECK(OpenHeader("{\"__metadata__\":{}}", 0).ok());
  CheckRefused(OpenHeader("{}", 1), "trailing");
}

TEST_CASE("Reading beyond a tensor is out of range") {
  TempDir dir;
  WriteFile(dir.File("t"),
            FileWith(absl::StrCat("{", Entry("a", "U8", "[4]", "[0,4]"), ",", Entry("b", "U8", "[4]", "[4,8]"), "}"), 8));
  const auto file = SafetensorsFile::Open(dir.File("t"));
  REQUIRE(file.ok());
  const TensorInfo& tensor = *(*file)->Find("a");
  std::vector<uint8_t> buffer(4);
  CHECK((*file)->Read(tensor, 0, buffer).ok());
  CHECK((*file)->Read(tensor, 1, buffer).code() == absl::StatusCode::kOutOfRange);
  CHECK((*file)->Read(tensor, 5, {}).code() == absl::StatusCode::kOutOfRange);
  CHECK((*file)->Read(tensor, std::numeric_limits<uint64_t>::max(), buffer).code() == absl::StatusCode::kOutOfRange);
}

TEST_CASE("A file shortened after Open gives DATA_LOSS, never a fault") {
  TempDir dir;
  const std::string path = dir.File("t");
  WriteFile(path, FileWith(absl::StrCat("{", Entry("a", "F32", "[1024]", "[0,4096]"), "}"), 4096));
  const auto file = SafetensorsFile::Open(path);
  REQUIRE(file.ok());
  REQUIRE(::truncate(path.c_str(), 1000) == 0);
  std::vector<uint8_t> buffer(4096);
  const absl::Status status = (*file)->Read(*(*file)->Find("a"), 0, buffer);
  CHECK(status.code() == absl::StatusCode::kDataLoss);
  CHECK_THAT(std::string(status.message()), Contains(path) && Contains("byte 1000"));
}

TEST_CASE("What is no regular file is refused") {
  TempDir dir;
  CHECK(SafetensorsFile::Open(dir.File("absent")).status().code() == absl::StatusCode::kNotFound);
  CHECK(SafetensorsFile::Open(dir.path()).status().code() == absl::StatusCode::kInvalidArgument);
  // A pipe without a writer must not make Open wait.
  REQUIRE(::mkfifo(dir.File("pipe").c_str(), 0600) == 0);
  CHECK(SafetensorsFile::Open(dir.File("pipe")).status().code() == absl::StatusCode::kInvalidArgument);
}

TEST_CASE("Each crafted file of B35 is refused by name") {
  const auto one = [](const std::string& dtype, const std::string& shape, const std::string& offsets, size_t data) {
    return OpenHeader(absl::StrCat("{", Entry("w.bad", dtype, shape, offsets), "}"), data);
  };
  CheckRefused(one("F32", "[32,8]", "[0,65536]", 65536), "w.bad");
  CheckRefused(one("F32", "[1000,1000]", "[0,4]", 4), "w.bad");
  CheckRefused(one("F32", "[8589934592,8589934592]", "[0,4]", 4), "w.bad");
  CheckRefused(one("F32", "[1]", "[4,0]", 4), "w.bad");
  CheckRefused(one("F7", "[1]", "[0,4]", 4), "w.bad");
  CheckRefused(one("F32", "[-1]", "[0,4]", 4), "w.bad");
  CheckRefused(OpenBytes(absl::StrCat(LengthBytes(0x7FFFFFFFFFFFFFFFull), "{}")), "9223372036854775807");
  CheckRefused(OpenBytes(absl::StrCat(LengthBytes(0xFFFFFFFFFFFFFFFFull), "{}")), "18446744073709551615");
  CheckRefused(
      OpenHeader(absl::StrCat("{", Entry("one", "U8", "[4]", "[0,4]"), ",", Entry("w.bad", "U8", "[4]", "[2,6]"), "}"), 6),
      "w.bad");
  CheckRefused(
      OpenHeader(absl::StrCat("{", Entry("w.bad", "U8", "[4]", "[0,4]"), ",", Entry("w.bad", "U8", "[4]", "[4,8]"), "}"), 8),
      "\"w.bad\" appears twice");
}

TEST_CASE("Sizes and offsets near the integer limits are refused without overflow") {
  const auto one = [](const std::string& shape, const std::string& offsets) {
    return OpenHeader(absl::StrCat("{", Entry("w", "F32", shape, offsets), "}"), 4);
  };
  CheckRefused(one("[9223372036854775807]", "[0,4]"), "overflows");
  CheckRefused(one("[9223372036854775808]", "[0,4]"), "9223372036854775808");
  CheckRefused(one("[18446744073709551616]", "[0,4]"), "2^64");
  CheckRefused(one("[99999999999999999999999999]", "[0,4]"), "2^64");
  CheckRefused(one("[4611686018427387904,4]", "[0,4]"), "overflows");
  CheckRefused(one("[4294967296,4294967296,0]", "[0,0]"), "overflows");
  CheckRefused(one("[0,4294967296,4294967296]", "[0,0]"), "overflows");
  CheckRefused(one("[1]", "[18446744073709551612,18446744073709551616]"), "2^64");
  CheckRefused(one("[1]", "[18446744073709551611,18446744073709551615]"), "outside the data area");
  CheckRefused(one("[1,1,1,1,1,1,1,1,1]", "[0,4]"), "dimensions");
  CHECK(one("[1,1,1,1,1,1,1,1]", "[0,4]").ok());
}

TEST_CASE("Numbers must be plain unsigned integers") {
  for (const char* number :
       {"-1", "-0", "1.0", "1.5", "1e0", "1E2", "01", "+1", "0x1", "\"1\"", "null", "true", "[1]", "{}", "NaN", ""}) {
    CAPTURE(number);
    CheckRefused(OpenHeader(absl::StrCat("{", Entry("w", "U8", absl::StrCat("[", number, ",1]"), "[0,1]"), "}"), 1),
                 "\"w\"");
    CheckRefused(OpenHeader(absl::StrCat("{", Entry("w", "U8", "[1]", absl::StrCat("[0,", number, "]")), "}"), 1), "\"w\"");
  }
}

TEST_CASE("The data area must be covered exactly once") {
  const std::string a = Entry("a", "U8", "[4]", "[0,4]");
  CheckRefused(OpenHeader(absl::StrCat("{", a, ",", Entry("b", "U8", "[4]", "[5,9]"), "}"), 9), "a hole");
  CheckRefused(OpenHeader(absl::StrCat("{", Entry("late", "U8", "[4]", "[1,5]"), "}"), 5), "\"late\"");
  CheckRefused(OpenHeader(absl::StrCat("{", a, ",", Entry("b", "U8", "[4]", "[3,7]"), "}"), 7), "overlap");
  CheckRefused(OpenHeader(absl::StrCat("{", a, ",", Entry("same", "U8", "[4]", "[0,4]"), "}"), 4), "overlap");
  CheckRefused(OpenHeader(absl::StrCat("{", a, ",", Entry("inside", "U8", "[0]", "[2,2]"), "}"), 4), "\"inside\"");
  CheckRefused(OpenHeader(absl::StrCat("{", a, "}"), 5), "1 trailing bytes");
  CheckRefused(OpenHeader(absl::StrCat("{", a, "}"), 3), "outside the data area of 3 bytes");
  CHECK(OpenHeader(absl::StrCat("{", a, ",", Entry("empty", "U8", "[0]", "[4,4]"), "}"), 4).ok());
}

TEST_CASE("A file cut anywhere is refused") {
  const std::string header = absl::StrCat("{\"__metadata__\":{\"format\":\"pt\"},", Entry("a", "F32", "[2,3]", "[0,24]"),
                                          ",", Entry("b\\u00e4", "BF16", "[4]", "[24,32]"), "}  ");
  const std::string whole = FileWith(header, 32);
  REQUIRE(OpenBytes(whole).ok());
  for (size_t size = 0; size < whole.size(); ++size) {
    CAPTURE(size);
    CheckRefused(OpenBytes(whole.substr(0, size)), "");
  }
  // The header cut with its length corrected: every boundary inside the JSON. Only padding may go.
  for (size_t size = 0; size < header.size(); ++size) {
    CAPTURE(size);
    const bool only_padding = header.find_last_not_of(' ') < size;
    CHECK(OpenHeader(header.substr(0, size), 32).ok() == only_padding);
  }
}

TEST_CASE("No single changed byte of the header crashes the reader") {
  const std::string header = absl::StrCat("{\"__metadata__\":{\"k\":\"v\"},", Entry("a\\n", "F32", "[2,3]", "[0,24]"), "}");
  int accepted = 0;
  for (size_t at = 0; at < header.size(); ++at) {
    for (const int byte : {0x00, 0x20, 0x22, 0x2C, 0x2D, 0x30, 0x39, 0x5B, 0x5C, 0x5D, 0x7B, 0x7D, 0x80, 0xC3, 0xFF}) {
      std::string changed = header;
      changed[at] = static_cast<char>(byte);
      const absl::Status status = OpenHeader(changed, 24);
      accepted += status.ok();
      CHECK((status.ok() || status.code() == absl::StatusCode::kInvalidArgument));
    }
  }
  CHECK(accepted > 0);  // letters of names and metadata may change
}

TEST_CASE("Grammar that is not a safetensors header is refused") {
  for (const char* header : {"",
                             " {}",
                             "[]",
                             "null",
                             "{",
                             "{}}",
                             "{} x",
                             "{},",
                             "{\"a\"}",
                             "{\"a\":}",
                             "{\"a\":1}",
                             "{\"a\":null}",
                             "{\"a\":[]}",
                             "{\"a\":\"b\"}",
                             "{\"a\":{}}",
                             "{,}",
                             "{\"__metadata__\":null}",
                             "{\"__metadata__\":{},}",
                             "{\"__metadata__\":{\"a\":1}}",
                             "{\"__metadata__\":{\"a\":null}}",
                             "{\"__metadata__\":{\"a\":{\"b\":\"c\"}}}",
                             "{\"__metadata__\":[\"a\"]}",
                             "{\"__metadata__\":{\"a\":\"1\",\"a\":\"2\"}}",
                             "{\"__metadata__\":{},\"__metadata__\":{}}",
                             "{\"__metadata__\":{\"a\":\"\x01\"}}",
                             "{\"__metadata__\":{\"a\":\"\\x41\"}}",
                             "\xEF\xBB\xBF{}",
                             "{'a':{}}",
                             "{}\x01"}) {
    CAPTURE(header);
    CheckRefused(OpenHeader(header, 0), "");
  }
}

TEST_CASE("An entry has its three fields, once each, and no other") {
  const auto one = [](const std::string& body) { return OpenHeader(absl::StrCat("{\"w\":{", body, "}}"), 1); };
  const std::string dtype = "\"dtype\":\"U8\"", shape = "\"shape\":[1]", offsets = "\"data_offsets\":[0,1]";
  CHECK(one(absl::StrCat(offsets, ",", shape, ",", dtype)).ok());
  CheckRefused(one(absl::StrCat(dtype, ",", shape)), "no data_offsets");
  CheckRefused(one(absl::StrCat(dtype, ",", offsets)), "no shape");
  CheckRefused(one(absl::StrCat(shape, ",", offsets)), "no dtype");
  CheckRefused(one(absl::StrCat(dtype, ",", shape, ",", offsets, ",\"strides\":[1]")), "unknown field \"strides\"");
  CheckRefused(one(absl::StrCat(dtype, ",", shape, ",", offsets, ",", dtype)), "dtype twice");
  CheckRefused(one(absl::StrCat(dtype, ",", shape, ",", shape, ",", offsets)), "shape twice");
  CheckRefused(one(absl::StrCat(dtype, ",", shape, ",\"data_offsets\":[0]")), "1 numbers");
  CheckRefused(one(absl::StrCat(dtype, ",", shape, ",\"data_offsets\":[0,1,1]")), "more than 2");
  CheckRefused(one(absl::StrCat("\"dtype\":8,", shape, ",", offsets)), "\"w\"");
  for (const char* name : {"u8", "F32 ", "", "FLOAT", "F8", "BF16\\u0000"}) {
    CAPTURE(name);
    CheckRefused(one(absl::StrCat("\"dtype\":\"", name, "\",", shape, ",", offsets)), "unknown dtype");
  }
}

TEST_CASE("Every dtype of the format has its size") {
  const std::vector<std::pair<std::string, int>> bits = {
      {"BOOL", 8},        {"U8", 8},          {"I8", 8},      {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8},
      {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16},    {"BF16", 16},
      {"I32", 32},        {"U32", 32},        {"F32", 32},    {"C64", 64},    {"F64", 64},    {"I64", 64},
      {"U64", 64},        {"F4", 4},          {"F6_E2M3", 6}, {"F6_E3M2", 6}};
  for (const auto& [name, width] : bits) {
    CAPTURE(name);
    const size_t bytes = static_cast<size_t>(width);  // of 8 elements
    TempDir dir;
    WriteFile(dir.File("t"),
              FileWith(absl::StrCat("{", Entry("w", name, "[8]", absl::StrCat("[0,", bytes, "]")), "}"), bytes));
    const auto file = SafetensorsFile::Open(dir.File("t"));
    REQUIRE(file.ok());
    const TensorInfo& tensor = *(*file)->Find("w");
    CHECK(StDtypeName(tensor.dtype) == name);
    CHECK(StDtypeBits(tensor.dtype) == width);
    CHECK(tensor.bytes == bytes);
    CheckRefused(OpenHeader(absl::StrCat("{", Entry("w", name, "[8]", absl::StrCat("[0,", bytes + 1, "]")), "}"), bytes + 1),
                 "\"w\"");
  }
  CheckRefused(OpenHeader(absl::StrCat("{", Entry("w", "F4", "[2,3]", "[0,3]"), "}"), 3), "even last dimension");
  CheckRefused(OpenHeader(absl::StrCat("{", Entry("w", "F6_E2M3", "[3]", "[0,3]"), "}"), 3), "18 bits");
}

TEST_CASE("Names are UTF-8 and compared after decoding") {
  const auto named = [](const std::string& name) {
    return OpenHeader(absl::StrCat("{", Entry(name, "U8", "[1]", "[0,1]"), "}"), 1);
  };
  for (const char* good :
       {"", "\\u0000", "../../etc/passwd", "\xC3\xA4", "\xE2\x82\xAC", "\xF0\x9F\x98\x80", "\\u00e4", "a\x7F"}) {
    CAPTURE(good);
    CHECK(named(good).ok());
  }
  for (const char* bad : {"\xFF",
                          "\x80",
                          "\xC3",
                          "\xC3(",
                          "\xC0\xAF",
                          "\xE0\x80\xAF",
                          "\xED\xA0\x80",
                          "\xF4\x90\x80\x80",
                          "\xF5\x80\x80\x80",
                          "\xC3\\u00a4",
                          "a\nb",
                          "a\tb",
                          "\\ud800",
                          "\\udc00",
                          "\\ud800\\u0041",
                          "\\ud83d\\ud83d",
                          "\\u12",
                          "\\u12g4",
                          "\\q",
                          "\\u-123",
                          "\\"}) {
    CAPTURE(bad);
    CheckRefused(named(bad), "");
  }
  CheckRefused(
      OpenHeader(absl::StrCat("{", Entry("ab", "U8", "[1]", "[0,1]"), ",", Entry("a\\u0062", "U8", "[1]", "[1,2]"), "}"), 2),
      "twice");
  CHECK(named(std::string(4096, 'n')).ok());
  CheckRefused(named(std::string(4097, 'n')), "longer than 4096");
  // Messages stay printable and short whatever the name is.
  const absl::Status status =
      OpenHeader(absl::StrCat("{", Entry("\\u001b[31m" + std::string(4000, 'x'), "F7", "[1]", "[0,1]"), "}"), 1);
  CHECK(status.message().find('\x1b') == std::string::npos);
  CHECK(status.message().size() < 500);
}

TEST_CASE("Nested garbage is refused at its first level") {
  std::string deep = "{\"w\":{\"shape\":";
  CheckRefused(OpenHeader(absl::StrCat(deep, std::string(1000000, '['), "}}"), 0), "\"w\"");
  std::string objects = "{";
  for (int i = 0; i < 100000; ++i) objects += "\"a\":{";
  CheckRefused(OpenHeader(objects, 0), "unknown field");
}

TEST_CASE("A header above the limit is refused before it is read") {
  TempDir dir;
  const std::string path = dir.File("big");
  // A sparse file: the claimed header is really there, as zeros.
  WriteFile(path, absl::StrCat(LengthBytes((64ull << 20) + 1), "{"));
  REQUIRE(::truncate(path.c_str(), 200 << 20) == 0);
  CheckRefused(SafetensorsFile::Open(path).status(), "at most 67108864");
}

TEST_CASE("Hostile headers near the size limit stay within 64 MiB and a second") {
  if (testing::kAddressSanitizer) return testing::Skip("AddressSanitizer changes the memory that a process takes");
  struct Case {
    const char* what;
    std::function<std::string(size_t)> piece;  // entry number i, without a comma
  };
  const std::vector<Case> cases = {
      {"endless tensors with short names", [](size_t i) { return Entry(absl::StrCat(i), "U8", "[0]", "[0,0]"); }},
      {"long names", [](size_t i) { return Entry(absl::StrCat(std::string(300, 'n'), i), "U8", "[0]", "[0,0]"); }},
      {"a hole at the end",
       [](size_t i) { return Entry(absl::StrCat(std::string(60, 'n'), i), "U8", "[1]", i == 400000 ? "[9,10]" : "[0,1]"); }},
      {"the same name again and again", [](size_t) { return Entry(std::string(90, 's'), "U8", "[0]", "[0,0]"); }},
  };
  for (const Case& c : cases) {
    CAPTURE(c.what);
    TempDir dir;
    const std::string path = dir.File("hostile");
    {
      std::ofstream out(path, std::ios::binary);
      out << LengthBytes(60ull << 20) << "{\"__metadata__\":{\"x\":\"y\"}";
      size_t size = 25;
      for (size_t i = 0; size < (60u << 20) - 500u; ++i) {
        const std::string piece = "," + c.piece(i);
        out << piece;
        size += piece.size();
      }
      out << std::string((60u << 20) - size - 1, ' ') << "}";  // ends the object at the claimed length
      out << "tail";                                          // bytes that no tensor covers: bad in every case
    }
    struct rusage before, after;
    ::getrusage(RUSAGE_SELF, &before);
    const auto start = std::chrono::steady_clock::now();
    CheckRefused(SafetensorsFile::Open(path).status(), "");
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    ::getrusage(RUSAGE_SELF, &after);
    CHECK(after.ru_maxrss - before.ru_maxrss < 64 * 1024);  // KiB
    CHECK(took.count() < 20.0);                             // hang guard
  }
}

TEST_CASE("A single endless string costs no memory") {
  if (testing::kAddressSanitizer) return testing::Skip("AddressSanitizer changes the memory that a process takes");
  TempDir dir;
  const std::string path = dir.File("string");
  for (const char* begin : {"{\"", "{\"__metadata__\":{\"k\":\"", "{\"w\":{\"dtype\":\""}) {
    CAPTURE(begin);
    {
      std::ofstream out(path, std::ios::binary);
      out << LengthBytes(60ull << 20) << begin;
      const std::string block(1 << 20, 'x');
      for (int i = 0; i < 61; ++i) out << block;
    }
    struct rusage before, after;
    ::getrusage(RUSAGE_SELF, &before);
    CheckRefused(SafetensorsFile::Open(path).status(), "");
    ::getrusage(RUSAGE_SELF, &after);
    CHECK(after.ru_maxrss - before.ru_maxrss < 8 * 1024);
  }
}

TEST_CASE("A hundred thousand tensors open and are found") {
  TempDir dir;
  const std::string path = dir.File("many");
  constexpr int kCount = 100000;
  std::vector<SafetensorsWriter::Tensor> tensors;
  for (int i = 0; i < kCount; ++i)
    tensors.push_back({absl::StrCat("model.layers.0.mlp.experts.", i, ".up_proj.weight"), StDtype::kU8, {1}});
  auto writer = SafetensorsWriter::Create(path, tensors);
  REQUIRE(writer.ok());
  REQUIRE((*writer)->Append(std::vector<uint8_t>(kCount, 7)).ok());
  REQUIRE((*writer)->Finish().ok());
  const auto file = SafetensorsFile::Open(path);
  REQUIRE(file.ok());
  CHECK((*file)->tensors().size() == kCount);
  CHECK((*file)->Find("model.layers.0.mlp.experts.99999.up_proj.weight") != nullptr);
}

}  // namespace moed
