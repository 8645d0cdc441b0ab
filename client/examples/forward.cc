// One forward of the first layer of a running server, routed by the checkpoint's own gate.
//   g++ -std=c++20 forward.cc $(pkg-config --cflags --libs moed-client) -o forward && ./forward 127.0.0.1:50061
#include <cstdio>
#include <moed/moed_client.h>

int main(int argc, char** argv) {
  namespace mc = moed::client;
  mc::TuneAllocator();
  auto client = mc::MoeClient::Connect(argc > 1 ? argv[1] : "127.0.0.1:50061");
  if (!client.ok()) return std::fprintf(stderr, "%s\n", client.status().ToString().c_str()), 2;
  auto status = (*client)->Status();
  if (!status.ok()) return std::fprintf(stderr, "%s\n", status.status().ToString().c_str()), 2;
  if (status->models.empty() || status->models[0].layers.empty()) return std::fprintf(stderr, "no layers\n"), 2;
  const mc::ModelStatus& model = status->models[0];

  const std::vector<float> x(model.hidden, 0.5f);
  const std::vector<uint8_t> bytes = mc::FromFloats(mc::DType::kBf16, x);
  mc::ForwardCall call;
  call.model = model.name;
  call.layer = model.layers[0].layer;
  call.hidden = {mc::DType::kBf16, 1, model.hidden, bytes};
  auto answer = (*client)->Forward(call);
  if (!answer.ok()) return std::fprintf(stderr, "%s\n", answer.status().ToString().c_str()), 1;
  std::printf("y[0] = %g, by %s in %lld us\n", answer->Floats()[0], answer->backend.c_str(),
              static_cast<long long>(answer->timing.total()));
}
