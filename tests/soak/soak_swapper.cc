#include "tests/soak/soak_swapper.h"

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/soak/soak_cases.h"

namespace moed::testing {
namespace {

constexpr char kOther[] = "other";
const client::CallOptions kCall = {.timeout = std::chrono::minutes(5)};

}  // namespace

SoakSwapper::SoakSwapper(const std::string& admin, std::vector<std::string> folders, std::string other, uint64_t generation,
                         uint32_t seed)
    : client_(*client::MoeClient::Connect(admin, {.transport = client::Transport::kRpc})),
      folders_(std::move(folders)),
      other_(std::move(other)),
      random_(seed),
      generation_(generation),
      thread_([this] { Main(); }) {}

SoakSwapper::~SoakSwapper() { Stop(); }

void SoakSwapper::Stop() {
  stop_ = true;
  if (thread_.joinable()) thread_.join();
}

std::vector<std::string> SoakSwapper::Problems() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return problems_;
}

void SoakSwapper::Problem(const std::string& text) {
  std::lock_guard<std::mutex> lock(mutex_);
  problems_.push_back(text);
}

void SoakSwapper::Main() {
  for (int number = 0; !stop_; ++number) {
    if (absl::Status status = Change(number); !status.ok()) Problem(absl::StrCat("change: ", status.ToString()));
    ++changes_;
    for (uint32_t i = 5 + random_() % 20; i > 0 && !stop_; --i) std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  // As it was in the beginning, and without weights that are kept for a rollback.
  for (int swaps = generation_ % 2 == 0 ? 1 : 2; swaps > 0; --swaps) {
    if (absl::Status status = ToOther(false, false); !status.ok()) Problem(absl::StrCat("last change: ", status.ToString()));
  }
  if (loaded_) (void)client_->UnloadModel(kOther, kCall);
}

absl::Status SoakSwapper::ToOther(bool back, bool keep) {
  const std::string& path = folders_[generation_ % folders_.size()];
  const absl::StatusOr<client::ServerStatus> status =
      back ? client_->RollbackModel(kSwapped, kCall) : client_->SwapModel(kSwapped, path, keep, kCall);
  if (!status.ok()) return status.status();
  ++generation_;
  for (const client::ModelStatus& model : status->models) {
    if (model.name != kSwapped || (model.generation == generation_ && model.path == path)) continue;
    return absl::InternalError(
        absl::StrCat("wanted generation ", generation_, " from ", path, ", got ", model.generation, " from ", model.path));
  }
  return absl::OkStatus();
}

// In turns, so that equal times have equal shares of what takes memory: weights that are kept, and the other model.
absl::Status SoakSwapper::Change(int number) {
  switch (number % 8) {
    case 0: return ToOther(false, true);   // a swap that keeps the old weights,
    case 1: return ToOther(true, false);   // back at once,
    case 2: return ToOther(false, false);  // a swap that does not,
    case 3: return ToOther(true, false);   // back by loading
    case 4: loaded_ = true; return client_->LoadModel(kOther, other_, kCall).status();
    case 5: return ToOther(false, true);
    case 6: loaded_ = false; return client_->UnloadModel(kOther, kCall).status();
    default: return ToOther(false, false);
  }
}

}  // namespace moed::testing
