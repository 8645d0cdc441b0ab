// B35: safetensors files that lie about themselves, alone and as a shard, are refused by name, without a crash, and at the
// cost of what is in the file and not of what it claims.
#include <catch2/catch.hpp>

#include <unistd.h>

#include <cstring>

#include "absl/strings/str_cat.h"
#include "tests/cases/bad_files.h"

namespace moed::testing {
namespace {

constexpr char kBad[] = "model.layers.0.mlp.experts.1.up_proj.weight";

std::string LengthBytes(uint64_t length) {
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &length, 8);
  return bytes;
}

// A file of raw bytes beside a sound config.json, as the only file or as the second shard of an index.
std::function<void(const TempDir&)> Raw(const std::string& bytes) {
  return [=](const TempDir& dir) {
    WriteFile(dir.File("config.json"), ConfigText(SmallSpec()));
    WriteFile(dir.File("model.safetensors"), bytes);
  };
}

std::string FileOf(const std::string& header, size_t data) {
  return absl::StrCat(LengthBytes(header.size()), header, std::string(data, '\0'));
}

std::string Entry(const std::string& name, const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return absl::StrCat("\"", name, "\":{\"dtype\":", dtype, ",\"shape\":", shape, ",\"data_offsets\":", offsets, "}");
}

// One tensor kBad, with `data` bytes in the file.
BadFile One(const std::string& what, const std::string& dtype, const std::string& shape, const std::string& offsets,
            size_t data) {
  return {what, Raw(FileOf(absl::StrCat("{", Entry(kBad, dtype, shape, offsets), "}"), data)), {"model.safetensors", kBad}};
}

BadFile Header(const std::string& what, const std::string& header, size_t data, const std::string& named = "") {
  return {what, Raw(FileOf(header, data)), {"model.safetensors", named}};
}

}  // namespace

TEST_CASE("B35: a tensor whose shape, type and byte range disagree is refused by name") {
  const std::string f32 = "\"F32\"";
  CheckRefused({
      One("more bytes than the shape", f32, "[32,8]", "[0,65536]", 65536),
      One("fewer bytes than the shape", f32, "[1000,1000]", "[0,4]", 4),
      One("a product of dimensions above 2^64", f32, "[8589934592,8589934592]", "[0,4]", 4),
      One("a product of dimensions of 2^64, hidden by a zero", f32, "[4294967296,4294967296,0]", "[0,0]", 0),
      One("a dimension of 2^63 - 1", f32, "[9223372036854775807]", "[0,4]", 4),
      One("a dimension of 2^64", f32, "[18446744073709551616]", "[0,4]", 4),
      One("a dimension of -1", f32, "[-1]", "[0,4]", 4),
      One("a dimension of -0", f32, "[-0]", "[0,0]", 0),
      One("a dimension with a fraction", f32, "[1.5]", "[0,4]", 4),
      One("a dimension with an exponent", f32, "[1e0]", "[0,4]", 4),
      One("a dimension as text", f32, "[\"1\"]", "[0,4]", 4),
      One("a shape of 10^6 ones", f32, absl::StrCat("[1", Times(999999, ",1"), "]"), "[0,4]", 4),
      One("a shape of 10^6 digits", f32, absl::StrCat("[", std::string(1000000, '9'), "]"), "[0,4]", 4),
      One("a shape nested 10^6 deep", f32, std::string(1000000, '['), "[0,4]", 4),
      One("no shape but null", f32, "null", "[0,4]", 4),
      One("a range that ends before it starts", f32, "[1]", "[4,0]", 4),
      One("a range beyond the file", f32, "[1024]", "[0,4096]", 4),
      One("a range of terabytes", f32, "[1099511627776]", "[0,4398046511104]", 4),
      One("a range that wraps around", f32, "[1]", "[18446744073709551612,18446744073709551616]", 4),
      One("a range near 2^64", f32, "[1]", "[18446744073709551611,18446744073709551615]", 4),
      One("a negative range", f32, "[1]", "[-4,0]", 4),
      One("a range of one number", f32, "[1]", "[0]", 4),
      One("a range of three numbers", f32, "[1]", "[0,4,4]", 4),
      One("the type F7", "\"F7\"", "[1]", "[0,4]", 4),
      One("the type f32", "\"f32\"", "[1]", "[0,4]", 4),
      One("a type of 10^6 letters", absl::StrCat("\"", std::string(1000000, 'F'), "\""), "[1]", "[0,4]", 4),
      One("a type that is a number", "32", "[1]", "[0,4]", 4),
      One("half a byte", "\"F4\"", "[3]", "[0,2]", 2),
  });
}

TEST_CASE("B35: tensors that overlap, leave holes or have one name are refused by name") {
  const std::string good = Entry("a", "\"U8\"", "[4]", "[0,4]");
  const auto with = [&](const std::string& entry) { return absl::StrCat("{", good, ",", entry, "}"); };
  CheckRefused({
      Header("an overlap", with(Entry(kBad, "\"U8\"", "[4]", "[2,6]")), 6, kBad),
      Header("the same range", with(Entry(kBad, "\"U8\"", "[4]", "[0,4]")), 4, kBad),
      Header("one inside the other", with(Entry(kBad, "\"U8\"", "[2]", "[1,3]")), 4, kBad),
      Header("a hole", with(Entry(kBad, "\"U8\"", "[4]", "[5,9]")), 9, kBad),
      Header("bytes of no tensor", absl::StrCat("{", good, "}"), 5, "1 trailing bytes"),
      Header("a name twice",
             absl::StrCat("{", Entry(kBad, "\"U8\"", "[4]", "[0,4]"), ",", Entry(kBad, "\"U8\"", "[4]", "[4,8]"), "}"), 8,
             kBad),
      Header("a name twice, once escaped", with(Entry("\\u0061", "\"U8\"", "[4]", "[4,8]")), 8, "\"a\""),
      Header("a field twice",
             absl::StrCat("{\"", kBad, "\":{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}"), 4,
             kBad),
      Header("a missing field", absl::StrCat("{\"", kBad, "\":{\"dtype\":\"U8\",\"shape\":[4]}}"), 4, kBad),
      Header("an unknown field",
             absl::StrCat("{\"", kBad, "\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4],\"strides\":[1]}}"), 4,
             kBad),
      Header("metadata twice", absl::StrCat("{\"__metadata__\":{},\"__metadata__\":{},", good, "}"), 4, "__metadata__"),
      Header("metadata that is no text", absl::StrCat("{\"__metadata__\":{\"a\":{\"b\":1}},", good, "}"), 4, "\"a\""),
      Header("a name of 10^6 bytes", with(Entry(std::string(1000000, 'n'), "\"U8\"", "[4]", "[4,8]")), 8,
             "longer than 4096"),
      Header("a name that is no UTF-8", with(Entry("\xFF\xFE", "\"U8\"", "[4]", "[4,8]")), 8, "UTF-8"),
  });
}

TEST_CASE("B35: a header that is no header, or longer than it can be, is refused with the file") {
  const std::string good = absl::StrCat("{", Entry("a", "\"U8\"", "[4]", "[0,4]"), "}");
  std::vector<BadFile> table = {
      {"an empty file", Raw(""), {"model.safetensors", "the file has 0"}},
      {"seven bytes", Raw(std::string(7, '\0')), {"model.safetensors", "the file has 7"}},
      {"a length and nothing more", Raw(LengthBytes(2)), {"model.safetensors", "header of 2 bytes"}},
      {"a header of no bytes", Raw(LengthBytes(0)), {"model.safetensors"}},
      {"a length of 2^63 - 1", Raw(LengthBytes(INT64_MAX) + good), {"model.safetensors", "9223372036854775807"}},
      {"a length of 2^64 - 1", Raw(LengthBytes(UINT64_MAX) + good), {"model.safetensors", "18446744073709551615"}},
      {"a length of 2^64 - 8", Raw(LengthBytes(UINT64_MAX - 7) + good), {"model.safetensors", "18446744073709551608"}},
      {"a length one beyond the file", Raw(LengthBytes(good.size() + 5) + good + "1234"), {"model.safetensors"}},
      {"a header cut in the middle", Raw(FileOf(good.substr(0, 30), 0)), {"model.safetensors"}},
      Header("no JSON", "weights", 0),
      Header("a list", "[]", 0),
      Header("null", "null", 0),
      Header("text behind the object", good + "x", 4),
      Header("an object that never ends", absl::StrCat("{", Entry("a", "\"U8\"", "[4]", "[0,4]")), 4),
      Header("objects nested 10^6 deep", Times(1000000, "{\"a\":"), 0),
      Header("a text that never ends", absl::StrCat("{\"", std::string(8 * kMiB, 'x')), 0),
      Header("NUL bytes", std::string(1000, '\0'), 0),
  };
  table.push_back({"a sparse file of 1 TiB that is all header",
                   [=](const TempDir& dir) {
                     Raw(LengthBytes((1ull << 40) - 8))(dir);
                     REQUIRE(::truncate(dir.File("model.safetensors").c_str(), 1ll << 40) == 0);
                   },
                   {"model.safetensors", "1099511627768"}});
  table.push_back({"a sparse file of 64 MiB of NUL as header",
                   [=](const TempDir& dir) {
                     Raw(LengthBytes(64 * kMiB))(dir);
                     REQUIRE(::truncate(dir.File("model.safetensors").c_str(), 8 + 64 * kMiB) == 0);
                   },
                   {"model.safetensors"}});
  CheckRefused(table);
}

TEST_CASE("B35: a header of 60 MiB that is bad at its end costs no more memory than another") {
  // 450,000 tensors of no bytes, then one that claims a byte too many.
  std::string header = "{";
  for (int i = 0; i < 450000; ++i) {
    absl::StrAppend(&header,
                    Entry(absl::StrCat("model.layers.0.mlp.experts.", i, ".up_proj.weight_packed.of_a_long_name"), "\"U8\"",
                          "[0,64]", "[0,0]"),
                    ",");
  }
  absl::StrAppend(&header, Entry(kBad, "\"U8\"", "[1]", "[0,2]"), "}");
  REQUIRE(header.size() > 50u * kMiB);
  REQUIRE(header.size() < 64u * kMiB);
  CheckRefused(Header("bad at the end", header, 2, kBad));
}

TEST_CASE("B35: a bad shard is refused as a bad single file is") {
  const auto shard = [](const std::string& header, size_t data) {
    return [=](const TempDir& dir) {
      Model(SmallSpec(), {}, 2)(dir);
      WriteFile(dir.File("model-00002-of-00002.safetensors"), FileOf(header, data));
    };
  };
  const std::string file = "model-00002-of-00002.safetensors";
  CheckRefused({
      {"wrong range", shard(absl::StrCat("{", Entry(kBad, "\"BF16\"", "[32,64]", "[0,4]"), "}"), 4), {file, kBad}},
      {"overflow",
       shard(absl::StrCat("{", Entry(kBad, "\"BF16\"", "[4294967296,4294967296]", "[0,4]"), "}"), 4),
       {file, kBad}},
      {"no tensors", shard("{}", 0), {"index.json", file}},
      {"wrong shape",
       shard(absl::StrCat("{", Entry(kBad, "\"BF16\"", "[64,32]", "[0,4096]"), "}"), 4096),
       {"index.json", file}},
  });
}

}  // namespace moed::testing
