// Loading benchmark: what a checkpoint costs beyond copying its bytes.
//
//   load_bench [FILTER] [--dir FOLDER] [--json FILE] [--threads N] [--large-mib N]
//
// 1. "many small tensors": compressed-tensors int4 experts of tiny shapes; time per tensor to open, plan and load, at two
//    counts that differ tenfold, which shows whether the time is linear in the count.
// 2. "large": a large checkpoint in the page cache; bytes per second of Load against two rates of the same run and threads, and
//    the peak of anonymous memory. "fresh copy" is a memcpy into memory that was never touched, which is what a load has to
//    fill too: the kernel clears its pages first; "memcpy" goes into memory that is there.
// FILTER: only what has it in its name. The checkpoints are written into FOLDER (default: a fresh one below the temporary
// directory) and removed.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "engine/engine.h"
#include "engine/safetensors.h"
#include "kernels/backends.h"
#include "kernels/aligned_buffer.h"
#include "kernels/worker_pool.h"
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

// The peak of anonymous memory while it lives, sampled by a thread of its own.
class PeakMemory {
 public:
  PeakMemory() : before_(AnonymousBytes()), peak_(before_), thread_([this](const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      peak_ = std::max<uint64_t>(peak_, AnonymousBytes());
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }) {}
  uint64_t Rise() const { return peak_ - before_; }

 private:
  const uint64_t before_;
  std::atomic<uint64_t> peak_;
  std::jthread thread_;
};

struct Loaded {
  double plan_s = 0, load_s = 0;
  uint64_t bytes = 0, peak = 0;
};

Loaded Load(const std::string& directory, int threads) {
  Loaded result;
  EngineOptions options;
  options.device = LinkedDevice();
  options.threads = threads;
  const PeakMemory memory;
  Engine engine(options, LinkedBackends());
  auto start = std::chrono::steady_clock::now();
  absl::Status status = engine.Plan("m", directory);
  result.plan_s = Seconds(start);
  start = std::chrono::steady_clock::now();
  if (status.ok()) status = engine.Load("m", {});
  result.load_s = Seconds(start);
  result.peak = memory.Rise();
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  for (const ModelStatus& model : engine.Status()) {
    for (const LayerStatus& layer : model.layers) result.bytes += layer.bytes;
  }
  return result;
}

// Takes and returns `bytes` of memory. A virtual machine may have given free memory back to its host, and gets it anew at a
// tenth of the usual rate: no matter of a load's.
void WarmMemory(uint64_t bytes, int threads) {
  WorkerPool pool(threads);
  AlignedBuffer memory;
  if (!memory.Allocate(bytes)) return;
  const size_t share = bytes / static_cast<size_t>(threads);
  pool.ParallelFor(threads, [&](int64_t part, int) { std::memset(memory.data() + part * static_cast<int64_t>(share), 1, share); });
}

// The quickest of five loads, as for the copies it is compared with.
Loaded BestLoad(const std::string& directory, int threads, uint64_t bytes) {
  Loaded best;
  for (int round = 0; round < 5; ++round) {
    WarmMemory(bytes, threads);
    const Loaded loaded = Load(directory, threads);
    if (round == 0 || loaded.load_s < best.load_s) best = loaded;
  }
  return best;
}

// Bytes per second that `threads` copy to a buffer of `bytes`, from one that is too large for the caches; `fresh`: the buffer
// was never touched, in huge pages as weights are. The best of five.
double CopyRate(int threads, uint64_t bytes, bool fresh) {
  WorkerPool pool(threads);
  constexpr size_t kPiece = size_t{1} << 20;
  const std::vector<char> from(256 * kPiece, 1);
  const int64_t pieces = static_cast<int64_t>(bytes / kPiece);
  AlignedBuffer to;
  double best = 0;
  for (int round = 0; round < 6; ++round) {
    if (fresh || round == 0) {
      to = AlignedBuffer();
      if (!to.Allocate(bytes)) return 0;
    }
    const auto start = std::chrono::steady_clock::now();
    pool.ParallelFor(pieces, [&](int64_t piece, int) {
      std::memcpy(to.data() + piece * static_cast<int64_t>(kPiece), from.data() + piece % 256 * static_cast<int64_t>(kPiece), kPiece);
    });
    if (round > 0) best = std::max(best, static_cast<double>(bytes) / Seconds(start));
  }
  return best;
}

// False when the folder cannot be written.
bool ManySmallTensors(const std::string& directory, int threads, nlohmann::json* rows) {
  double per_tensor[2] = {};
  const Size counts[2] = {{6, 111, 32, 32, 32}, {58, 115, 32, 32, 32}};
  for (int at = 0; at < 2; ++at) {
    if (!Writer(counts[at], directory).Write()) return false;
    Load(directory, threads);
    const Loaded loaded = Load(directory, threads);
    const int64_t tensors = counts[at].tensors();
    per_tensor[at] = (loaded.plan_s + loaded.load_s) / static_cast<double>(tensors) * 1e6;
    std::printf("%ld expert tensors: plan %.3f s, load %.3f s, %.1f us a tensor\n", static_cast<long>(tensors), loaded.plan_s,
                loaded.load_s, per_tensor[at]);
    rows->push_back({{"bench", "load"}, {"shape", "many small tensors"}, {"scheme", "int4 g32"}, {"tensors", tensors},
                     {"threads", threads}, {"ms", (loaded.plan_s + loaded.load_s) * 1e3}, {"us_per_tensor", per_tensor[at]}});
  }
  std::printf("time at ten times the tensors: %.2f x\n",
              per_tensor[1] / per_tensor[0] * static_cast<double>(counts[1].tensors()) / static_cast<double>(counts[0].tensors()));
  return true;
}

double MiB(uint64_t bytes) { return static_cast<double>(bytes) / 1048576.0; }

bool Large(const std::string& directory, int threads, int64_t mib, nlohmann::json* rows) {
  Size size{0, 64, 2048, 768, 128};
  const int64_t layer_bytes = 64 * 3 * 2048 * 768 / 2;
  size.layers = static_cast<int>(std::max<int64_t>(1, (mib << 20) / layer_bytes));
  Writer writer(size, directory);
  if (!writer.Write()) return false;
  Load(directory, threads);  // fills the page cache
  for (const auto& [ceiling, fresh] : {std::pair{"fresh copy", true}, std::pair{"memcpy", false}}) {
    const double copy = CopyRate(threads, writer.bytes(), fresh);
    const Loaded loaded = BestLoad(directory, threads, writer.bytes() + (uint64_t{512} << 20));
    const double rate = static_cast<double>(writer.bytes()) / loaded.load_s, fraction = rate / copy;
    std::printf("%.2f GB of int4 in the page cache: %.2f GB/s on %d threads, %s %.2f GB/s: %.0f %%\n",
                static_cast<double>(writer.bytes()) / 1e9, rate / 1e9, threads, ceiling, copy / 1e9, 100 * fraction);
    std::printf("anonymous memory: peak %.0f MiB above the start, held %.0f MiB (one layer %.0f MiB)\n", MiB(loaded.peak),
                MiB(loaded.bytes), MiB(loaded.bytes / static_cast<uint64_t>(size.layers)));
    rows->push_back({{"bench", "load"}, {"shape", "large"}, {"scheme", "int4 g128"}, {"bytes", writer.bytes()},
                     {"ms", loaded.load_s * 1e3}, {"bytes_per_s", rate}, {"ceiling", ceiling}, {"ceiling_value", copy},
                     {"fraction", fraction}, {"peak_bytes", loaded.peak}, {"held_bytes", loaded.bytes}, {"threads", threads}});
  }
  return true;
}

struct Options {
  std::string filter, directory, json;
  int threads = 0;
  int64_t large_mib = 2048;

  bool Wants(const char* name) const { return std::string(name).find(filter) != std::string::npos; }
};

int Run(const Options& options, const std::string& directory) {
  nlohmann::json rows = nlohmann::json::array();
  bool written = true;
  if (options.Wants("many small tensors")) written = ManySmallTensors(directory, options.threads, &rows);
  if (written && options.Wants("large")) written = Large(directory, options.threads, options.large_mib, &rows);
  if (!written) {
    std::fprintf(stderr, "cannot write checkpoints into %s\n", directory.c_str());
    return 2;
  }
  if (options.json.empty()) return 0;
  std::ofstream file(options.json);
  file << rows.dump(1) << "\n";
  return file.good() ? 0 : 1;
}

}  // namespace
}  // namespace moed::bench

int main(int argc, char** argv) {
  moed::SetUpAllocator();  // as moed itself does: without it large buffers cost a page fault a page, each time
  moed::bench::Options options;
  CLI::App app("What loading a checkpoint costs beyond copying its bytes");
  app.add_option("filter", options.filter, "only benchmarks whose name contains it: many small tensors, large");
  app.add_option("--dir", options.directory, "scratch folder for the checkpoints (several GB)");
  app.add_option("--json", options.json, "also write the rows to this file");
  app.add_option("--threads", options.threads, "worker threads; default: all usable processors");
  app.add_option("--large-mib", options.large_mib, "size of the large checkpoint");
  CLI11_PARSE(app, argc, argv);
  if (options.threads <= 0) options.threads = moed::ThisDevice().cores;
  std::string base = options.directory.empty() ? std::filesystem::temp_directory_path().string() : options.directory;
  std::string scratch = base + "/moed-load-XXXXXX";
  if (mkdtemp(scratch.data()) == nullptr) {
    std::fprintf(stderr, "cannot make a folder in %s\n", base.c_str());
    return 2;
  }
  const int result = moed::bench::Run(options, scratch);
  std::filesystem::remove_all(scratch);
  return result;
}
