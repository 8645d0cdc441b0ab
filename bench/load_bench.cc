// Loading benchmark: what a checkpoint costs beyond copying its bytes.
//
//   load_bench [--dir FOLDER] [--json FILE] [--threads N] [--large-mib N]
//
// 1. Many small tensors: compressed-tensors int4 experts of tiny shapes; time per tensor to open, plan and load, at two
//    counts that differ tenfold, which shows whether the time is linear in the count.
// 2. A large checkpoint in the page cache: bytes per second of Load against the memcpy rate of the same run and threads, and
//    the peak of anonymous memory.
// The checkpoints are written into FOLDER (default: a fresh one below the temporary directory) and removed.
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "engine/engine.h"
#include "engine/safetensors.h"
#include "kernels/backends.h"
#include "server/allocator.h"

namespace moed::bench {
namespace {

namespace fs = std::filesystem;

struct Size {
  int layers, experts;
  int64_t hidden, intermediate;
  int group;
  int64_t tensors() const { return static_cast<int64_t>(layers) * experts * 9; }  // 3 projections x (packed, scale, shape)
};

// Plan of one file: names, shapes and contents of a deepseek-like model without shared experts.
class Writer {
 public:
  Writer(const Size& size, const std::string& directory) : size_(size), directory_(directory) {}

  bool Write() {
    std::ofstream(directory_ + "/config.json") << Config();
    Declare();
    auto file = SafetensorsWriter::Create(directory_ + "/model.safetensors", tensors_);
    if (!file.ok()) return false;
    for (const SafetensorsWriter::Tensor& tensor : tensors_) {
      if (!(*file)->Append(Contents(tensor)).ok()) return false;
    }
    return (*file)->Finish().ok();
  }

  uint64_t bytes() const { return bytes_; }

 private:
  std::string Config() const {
    const nlohmann::json group = {{"targets", {"Linear"}},
                                  {"weights", {{"num_bits", 4}, {"type", "int"}, {"symmetric", true}, {"strategy", "group"},
                                               {"group_size", size_.group}}}};
    return nlohmann::json{{"model_type", "qwen3_moe"}, {"hidden_size", size_.hidden}, {"num_hidden_layers", size_.layers},
                          {"num_experts", size_.experts}, {"num_experts_per_tok", 2},
                          {"moe_intermediate_size", size_.intermediate}, {"hidden_act", "silu"}, {"norm_topk_prob", true},
                          {"quantization_config", {{"quant_method", "compressed-tensors"}, {"format", "pack-quantized"},
                                                   {"ignore", {"lm_head"}}, {"config_groups", {{"group_0", group}}}}}}
        .dump();
  }

  void Declare() {
    for (int layer = 0; layer < size_.layers; ++layer) {
      const std::string mlp = "model.layers." + std::to_string(layer) + ".mlp.";
      Add(mlp + "gate.weight", StDtype::kBf16, {size_.experts, size_.hidden});
      for (int expert = 0; expert < size_.experts; ++expert) {
        const std::string base = mlp + "experts." + std::to_string(expert) + ".";
        for (const char* name : {"gate_proj", "up_proj", "down_proj"}) {
          const bool down = name[0] == 'd';
          const int64_t rows = down ? size_.hidden : size_.intermediate, cols = down ? size_.intermediate : size_.hidden;
          Add(base + name + ".weight_packed", StDtype::kI32, {rows, cols / 8});
          Add(base + name + ".weight_scale", StDtype::kBf16, {rows, (cols + size_.group - 1) / size_.group});
          Add(base + name + ".weight_shape", StDtype::kI64, {2});
        }
      }
    }
  }

  void Add(const std::string& name, StDtype dtype, std::vector<int64_t> shape) {
    tensors_.push_back({name, dtype, std::move(shape)});
  }

  const std::vector<uint8_t>& Contents(const SafetensorsWriter::Tensor& tensor) {
    uint64_t bytes = static_cast<uint64_t>(StDtypeBits(tensor.dtype)) / 8;
    for (int64_t dim : tensor.shape) bytes *= static_cast<uint64_t>(dim);
    bytes_ += bytes;
    data_.resize(bytes);
    if (tensor.dtype == StDtype::kI64) {
      const bool down = tensor.name.find("down_proj") != std::string::npos;
      const int64_t shape[2] = {down ? size_.hidden : size_.intermediate, down ? size_.intermediate : size_.hidden};
      std::memcpy(data_.data(), shape, sizeof(shape));
    } else if (tensor.dtype == StDtype::kBf16) {
      for (uint64_t at = 0; at < bytes; at += 2) data_[at] = static_cast<uint8_t>(at), data_[at + 1] = 0x3C;
    } else {
      for (uint64_t at = 0; at < bytes; ++at) data_[at] = static_cast<uint8_t>(at * 37 + 11);
    }
    return data_;
  }

  const Size size_;
  const std::string directory_;
  std::vector<SafetensorsWriter::Tensor> tensors_;
  std::vector<uint8_t> data_;
  uint64_t bytes_ = 0;
};

double Seconds(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Anonymous resident memory of this process in bytes.
uint64_t AnonymousBytes() {
  std::ifstream status("/proc/self/status");
  std::string word;
  uint64_t kib = 0;
  while (status >> word) {
    if (word == "RssAnon:") {
      status >> kib;
      break;
    }
  }
  return kib * 1024;
}

struct Loaded {
  double plan_s = 0, load_s = 0;
  uint64_t bytes = 0, peak = 0, before = 0;
};

Loaded Load(const std::string& directory, int threads) {
  Loaded result;
  EngineOptions options;
  options.device = ThisDevice();
  options.threads = threads;
  result.before = AnonymousBytes();
  Engine engine(options, LinkedBackends());
  auto start = std::chrono::steady_clock::now();
  absl::Status status = engine.Plan("m", directory);
  result.plan_s = Seconds(start);
  start = std::chrono::steady_clock::now();
  if (status.ok()) {
    status = engine.Load("m", [&](int, int, int) { result.peak = std::max(result.peak, AnonymousBytes()); });
  }
  result.load_s = Seconds(start);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  for (const LayerStatus& layer : std::vector<LayerStatus>(engine.Status()[0].layers)) result.bytes += layer.bytes;
  return result;
}

// Bytes per second that `threads` copy from one large buffer to another, pages touched before.
double MemcpyRate(int threads) {
  WorkerPool pool(threads);
  const size_t share = (size_t{512} << 20) / static_cast<size_t>(threads);
  std::vector<char> from(share * static_cast<size_t>(threads), 1), to(from.size(), 2);
  double best = 0;
  for (int round = 0; round < 5; ++round) {
    const auto start = std::chrono::steady_clock::now();
    pool.ParallelFor(threads, [&](int64_t part, int) {
      std::memcpy(to.data() + part * static_cast<int64_t>(share), from.data() + part * static_cast<int64_t>(share), share);
    });
    best = std::max(best, static_cast<double>(from.size()) / Seconds(start));
  }
  return best;
}

int Run(const std::string& directory, const std::string& json_path, int threads, int64_t large_mib) {
  nlohmann::json rows = nlohmann::json::array();
  double per_tensor[2] = {};
  const Size counts[2] = {{6, 111, 32, 32, 32}, {58, 115, 32, 32, 32}};
  for (int at = 0; at < 2; ++at) {
    if (!Writer(counts[at], directory).Write()) return 2;
    const Loaded loaded = Load(directory, threads);
    per_tensor[at] = (loaded.plan_s + loaded.load_s) / static_cast<double>(counts[at].tensors()) * 1e6;
    std::printf("%ld expert tensors: plan %.3f s, load %.3f s, %.1f us a tensor\n", static_cast<long>(counts[at].tensors()),
                loaded.plan_s, loaded.load_s, per_tensor[at]);
    rows.push_back({{"bench", "load"}, {"shape", "many small tensors"}, {"tensors", counts[at].tensors()},
                    {"plan_s", loaded.plan_s}, {"load_s", loaded.load_s}, {"us_per_tensor", per_tensor[at]}});
  }
  std::printf("time at ten times the tensors: %.2f x\n",
              per_tensor[1] / per_tensor[0] * static_cast<double>(counts[1].tensors()) / static_cast<double>(counts[0].tensors()));

  Size large{0, 64, 2048, 768, 128};
  const int64_t layer_bytes = 64 * 3 * 2048 * 768 / 2;
  large.layers = static_cast<int>(std::max<int64_t>(1, (large_mib << 20) / layer_bytes));
  Writer writer(large, directory);
  if (!writer.Write()) return 2;
  Load(directory, threads);  // fills the page cache
  const Loaded loaded = Load(directory, threads);
  const double copy = MemcpyRate(threads), rate = static_cast<double>(writer.bytes()) / loaded.load_s;
  const uint64_t layer = loaded.bytes / static_cast<uint64_t>(large.layers);
  std::printf("%.2f GB of int4 in the page cache: %.2f GB/s on %d threads, memcpy %.2f GB/s: %.0f %%\n",
              static_cast<double>(writer.bytes()) / 1e9, rate / 1e9, threads, copy / 1e9, 100 * rate / copy);
  std::printf("anonymous memory: peak %.0f MiB above the start, held %.0f MiB (one layer %.0f MiB)\n",
              static_cast<double>(loaded.peak - loaded.before) / 1048576.0, static_cast<double>(loaded.bytes) / 1048576.0,
              static_cast<double>(layer) / 1048576.0);
  rows.push_back({{"bench", "load"}, {"shape", "large"}, {"bytes", writer.bytes()}, {"load_s", loaded.load_s},
                  {"bytes_per_s", rate}, {"ceiling", "memcpy"}, {"ceiling_value", copy}, {"fraction", rate / copy},
                  {"peak_bytes", loaded.peak - loaded.before}, {"held_bytes", loaded.bytes}, {"threads", threads}});
  if (json_path.empty()) return 0;
  std::ofstream file(json_path);
  file << rows.dump(1) << "\n";
  return file.good() ? 0 : 1;
}

}  // namespace
}  // namespace moed::bench

int main(int argc, char** argv) {
  moed::SetUpAllocator();  // as moed itself does: without it large buffers cost a page fault a page, each time
  std::string directory, json;
  int threads = 0;
  int64_t large_mib = 2048;
  CLI::App app("What loading a checkpoint costs beyond copying its bytes");
  app.add_option("--dir", directory, "scratch folder for the checkpoints (several GB)");
  app.add_option("--json", json, "also write the rows to this file");
  app.add_option("--threads", threads, "worker threads; default: all usable processors");
  app.add_option("--large-mib", large_mib, "size of the large checkpoint");
  CLI11_PARSE(app, argc, argv);
  if (threads <= 0) threads = moed::ThisDevice().cores;
  std::string base = directory.empty() ? std::filesystem::temp_directory_path().string() : directory;
  std::string scratch = base + "/moed-load-XXXXXX";
  if (mkdtemp(scratch.data()) == nullptr) {
    std::fprintf(stderr, "cannot make a folder in %s\n", base.c_str());
    return 2;
  }
  const int result = moed::bench::Run(scratch, json, threads, large_mib);
  std::filesystem::remove_all(scratch);
  return result;
}
