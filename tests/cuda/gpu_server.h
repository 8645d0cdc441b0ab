// A whole server on the GPU's own backends, in the process of the test, and clients of it. Only where HaveGpu(). Failures fail the
// running test case.
#ifndef MOED_TESTS_CUDA_GPU_SERVER_H_
#define MOED_TESTS_CUDA_GPU_SERVER_H_

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <memory>
#include <string>

#include "engine/engine.h"
#include "kernels/tensor.h"
#include "proto/moe/v1/moe.grpc.pb.h"
#include "server/options.h"
#include "server/server.h"
#include "tests/support/temp_dir.h"

namespace moed::testing {

inline constexpr int64_t kServedHidden = 256;
inline constexpr int kServedExperts = 8;
inline constexpr int64_t kServedRows = 256;  // computed at once: larger calls go in chunks
inline constexpr int kServedLayers[] = {1, 2};
inline constexpr std::chrono::seconds kPatience(60);  // with whatever may hang

// Of a server, or an engine alone, with the checkpoint of a folder as its model "m". Backends and GPU are chosen automatically.
ServeOptions ServedOptions(const std::string& folder);

// With its models planned.
std::unique_ptr<Engine> ServedEngine(const ServeOptions& options);

// A server of two layers with int4 experts and a bf16 shared expert: loaded, open, on a unix socket and with a health listener.
struct GpuServer {
  GpuServer();
  ~GpuServer();
  GpuServer(const GpuServer&) = delete;
  GpuServer& operator=(const GpuServer&) = delete;
  const std::string& address() const { return server->addresses()[0]; }

  TempDir dir;         // with the checkpoint
  std::string socket;  // the folder of the socket, whose path must be short
  std::unique_ptr<Engine> engine;
  std::unique_ptr<Server> server;
};

// May be used from any thread, but for the methods that must succeed. A call that hangs ends with DEADLINE_EXCEEDED.
class GpuClient {
 public:
  explicit GpuClient(const std::string& address);

  grpc::Status Forward(const moe::v1::ForwardRequest& request, moe::v1::ForwardResponse* answer) const;
  grpc::Status SelfCheck() const;  // of all layers

  // These must succeed.
  moe::v1::ForwardResponse Ask(const moe::v1::ForwardRequest& request) const;
  moe::v1::StatusResponse Status() const;
  moe::v1::ExplainResponse Explain() const;

 private:
  const std::unique_ptr<moe::v1::Moe::Stub> moe_;
};

// Rows of f32 or bf16 in the message, for the server's own gate, the output as f32.
moe::v1::ForwardRequest GateRequest(int layer, int64_t rows, DType dtype);

// Runs the hidden case of that tag in a process of its own, to its end, which must be a good one.
void RunApart(const std::string& tag);

}  // namespace moed::testing

#endif  // MOED_TESTS_CUDA_GPU_SERVER_H_
