#include "tests/soak/soak_cases.h"

#include <algorithm>
#include <fstream>
#include <functional>
#include <iterator>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"

namespace moed::testing {
namespace {

using client::DType;

constexpr int64_t kRows[] = {0, 1, 1, 2, 3, 5, 8, 16, 17, 33, 64, 100, 130, 300, 700, 1500};
constexpr int kRepeats = 3;  // of kRows, for each layer

moe::v1::DType ToWire(DType dtype) {
  switch (dtype) {
    case DType::kF32: return moe::v1::DTYPE_F32;
    case DType::kBf16: return moe::v1::DTYPE_BF16;
    case DType::kF16: return moe::v1::DTYPE_F16;
    default: return moe::v1::DTYPE_UNSPECIFIED;  // none of these calls
  }
}

void SetTensor(moe::v1::DType dtype, int64_t rows, int64_t columns, const void* data, size_t bytes, moe::v1::Tensor* tensor) {
  tensor->set_dtype(dtype);
  tensor->add_shape(rows);
  tensor->add_shape(columns);
  tensor->set_data(data, bytes);
}

std::unique_ptr<SoakCase> MakeCase(const client::ModelStatus& model, int layer, int64_t rows, uint32_t seed) {
  constexpr DType kDTypes[] = {DType::kBf16, DType::kF16, DType::kF32};
  std::mt19937 random(seed);
  std::normal_distribution<float> value;
  auto result = std::make_unique<SoakCase>();
  std::vector<float> x(static_cast<size_t>(rows * model.hidden));
  for (float& v : x) v = value(random);
  const DType dtype = kDTypes[random() % std::size(kDTypes)];
  result->hidden = client::FromFloats(dtype, x);
  client::ForwardCall& call = result->call;
  call.model = model.name;
  call.layer = layer;
  call.hidden = {dtype, rows, model.hidden, result->hidden};
  if (random() % 2 == 0) call.output_dtype = kDTypes[random() % std::size(kDTypes)];
  call.return_routing = random() % 4 == 0;
  call.routed_only = random() % 4 == 0;
  const uint32_t kind = random() % 3;
  if (kind == 1) {
    for (int64_t i = 0; i < rows * model.top_k; ++i) {
      result->ids.push_back(static_cast<int32_t>(random() % static_cast<uint32_t>(model.num_experts + 1)) - 1);
      result->weights.push_back(value(random));
    }
    call.top_k = model.top_k;
    call.ids = result->ids, call.weights = result->weights;
  } else if (kind == 2) {
    result->logits.resize(static_cast<size_t>(rows * model.num_experts));
    for (float& v : result->logits) v = value(random);
    call.num_experts = model.num_experts;
    call.router_logits = result->logits;
  }
  return result;
}

}  // namespace

size_t SoakCase::OutputBytes() const {
  return static_cast<size_t>(call.hidden.rows * call.hidden.columns) *
         client::ElementBytes(call.output_dtype.value_or(call.hidden.dtype));
}

moe::v1::ForwardRequest SoakCase::Request() const {
  moe::v1::ForwardRequest request;
  const int64_t rows = call.hidden.rows;
  request.set_model(call.model);
  request.set_layer(call.layer);
  SetTensor(ToWire(call.hidden.dtype), rows, call.hidden.columns, hidden.data(), hidden.size(), request.mutable_hidden());
  if (call.top_k > 0) {
    SetTensor(moe::v1::DTYPE_I32, rows, call.top_k, ids.data(), ids.size() * 4, request.mutable_top_k()->mutable_ids());
    SetTensor(moe::v1::DTYPE_F32, rows, call.top_k, weights.data(), weights.size() * 4, request.mutable_top_k()->mutable_weights());
  } else if (call.num_experts > 0) {
    SetTensor(moe::v1::DTYPE_F32, rows, call.num_experts, logits.data(), logits.size() * 4, request.mutable_router_logits());
  }
  if (call.output_dtype) request.set_output_dtype(ToWire(*call.output_dtype));
  request.set_routed_only(call.routed_only);
  request.set_return_routing(call.return_routing);
  return request;
}

absl::StatusOr<SoakCases> MakeCases(const client::ServerStatus& status) {
  SoakCases cases;
  for (const char* name : {kSwapped, kSteady}) {
    const auto model =
        std::find_if(status.models.begin(), status.models.end(), [name](const auto& each) { return each.name == name; });
    if (model == status.models.end()) return absl::NotFoundError(absl::StrCat("status: wanted the model ", name, ", got none"));
    for (const client::LayerStatus& layer : model->layers) {
      for (int repeat = 0; repeat < kRepeats; ++repeat) {
        for (const int64_t rows : kRows) {
          cases.push_back(MakeCase(*model, layer.layer, rows, static_cast<uint32_t>(cases.size())));
        }
      }
    }
  }
  return cases;
}

uint64_t Digest(const std::string& output) { return std::hash<std::string>()(output); }

absl::StatusOr<SoakAnswers> SoakAnswers::Ask(const SoakCases& cases, const std::vector<client::MoeClient*>& servers) {
  SoakAnswers answers;
  for (const std::unique_ptr<SoakCase>& each : cases) {
    for (client::MoeClient* server : servers) {
      const absl::StatusOr<client::ForwardResult> result = server->Forward(each->call);
      if (!result.ok()) return result.status();
      answers.digests_.push_back(Digest(result->data));
    }
  }
  return answers;
}

absl::StatusOr<SoakAnswers> SoakAnswers::Read(const std::string& file) {
  std::ifstream in(file);
  SoakAnswers answers;
  answers.digests_.assign(std::istream_iterator<uint64_t>(in), std::istream_iterator<uint64_t>());
  if (!answers.digests_.empty()) return answers;
  return absl::NotFoundError(absl::StrCat("answers: wanted digests in ", file, ", got none"));
}

absl::Status SoakAnswers::Write(const std::string& file) const {
  std::ofstream out(file);
  for (const uint64_t digest : digests_) out << digest << '\n';
  out.close();
  return out.good() ? absl::OkStatus() : absl::UnavailableError(absl::StrCat("answers: could not write ", file));
}

bool SoakAnswers::Right(size_t index, uint64_t generation, const std::string& output) const {
  const size_t variant = (generation + kVariants - 1) % kVariants;
  return generation > 0 && digests_.at(index * kVariants + variant) == Digest(output);
}

}  // namespace moed::testing
