#include "engine/container.h"

#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/container_parts.h"

namespace moed {
namespace {

using Kind = DeclaredScheme::Container;

// The tensors by which a module's storage is recognised.
struct Stored {
  TensorRef weight;   // .weight
  TensorRef qweight;  // .qweight
  TensorRef packed;   // .weight_packed

  int count() const { return (weight ? 1 : 0) + (qweight ? 1 : 0) + (packed ? 1 : 0); }
  const TensorRef& only() const { return weight ? weight : qweight ? qweight : packed; }
  const char* suffix() const { return weight ? ".weight" : qweight ? ".qweight" : ".weight_packed"; }
};

bool Fits(Kind kind, const Stored& stored) {
  switch (kind) {
    case Kind::kGptq:
    case Kind::kAwq: return static_cast<bool>(stored.qweight);
    case Kind::kPacked: return static_cast<bool>(stored.packed);
    case Kind::kFp4: return stored.weight || stored.packed;
    case Kind::kInt8:
    case Kind::kFp8:
    case Kind::kTransposedInt4:
    case Kind::kTwoStageInt4: return static_cast<bool>(stored.weight);
    case Kind::kPlain:  // floating-point weights never come here
    case Kind::kMxfp4Fused: return false;
  }
  return false;
}

// The container that the tensors show. Unquantized weights win over any declaration; the tools of compressed-tensors choose
// between I8 and packed words freely, so that each may stand for the other.
absl::StatusOr<Kind> Resolve(const DeclaredScheme& declared, const Stored& stored, const std::string& module) {
  if (stored.count() > 1) {
    return absl::InvalidArgumentError(
        absl::StrCat(module, ": is stored more than once, want one of .weight, .qweight, .weight_packed"));
  }
  if (stored.count() == 0) {
    if (ContainerFor(declared.container) != nullptr) return declared.container;
    return absl::InvalidArgumentError(absl::StrCat(module, ": the config declares ", ContainerName(declared.container),
                                                   ", which has no tensors of single experts"));
  }
  const StDtype dtype = stored.only().info->dtype;
  if (stored.weight && IsFloat(dtype)) return Kind::kPlain;
  if (declared.container == Kind::kInt8 && stored.packed && dtype == StDtype::kI32) return Kind::kPacked;
  if (declared.container == Kind::kPacked && stored.weight && dtype == StDtype::kI8) return Kind::kInt8;
  if (Fits(declared.container, stored)) return declared.container;
  return absl::InvalidArgumentError(absl::StrCat(module, ": is stored as ", stored.suffix(), " ", StDtypeName(dtype),
                                                 ", the config declares ", ContainerName(declared.container)));
}

// The stored number of the activation scheme: a static scale, or the global scale of NVFP4, which compressed-tensors stores
// as it is and ModelOpt as its inverse. Tensors that the scheme does not use are counted as known.
absl::Status FindInput(TensorFinder& finder, LinearSource* source) {
  const ActivationScheme& input = source->linear().input;
  const std::string scale = source->module + ".input_scale", global = source->module + ".input_global_scale";
  source->input_zeros = finder.Optional(source->module + ".input_zero_point");
  MOED_RETURN_IF_ERROR(CheckScalar(source->input_zeros));
  const bool wants_global = input.mode == ActivationMode::kDynamic && input.global_scale;
  if (wants_global) {
    const bool divisor = source->linear().weights.global_scale == GlobalScale::kDivisor;
    source->inverse_input = !finder.Exists(global) && (finder.Exists(scale) || !divisor);
    source->input = finder.Want(source->inverse_input ? scale : global);
  } else if (input.mode == ActivationMode::kStatic) {
    source->input = finder.Want(scale);
  } else {
    finder.Optional(scale);
    finder.Optional(global);
    return absl::OkStatus();
  }
  MOED_RETURN_IF_ERROR(CheckFloat(source->input));
  return CheckScalar(source->input);
}

absl::Status FindBias(TensorFinder& finder, LinearSource* source) {
  source->bias = finder.Want(source->module + ".bias");
  MOED_RETURN_IF_ERROR(CheckFloat(source->bias));
  return CheckShape(source->bias, {Shape{source->rows}});
}

absl::Status ReadInput(const LinearSource& source, LinearWeights* out) {
  const bool asymmetric = source.linear().input.zero_points;
  if (source.input_zeros && !asymmetric) MOED_RETURN_IF_ERROR(CheckAllZero(source.input_zeros));
  if (!source.input) return absl::OkStatus();
  const absl::StatusOr<float> number = ReadNumber(source.input, /*zero_allowed=*/false);
  if (!number.ok()) return number.status();
  out->input_scale = source.inverse_input ? 1.0f / *number : *number;
  if (!std::isfinite(out->input_scale)) {
    return TensorError(source.input, absl::StrCat("is ", *number, ", whose inverse is no finite number"));
  }
  return absl::OkStatus();
}

}  // namespace

const Container* ContainerFor(DeclaredScheme::Container container) {
  switch (container) {
    case Kind::kPlain: return &PlainContainer();
    case Kind::kGptq: return &GptqContainer();
    case Kind::kAwq: return &AwqContainer();
    case Kind::kPacked: return &PackedContainer();
    case Kind::kInt8: return &Int8Container();
    case Kind::kFp8: return &Fp8Container();
    case Kind::kFp4: return &Fp4Container();
    case Kind::kTransposedInt4: return &TransposedInt4Container();
    case Kind::kTwoStageInt4: return &TwoStageInt4Container();
    case Kind::kMxfp4Fused: return nullptr;
  }
  return nullptr;
}

absl::StatusOr<LinearSource> FindLinear(TensorFinder& finder, const DeclaredScheme& declared, const std::string& module,
                                        int64_t rows, int64_t cols, bool bias, std::string* note) {
  const Stored stored = {finder.Look(module + ".weight"), finder.Look(module + ".qweight"),
                         finder.Look(module + ".weight_packed")};
  const absl::StatusOr<Kind> kind = Resolve(declared, stored, module);
  if (!kind.ok()) return kind.status();
  if (*kind == Kind::kPlain && declared.container != Kind::kPlain && note != nullptr) {
    *note = absl::StrCat(module, ": is stored unquantized although the config declares ", ContainerName(declared.container),
                         "; the tensors count");
  }
  LinearSource source;
  source.module = module;
  source.rows = rows;
  source.cols = cols;
  source.declared = declared;
  source.declared.container = *kind;
  source.container = ContainerFor(*kind);
  MOED_RETURN_IF_ERROR(source.container->Find(finder, &source));
  if (*kind != Kind::kPlain) MOED_RETURN_IF_ERROR(FindInput(finder, &source));
  if (bias) MOED_RETURN_IF_ERROR(FindBias(finder, &source));
  return source;
}

uint64_t StoredBytes(const LinearSource& source) {
  uint64_t bytes = 0;
  for (const TensorRef* tensor : {&source.codes, &source.zeros, &source.g_idx, &source.shape, &source.first_zeros,
                                  &source.global, &source.input, &source.input_zeros, &source.bias}) {
    if (*tensor) bytes += tensor->info->bytes;
  }
  if (source.scales && source.scale_slice < 0) bytes += source.scales.info->bytes;
  return bytes;
}

bool Incomplete(const LinearSource& source) {
  return !source.codes || (source.declared.container != Kind::kPlain && !source.scales);
}

absl::Status ReadLinear(const LinearSource& source, LinearWeights* out) {
  out->scheme = source.linear().weights;
  out->rows = source.rows;
  out->cols = source.cols;
  out->scales.clear();
  out->zero_points.clear();
  out->group_index.clear();
  out->bias.clear();
  out->global_scale = 1.0f;
  out->input_scale = 1.0f;
  MOED_RETURN_IF_ERROR(source.container->Read(source, out));
  MOED_RETURN_IF_ERROR(ReadInput(source, out));
  if (source.bias) return AtTensor(source.bias, ReadFloats(source.bias, &out->bias));
  return absl::OkStatus();
}

}  // namespace moed
