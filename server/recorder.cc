#include "server/recorder.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <spdlog/spdlog.h>
#include <string.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <limits>
#include <new>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/version.h"

namespace moed {
namespace {

namespace fs = std::filesystem;

constexpr char kDraftEnd[] = ".draft";

absl::Status BadFolder(const std::string& folder, const std::string& got) {
  return absl::InvalidArgumentError(absl::StrCat("--record: wanted a folder that can be written, got ", folder, ": ", got));
}

// A number whose bits all depend on all bits of `number`.
uint64_t HashOf(uint64_t number) {
  uint64_t hash = (number + 1) * 0x9E3779B97F4A7C15;  // odd, without a pattern in its bits
  for (int round = 0; round < 3; ++round) hash = (hash ^ hash >> 32) * 0xD6E8FEB86659FD93;
  return hash ^ hash >> 32;
}

// The largest hash that is sampled.
uint64_t ThresholdOf(double rate) {
  if (rate >= 1) return std::numeric_limits<uint64_t>::max();
  return static_cast<uint64_t>(std::max(std::ldexp(rate, 64) - 1, 0.0));
}

// The bytes of files in `folder`, after drafts of a server that was killed are removed.
absl::StatusOr<uint64_t> CountFolder(const std::string& folder) {
  std::error_code error;
  uint64_t bytes = 0;
  fs::directory_iterator entries(folder, error);
  for (; !error && entries != fs::directory_iterator(); entries.increment(error)) {
    std::error_code ignored;  // of a file that goes meanwhile
    const std::string name = entries->path().filename().string();
    if (name.front() == '.' && entries->path().extension() == kDraftEnd) {
      fs::remove(entries->path(), ignored);
    } else if (entries->is_regular_file(ignored)) {
      const uintmax_t size = entries->file_size(ignored);
      if (!ignored) bytes += size;
    }
  }
  if (error) return BadFolder(folder, error.message());
  return bytes;
}

// RFC 3339 in UTC with microseconds.
std::string TimeText(std::chrono::system_clock::time_point time) {
  const int64_t micros = std::chrono::duration_cast<std::chrono::microseconds>(time.time_since_epoch()).count();
  const time_t seconds = static_cast<time_t>(micros / 1'000'000);
  struct tm parts = {};
  gmtime_r(&seconds, &parts);
  return absl::StrFormat("%04d-%02d-%02dT%02d:%02d:%02d.%06dZ", parts.tm_year + 1900, parts.tm_mon + 1, parts.tm_mday,
                         parts.tm_hour, parts.tm_min, parts.tm_sec, micros % 1'000'000);
}

// Names in the order of time, with characters that every file system takes.
std::string FileName(const std::string& time, uint64_t number) {
  std::string name;
  std::copy_if(time.begin(), time.end(), std::back_inserter(name), [](char c) { return c != '-' && c != ':'; });
  return absl::StrCat(name, "-", absl::StrFormat("%06d", number), ".safetensors");
}

StDtype FileType(DType dtype) {
  return dtype == DType::kF32 ? StDtype::kF32 : dtype == DType::kBf16 ? StDtype::kBf16 : StDtype::kF16;
}

StDtype HiddenType(const CheckedForward& checked) {
  if (!checked.packed) return FileType(checked.call.hidden.dtype);
  return checked.packed->code == PayloadCode::kF8E4m3 ? StDtype::kF8E4m3 : StDtype::kI8;
}

// Of all that will be copied.
uint64_t BytesOf(const CheckedForward& checked) {
  uint64_t bytes = checked.hidden_bytes() + checked.output_bytes() + (checked.packed ? checked.packed->scales.size() : 0);
  if (const auto* ids = std::get_if<RoutingByIds>(&checked.call.routing)) bytes += ids->ids.size() * 8;
  if (const auto* logits = std::get_if<RoutingByLogits>(&checked.call.routing)) bytes += logits->logits.size() * sizeof(float);
  return bytes;
}

template <typename T>
void Copy(const void* from, size_t bytes, std::vector<T>* to) {
  to->resize(bytes / sizeof(T));
  if (bytes > 0) std::memcpy(to->data(), from, bytes);
}

}  // namespace

const char* RecordLossName(RecordLoss loss) {
  constexpr const char* kNames[kRecordLosses] = {"rows", "device", "queue", "memory", "failed", "disk", "limit"};
  return kNames[static_cast<size_t>(loss)];
}

absl::Status CheckRecordFolder(const std::string& folder) {
  std::error_code error;
  const fs::file_status status = fs::status(folder, error);
  if (!fs::exists(status)) return BadFolder(folder, "there is nothing");
  if (!fs::is_directory(status)) return BadFolder(folder, "it is no folder");
  if (access(folder.c_str(), R_OK | W_OK | X_OK) != 0) return BadFolder(folder, strerror(errno));
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<Recorder>> Recorder::Open(Options options, Clock clock, Write write) {
  if (absl::Status status = CheckRecordFolder(options.folder); !status.ok()) return status;
  const int fd = open(options.folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return BadFolder(options.folder, strerror(errno));
  if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
    close(fd);
    return absl::UnavailableError(
        absl::StrCat("--record: wanted a folder of this server's own, got ", options.folder, ", where another records"));
  }
  std::shared_ptr<Recorder> recorder(new Recorder(std::move(options), std::move(clock), std::move(write), fd));
  const absl::StatusOr<uint64_t> bytes = CountFolder(recorder->options_.folder);
  if (!bytes.ok()) return bytes.status();
  recorder->folder_bytes_ = *bytes;
  recorder->thread_ = std::thread([raw = recorder.get()] { raw->ThreadMain(); });
  return recorder;
}

Recorder::Recorder(Options options, Clock clock, Write write, int folder_fd)
    : options_(std::move(options)), clock_(std::move(clock)), write_(std::move(write)), folder_fd_(folder_fd),
      threshold_(ThresholdOf(options_.rate)) {}

Recorder::~Recorder() {
  Stop();
  close(folder_fd_);
}

void Recorder::Stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    changed_.notify_all();
  }
  if (!thread_.joinable()) return;
  thread_.join();
  uint64_t lost = 0;
  for (const std::atomic<uint64_t>& count : lost_) lost += count;
  spdlog::info("{} calls were recorded in {}, {} that were sampled were not", recorded_.load(), options_.folder, lost);
}

bool Recorder::Sampled() {
  const uint64_t number = calls_.fetch_add(1, std::memory_order_relaxed);
  return options_.rate > 0 && HashOf(number) <= threshold_;
}

std::shared_ptr<Recording> Recorder::Sample(const CheckedForward& checked, const ModelFacts& model, const std::string& request_id,
                                            Transport transport) {
  if (!Sampled()) return nullptr;
  try {
    return Begin(checked, model, request_id, transport);
  } catch (const std::bad_alloc&) {
    return Lose(RecordLoss::kMemory), nullptr;
  }
}

std::shared_ptr<Recording> Recorder::Begin(const CheckedForward& checked, const ModelFacts& model, const std::string& request_id,
                                           Transport transport) {
  const int64_t rows = checked.call.hidden.rows / checked.rows_each;
  if (!active_.load(std::memory_order_relaxed)) return Lose(RecordLoss::kLimit), nullptr;
  if (rows > options_.max_rows) return Lose(RecordLoss::kRows), nullptr;
  if (checked.hidden_memory || checked.output_memory) return Lose(RecordLoss::kDevice), nullptr;
  RecordedCall call;
  call.model = checked.model;
  call.layer = checked.call.layer;
  call.hidden_dtype = HiddenType(checked);
  call.rows = rows;
  call.columns = checked.call.hidden.cols;
  call.routed_only = checked.call.routed_only;
  call.per_slot = checked.rows_each != 1;
  call.output_dtype = FileType(checked.output_dtype);
  call.first_expert = model.first_expert;
  call.end_expert = model.end_expert;
  call.deterministic = options_.deterministic;
  call.activations = options_.activations;
  call.version = kVersion;
  call.request_id = request_id;
  call.transport = TransportName(transport);
  const uint64_t bytes = BytesOf(checked);
  if (!Reserve(bytes)) return Lose(RecordLoss::kQueue), nullptr;
  try {
    return std::make_shared<Recording>(shared_from_this(), std::move(call), bytes);
  } catch (const std::bad_alloc&) {
    Release(bytes);
    throw;
  }
}

bool Recorder::Reserve(uint64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  const bool fits = bytes <= options_.queue_bytes && reserved_bytes_ <= options_.queue_bytes - bytes;
  if (stop_ || !fits || reserved_calls_ >= options_.queue_calls) return false;
  reserved_bytes_ += bytes;
  ++reserved_calls_;
  return true;
}

void Recorder::Release(uint64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  reserved_bytes_ -= bytes;
  --reserved_calls_;
}

// What is pushed after a Stop goes with the recorder.
void Recorder::Push(RecordedCall call, uint64_t reserved) {
  std::lock_guard<std::mutex> lock(mutex_);
  waiting_.push_back({std::move(call), reserved});
  changed_.notify_all();
}

Recorder::Counts Recorder::counts() const {
  Counts counts;
  counts.active = active_;
  counts.recorded = recorded_;
  counts.bytes = bytes_;
  counts.folder_bytes = folder_bytes_;
  for (size_t i = 0; i < lost_.size(); ++i) counts.lost[i] = lost_[i];
  return counts;
}

void Recorder::ThreadMain() {
  pthread_setname_np(pthread_self(), "recorder");  // as `top -H` shows it
  sigset_t too_large;  // a limit on the size of files is an error here, not the end of the process
  sigemptyset(&too_large);
  sigaddset(&too_large, SIGXFSZ);
  pthread_sigmask(SIG_BLOCK, &too_large, nullptr);
  for (;;) {
    Waiting next;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return stop_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      next = std::move(waiting_.front());
      waiting_.pop_front();
    }
    try {
      WriteOne(next.call);
    } catch (const std::bad_alloc&) {
      Lose(RecordLoss::kMemory);
    }
    Release(next.reserved);
  }
}

void Recorder::WriteOne(const RecordedCall& call) {
  if (!active_) return Lose(RecordLoss::kLimit);
  const uint64_t needed = call.tensor_bytes() + kMostOfRecordedHeader;
  if (needed > options_.max_bytes || folder_bytes_ > options_.max_bytes - needed) {
    active_ = false;
    spdlog::warn("--record-bytes: recording ends, the {} bytes in {} and the next file are more than {}", folder_bytes_.load(),
                 options_.folder, options_.max_bytes);
    return Lose(RecordLoss::kLimit);
  }
  const absl::StatusOr<uint64_t> bytes = WriteFile(call);
  if (!bytes.ok()) {
    spdlog::warn("--record: a call is not recorded: {}", bytes.status().ToString());
    return Lose(RecordLoss::kDisk);
  }
  folder_bytes_ += *bytes;
  bytes_ += *bytes;
  recorded_ += 1;
}

// The bytes of the file. After an error nothing is left of it.
absl::StatusOr<uint64_t> Recorder::WriteFile(const RecordedCall& call) {
  const std::string name = FileName(call.time, number_++);
  const std::string path = absl::StrCat(options_.folder, "/", name), draft = absl::StrCat(options_.folder, "/.", name, kDraftEnd);
  std::error_code error;
  absl::Status status = write_(draft, call);
  const uintmax_t bytes = status.ok() ? fs::file_size(draft, error) : 0;
  if (status.ok() && !error) fs::rename(draft, path, error);
  if (status.ok() && error) status = absl::UnavailableError(absl::StrCat(path, ": ", error.message()));
  if (status.ok()) return static_cast<uint64_t>(bytes);
  fs::remove(draft, error);
  return status;
}

Recording::Recording(std::shared_ptr<Recorder> recorder, RecordedCall call, uint64_t reserved)
    : recorder_(std::move(recorder)), call_(std::move(call)), reserved_(reserved) {}

Recording::~Recording() {
  if (complete_) return;
  recorder_->Lose(loss_);
  recorder_->Release(reserved_);
}

void Recording::KeepHidden(const void* came, size_t bytes) {
  kept_hidden_ = true;
  try {
    Copy(came, bytes, &call_.hidden);
  } catch (const std::bad_alloc&) {
    loss_ = RecordLoss::kMemory;
  }
}

void Recording::Complete(const CheckedForward& checked, const void* output, const ForwardInfo& info, int64_t receive_us,
                         int64_t queue_us) {
  if (complete_ || loss_ == RecordLoss::kMemory) return;
  try {
    Fill(checked, output, info);
    call_.receive_us = receive_us;
    call_.queue_us = queue_us;
    call_.time = TimeText(recorder_->clock_());
    recorder_->Push(std::move(call_), reserved_);
    complete_ = true;
  } catch (const std::bad_alloc&) {
    loss_ = RecordLoss::kMemory;
  }
}

void Recording::Fill(const CheckedForward& checked, const void* output, const ForwardInfo& info) {
  if (!kept_hidden_) Copy(checked.call.hidden.data, checked.hidden_bytes(), &call_.hidden);
  if (checked.packed) Copy(checked.packed->scales.data(), checked.packed->scales.size(), &call_.scales);
  if (const auto* ids = std::get_if<RoutingByIds>(&checked.call.routing)) {
    call_.routing = RecordedCall::Routing::kIds;
    call_.top_k = ids->top_k * checked.rows_each;
    call_.ids.assign(ids->ids.begin(), ids->ids.end());
    call_.weights.assign(ids->weights.begin(), ids->weights.end());
  } else if (const auto* logits = std::get_if<RoutingByLogits>(&checked.call.routing)) {
    call_.routing = RecordedCall::Routing::kLogits;
    call_.num_experts = call_.rows == 0 ? 0 : static_cast<int64_t>(logits->logits.size()) / call_.rows;
    call_.logits.assign(logits->logits.begin(), logits->logits.end());
  }
  Copy(output, checked.output_bytes(), &call_.output);
  call_.backend = info.backend;
  call_.scheme = info.scheme;
  call_.generation = info.generation;
  call_.weights_id = info.weights_id;
  call_.layer_weights_id = info.layer_weights_id;
  call_.compute_us = info.compute_us;
  call_.batch_rows = info.batch_rows;
}

}  // namespace moed
