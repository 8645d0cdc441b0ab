#include "engine/quant_compressed_args.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/json_text.h"

namespace moed {
namespace {

using nlohmann::json;

constexpr int64_t kMaxGroup = 1 << 20;

// One set of quantization arguments, with the library's defaults.
struct Args {
  std::string type;
  int64_t bits = 8;
  bool symmetric = true;
  std::string strategy;
  int64_t group_size = 0;  // 0: not given
  std::string dynamic;     // "false", "true" or "local"
  std::string scale_dtype;
  bool act_order = false;  // scattered groups stay in the file
  GroupShape block;        // of the strategy "block"
};

// "128x128"; empty when it is not that.
std::vector<int64_t> BlockFromText(const std::string& text) {
  const size_t x = text.find('x');
  if (x == std::string::npos) return {};
  std::vector<int64_t> block(2);
  const char* const end = text.data() + text.size();
  const auto rows = std::from_chars(text.data(), text.data() + x, block[0]);
  const auto cols = std::from_chars(text.data() + x + 1, end, block[1]);
  const bool whole = rows.ec == std::errc() && rows.ptr == text.data() + x && cols.ec == std::errc() && cols.ptr == end;
  return whole ? block : std::vector<int64_t>{};
}

void ReadBlock(ConfigReader* reader, Args* args) {
  const json* value = reader->Find("block_structure");
  std::vector<int64_t> block;
  if (value != nullptr && value->is_string()) {
    block = BlockFromText(value->get<std::string>());
  } else {
    block = reader->IntsOrEmpty("block_structure", 1, kMaxGroup);
  }
  const auto good = [](int64_t size) { return size >= 1 && size <= kMaxGroup; };
  if (block.size() != 2 || !std::all_of(block.begin(), block.end(), good)) {
    return reader->Fail("block_structure", "two positive sizes, as [128, 128] or \"128x128\", for the strategy block");
  }
  args->block = {static_cast<int32_t>(block[0]), static_cast<int32_t>(block[1])};
}

// "group" (or true) leaves scattered groups in the file, "weight" and "static" only order the quantization.
bool ReadActOrder(ConfigReader* reader) {
  const json* order = reader->Find("actorder");
  if (order == nullptr) return false;
  if (order->is_boolean()) return order->get<bool>();
  const std::string text = order->is_string() ? order->get<std::string>() : "";
  if (text == "group" || text == "dynamic") return true;
  if (text != "weight" && text != "static") reader->Fail("actorder", "null, a boolean, \"group\" or \"weight\"");
  return false;
}

std::string ReadDynamic(ConfigReader* reader) {
  const json* dynamic = reader->Find("dynamic");
  if (dynamic == nullptr) return "false";
  if (dynamic->is_boolean()) return dynamic->get<bool>() ? "true" : "false";
  if (*dynamic != "local") reader->Fail("dynamic", "true, false or \"local\"");
  return "local";
}

Args ReadArgs(ConfigReader* reader) {
  Args args;
  args.type = reader->StringOr("type", "int");
  args.bits = reader->IntOr("num_bits", 8, 1, 32);
  args.symmetric = reader->BoolOr("symmetric", true);
  args.group_size = reader->IntOr("group_size", 0, -1, kMaxGroup);
  if (reader->Has("group_size") && args.group_size == 0) reader->Fail("group_size", "null, -1 or a positive integer");
  const std::string inferred = args.group_size > 0 ? "group" : args.group_size == -1 ? "channel" : "tensor";
  args.strategy = reader->StringOr("strategy", inferred);
  if ((args.strategy == "group" || args.strategy == "tensor_group") && args.group_size <= 0) {
    reader->Fail("group_size", absl::StrCat("a positive integer for the strategy ", args.strategy));
  }
  if (args.strategy == "channel" && args.group_size > 0) reader->Fail("group_size", "null or -1 for the strategy channel");
  if (args.strategy == "block") ReadBlock(reader, &args);
  args.dynamic = ReadDynamic(reader);
  args.scale_dtype = reader->StringOr("scale_dtype", "");
  args.act_order = ReadActOrder(reader);
  return args;
}

// Compares arguments with what is served, and refuses by key and value.
class Rules {
 public:
  Rules(const Args& args, const std::string& where, Declaration* out) : args_(args), where_(where), out_(out) {}

  void Type(const std::string& wanted) { Text("type", args_.type, {wanted}); }
  void Strategy(const std::vector<std::string>& served) { Text("strategy", args_.strategy, served); }
  void ScaleDtype(const std::string& wanted) {
    if (!args_.scale_dtype.empty()) Text("scale_dtype", args_.scale_dtype, {wanted});
  }
  void Bits(const std::vector<int64_t>& served) {
    if (std::find(served.begin(), served.end(), args_.bits) != served.end()) return;
    std::string list;
    for (const int64_t bits : served) absl::StrAppend(&list, list.empty() ? "" : ", ", bits);
    out_->Refuse(where_ + "num_bits", absl::StrCat(args_.bits), list);
  }
  void Group(int64_t wanted) {
    if (args_.group_size == wanted) return;
    out_->Refuse(where_ + "group_size", absl::StrCat(args_.group_size), absl::StrCat(wanted));
  }
  void Symmetric() {
    if (!args_.symmetric) out_->Refuse(where_ + "symmetric", "false", "true");
  }
  void Dynamic(const std::string& wanted) {
    if (args_.dynamic != wanted) {
      out_->Refuse(where_ + "dynamic", args_.dynamic, absl::StrCat(wanted, " for the strategy ", args_.strategy));
    }
  }
  void NoActOrder() {
    if (!args_.act_order) return;
    out_->Refuse(where_ + "actorder", "\"group\"", "null, \"weight\", and \"group\" in pack-quantized groups");
  }

 private:
  void Text(const std::string& key, const std::string& value, const std::vector<std::string>& served) {
    if (std::find(served.begin(), served.end(), value) != served.end()) return;
    std::string list;
    for (const std::string& text : served) absl::StrAppend(&list, list.empty() ? "" : ", ", Quoted(text));
    out_->Refuse(where_ + key, Quoted(value), list);
  }

  const Args& args_;
  const std::string where_;
  Declaration* const out_;
};

void DeclareIntegers(const Args& args, const std::string& format, Rules* rules, DeclaredScheme* scheme) {
  rules->Type("int");
  rules->Bits({4, 8});
  rules->Strategy({"group", "channel", "tensor"});
  const bool packed = format == "pack-quantized";
  if (!packed || args.strategy != "group") rules->NoActOrder();
  *scheme = ByteWeights(args.bits == 8 ? ElementType::kInt8 : ElementType::kInt4,
                        args.strategy == "tensor" ? GroupShape{0, 0} : InputGroup(args.group_size));
  if (packed) scheme->container = DeclaredScheme::Container::kPacked;
  scheme->linear.weights.zero_points = !args.symmetric;
  scheme->linear.weights.act_order = args.act_order;
}

void DeclareFp8(const Args& args, Rules* rules, DeclaredScheme* scheme) {
  rules->Type("float");
  rules->Bits({8});
  rules->Strategy({"tensor", "channel", "block"});
  const GroupShape whole = args.strategy == "tensor" ? GroupShape{0, 0} : GroupShape{1, 0};
  *scheme = ByteWeights(ElementType::kFp8E4m3, args.strategy == "block" ? args.block : whole);
}

void DeclareBlockFloats(const Args& args, const std::string& format, Rules* rules, DeclaredScheme* scheme) {
  const bool nvfp4 = format == "nvfp4-pack-quantized";
  rules->Type("float");
  rules->Bits({format == "mxfp8-quantized" ? 8 : 4});
  rules->Strategy({nvfp4 ? "tensor_group" : "group"});
  rules->Group(nvfp4 ? 16 : 32);
  rules->ScaleDtype(nvfp4 ? "torch.float8_e4m3fn" : "torch.uint8");
  *scheme = nvfp4 ? NvFp4Weights(GlobalScale::kDivisor)
                  : MxWeights(args.bits == 8 ? ElementType::kFp8E4m3 : ElementType::kFp4E2m1);
}

// Scales in blocks of 32 that are powers of two.
void DeclareMxInput(const Args& args, Rules* rules, ActivationScheme* input) {
  rules->Type("float");
  rules->Bits({4, 8});
  rules->Strategy({"group"});
  rules->Group(32);
  rules->Symmetric();
  rules->Dynamic("true");
  *input = MxInput(args.bits == 8 ? ElementType::kFp8E4m3 : ElementType::kFp4E2m1, ScaleRule::kMxEven);
}

void DeclareNvInput(Rules* rules, ActivationScheme* input) {
  rules->Type("float");
  rules->Bits({4});
  rules->Group(16);
  rules->ScaleDtype("torch.float8_e4m3fn");
  rules->Symmetric();
  rules->Dynamic("local");
  *input = NvFp4Input();
}

void DeclareByteInput(const Args& args, Rules* rules, const std::string& where, Declaration* out) {
  if (args.type != "int") rules->Type("float");
  rules->Bits({8});
  rules->Strategy({"token", "tensor", "group", "tensor_group"});
  const ElementType element = args.type == "int" ? ElementType::kInt8 : ElementType::kFp8E4m3;
  ActivationScheme& input = out->scheme.linear.input;
  const bool is_static = args.strategy == "tensor" && args.dynamic == "false";
  if (!is_static) rules->Dynamic("true");
  if (is_static) {
    input = StaticInput(element);
    input.zero_points = !args.symmetric;
  } else {
    input = DynamicInput(element, args.strategy == "tensor" ? GroupShape{0, 0} : InputGroup(args.group_size));
  }
  if (!args.symmetric && !(is_static && args.type == "int")) {
    out->Refuse(where + "symmetric", "false", "true, and false for static int8");
  }
}

}  // namespace

absl::Status DeclareCompressedWeights(const json& weights, const std::string& where, const std::string& format,
                                      Declaration* out) {
  ConfigReader reader(weights, where + "weights.");
  const Args args = ReadArgs(&reader);
  if (!reader.status().ok()) return reader.status();
  Rules rules(args, reader.where(), out);
  DeclaredScheme* const scheme = &out->scheme;
  if (format == "pack-quantized" || format == "int-quantized") {
    DeclareIntegers(args, format, &rules, scheme);
  } else if (format == "float-quantized" || format == "naive-quantized") {
    DeclareFp8(args, &rules, scheme);
  } else if (format == "nvfp4-pack-quantized" || format == "mxfp4-pack-quantized" || format == "mxfp8-quantized") {
    DeclareBlockFloats(args, format, &rules, scheme);
  } else {
    out->Refuse(where + "format", Quoted(format),
                "\"pack-quantized\", \"int-quantized\", \"float-quantized\", \"naive-quantized\", \"nvfp4-pack-quantized\", "
                "\"mxfp4-pack-quantized\", \"mxfp8-quantized\"");
  }
  if (args.type != "int") {
    rules.Symmetric();
    rules.NoActOrder();
  }
  if (args.dynamic != "false") out->Refuse(reader.where() + "dynamic", args.dynamic, "false");
  return absl::OkStatus();
}

absl::Status DeclareCompressedInput(const json& object, const std::string& where, const std::string& format,
                                    Declaration* out) {
  ConfigReader reader(object, where + "input_activations.");
  const Args args = ReadArgs(&reader);
  if (!reader.status().ok()) return reader.status();
  Rules rules(args, reader.where(), out);
  const bool mx_format = format == "mxfp4-pack-quantized" || format == "mxfp8-quantized";
  if (args.scale_dtype == "torch.uint8" || (mx_format && args.type == "float" && args.group_size == 32)) {
    DeclareMxInput(args, &rules, &out->scheme.linear.input);
  } else if (args.strategy == "tensor_group") {
    DeclareNvInput(&rules, &out->scheme.linear.input);
  } else {
    DeclareByteInput(args, &rules, reader.where(), out);
  }
  return absl::OkStatus();
}

}  // namespace moed
