#include "tests/cuda/gpu_server.h"

#include <stdlib.h>

#include <catch2/catch.hpp>
#include <filesystem>
#include <vector>

#include "kernels/convert.h"
#include "server/setup.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/process.h"

namespace moed::testing {
namespace {

namespace v1 = moe::v1;
using Catch::Matchers::Contains;

void LimitTime(grpc::ClientContext* context) { context->set_deadline(std::chrono::system_clock::now() + kPatience); }

void RequireOk(const grpc::Status& status) {
  INFO(status.error_code() << ": " << status.error_message());
  REQUIRE(status.ok());
}

void RequireOk(const absl::Status& status) {
  INFO(status);
  REQUIRE(status.ok());
}

}  // namespace

ServeOptions ServedOptions(const std::string& folder) {
  ServeOptions options;
  options.models = {{"m", folder}};
  options.threads = 2;
  options.max_tokens = kServedRows;
  return options;
}

std::unique_ptr<Engine> ServedEngine(const ServeOptions& options) {
  absl::StatusOr<std::unique_ptr<Engine>> engine = SetUpEngine(options);
  RequireOk(engine.status());
  return *std::move(engine);
}

GpuServer::GpuServer() {
  ModelSpec spec{.family = ModelFamily::kDeepseekV3, .num_layers = 2, .hidden = kServedHidden, .intermediate = 128};
  spec.num_experts = kServedExperts;
  spec.experts = {.format = ExpertFormat::kPacked, .group = 32};
  spec.keep_reference = false;
  CheckpointBuilder builder;
  AddModel(spec, &builder);
  RequireOk(builder.Write(dir.path()));
  ServeOptions options = ServedOptions(dir.path());
  socket = "/tmp/moed-XXXXXX";
  REQUIRE(mkdtemp(socket.data()) != nullptr);
  options.listen = {"unix:" + socket + "/moed.sock"};
  options.health_listen = "127.0.0.1:0";
  engine = ServedEngine(options);
  absl::StatusOr<std::unique_ptr<Server>> listening = Server::Listen(options, engine.get());
  RequireOk(listening.status());
  server = *std::move(listening);
  RequireOk(engine->Load("m", {}));
  RequireOk(server->Open([] { return absl::OkStatus(); }));
}

GpuServer::~GpuServer() {
  server.reset();
  std::error_code ignored;  // a leftover is no failure
  std::filesystem::remove_all(socket, ignored);
}

GpuClient::GpuClient(const std::string& address)
    : moe_(v1::Moe::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()))) {}

grpc::Status GpuClient::Forward(const v1::ForwardRequest& request, v1::ForwardResponse* answer) const {
  grpc::ClientContext context;
  LimitTime(&context);
  return moe_->Forward(&context, request, answer);
}

grpc::Status GpuClient::SelfCheck() const {
  grpc::ClientContext context;
  LimitTime(&context);
  v1::SelfCheckResponse answer;
  return moe_->SelfCheck(&context, v1::SelfCheckRequest(), &answer);
}

v1::ForwardResponse GpuClient::Ask(const v1::ForwardRequest& request) const {
  v1::ForwardResponse answer;
  RequireOk(Forward(request, &answer));
  return answer;
}

v1::StatusResponse GpuClient::Status() const {
  grpc::ClientContext context;
  LimitTime(&context);
  v1::StatusResponse answer;
  RequireOk(moe_->Status(&context, v1::StatusRequest(), &answer));
  return answer;
}

v1::ExplainResponse GpuClient::Explain() const {
  grpc::ClientContext context;
  LimitTime(&context);
  v1::ExplainResponse answer;
  RequireOk(moe_->Explain(&context, v1::ExplainRequest(), &answer));
  return answer;
}

v1::ForwardRequest GateRequest(int layer, int64_t rows, DType dtype) {
  const std::vector<float> x = CaseHidden(rows, kServedHidden);
  std::string bytes(TensorView{nullptr, dtype, rows, kServedHidden}.bytes(), '\0');
  const MutableTensorView view = {bytes.data(), dtype, rows, kServedHidden};
  for (int64_t row = 0; row < rows; ++row) RowFromFloat(x.data() + row * kServedHidden, row, view);
  v1::ForwardRequest request;
  request.set_layer(layer);
  request.set_output_dtype(v1::DTYPE_F32);
  v1::Tensor* hidden = request.mutable_hidden();
  hidden->set_dtype(dtype == DType::kF32 ? v1::DTYPE_F32 : v1::DTYPE_BF16);
  hidden->add_shape(rows);
  hidden->add_shape(kServedHidden);
  hidden->set_data(std::move(bytes));
  return request;
}

void RunApart(const std::string& tag) {
  const Finished child = RunToEnd({"/proc/self/exe", tag}, {}, 3 * kPatience);
  INFO(child.out << child.err);
  CHECK(child.exit_code == 0);
  CHECK_THAT(child.out, Contains("All tests passed"));
}

}  // namespace moed::testing
