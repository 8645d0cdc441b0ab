// Changes of what an engine serves, while it serves: loading beside, the flip, and the way back.
#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/engine_past.h"
#include "engine/forward.h"
#include "engine/model.h"

namespace moed {
namespace {

constexpr std::chrono::milliseconds kLook(2);  // at whether calls still use old weights

absl::Status UnderWay() { return absl::FailedPreconditionError("another change of the models is under way; wait for its end"); }

}  // namespace

// The name of a model, which "" may stand for. Holds nothing of the model, so that it can be let go.
absl::StatusOr<std::string> Engine::KnownName(const std::string& name) const {
  const absl::StatusOr<std::shared_ptr<Model>> model = Get(name);
  if (!model.ok()) return model.status();
  return (*model)->name();
}

// Plans and loads a model without serving it. Its threads are half of the pool's, beside which calls go on.
absl::StatusOr<std::shared_ptr<Model>> Engine::LoadBeside(const std::string& name, const std::string& path, const GoOn& go_on) {
  absl::StatusOr<std::shared_ptr<Model>> model = Model::PlanFrom(name, path, options_, backends_);
  if (!model.ok()) return model.status();
  {
    std::lock_guard<std::mutex> lock(models_mutex_);
    if (absl::Status fits = CheckMemory(**model); !fits.ok()) return fits;
  }
  WorkerPool pool(std::max(1, host_.threads / 2), {}, false);
  Scratch scratch;
  const LoadTools tools = {pool, scratch, [this](Accelerator& accelerator) { return LanesOf(accelerator); }};
  absl::Status status = LoadLayers(**model, tools, nullptr, go_on);
  if (!status.ok()) return status;
  return model;
}

// Waits until calls have done with a model that is not served any more, and frees it on this thread, since that takes a while.
void Engine::Release(std::shared_ptr<Model> model) {
  while (model.use_count() > 1) std::this_thread::sleep_for(kLook);
}

absl::Status Engine::Add(const std::string& name, const std::string& path, const GoOn& go_on) {
  const std::unique_lock<std::mutex> change(change_mutex_, std::try_to_lock);
  if (!change.owns_lock()) return UnderWay();
  {
    std::lock_guard<std::mutex> lock(models_mutex_);
    for (const std::shared_ptr<Model>& other : models_) {
      if (other->name() == name) return absl::AlreadyExistsError(absl::StrCat("model name ", name, " is taken; swap replaces its weights"));
    }
  }
  absl::StatusOr<std::shared_ptr<Model>> model = LoadBeside(name, path, go_on);
  if (!model.ok()) return model.status();
  std::lock_guard<std::mutex> lock(models_mutex_);
  (*model)->SetGeneration(++past_[name].generation);
  models_.push_back(*std::move(model));
  return absl::OkStatus();
}

// The flip, and what follows from it.
absl::Status Engine::Replace(const std::string& name, std::shared_ptr<Model> with, bool keep) {
  std::shared_ptr<Model> old, kept;
  {
    std::lock_guard<std::mutex> lock(models_mutex_);
    const auto at = std::find_if(models_.begin(), models_.end(), [&](const auto& model) { return model->name() == name; });
    Past& past = past_[name];
    past.generation = std::max(past.generation, (*at)->generation()) + 1;
    with->SetGeneration(past.generation);
    old = std::exchange(*at, std::move(with));
    past.path = old->path();
    kept = std::exchange(past.kept, keep ? old : nullptr);
  }
  if (kept != nullptr) Release(std::move(kept));
  if (!keep) Release(std::move(old));
  return absl::OkStatus();
}

absl::Status Engine::Swap(const std::string& name, const std::string& path, bool keep, const GoOn& go_on) {
  const std::unique_lock<std::mutex> change(change_mutex_, std::try_to_lock);
  if (!change.owns_lock()) return UnderWay();
  const absl::StatusOr<std::string> known = KnownName(name);
  if (!known.ok()) return known.status();
  std::shared_ptr<Model> kept;
  {
    std::lock_guard<std::mutex> lock(models_mutex_);
    kept = std::exchange(past_[*known].kept, nullptr);
  }
  if (kept != nullptr) Release(std::move(kept));
  absl::StatusOr<std::shared_ptr<Model>> model = LoadBeside(*known, path, go_on);
  if (!model.ok()) return model.status();
  return Replace(*known, *std::move(model), keep);
}

absl::Status Engine::Rollback(const std::string& name, const GoOn& go_on) {
  const std::unique_lock<std::mutex> change(change_mutex_, std::try_to_lock);
  if (!change.owns_lock()) return UnderWay();
  const absl::StatusOr<std::string> known = KnownName(name);
  if (!known.ok()) return known.status();
  std::shared_ptr<Model> model;
  std::string path;
  {
    std::lock_guard<std::mutex> lock(models_mutex_);
    Past& past = past_[*known];
    path = past.path;
    model = std::exchange(past.kept, nullptr);
  }
  if (path.empty()) return absl::FailedPreconditionError(absl::StrCat("model ", *known, ": its weights were not swapped, so there is no way back"));
  if (model != nullptr) return Replace(*known, std::move(model), false);
  absl::StatusOr<std::shared_ptr<Model>> loaded = LoadBeside(*known, path, go_on);
  if (!loaded.ok()) return loaded.status();
  return Replace(*known, *std::move(loaded), false);
}

absl::Status Engine::Remove(const std::string& name) {
  const std::unique_lock<std::mutex> change(change_mutex_, std::try_to_lock);
  if (!change.owns_lock()) return UnderWay();
  absl::StatusOr<std::shared_ptr<Model>> current = Get(name);
  if (!current.ok()) return current.status();
  std::shared_ptr<Model> kept;
  {
    std::lock_guard<std::mutex> lock(models_mutex_);
    std::erase(models_, *current);
    Past& past = past_[(*current)->name()];
    past.generation = std::max(past.generation, (*current)->generation());
    past.path.clear();
    kept = std::exchange(past.kept, nullptr);
  }
  if (kept != nullptr) Release(std::move(kept));
  Release(*std::move(current));
  return absl::OkStatus();
}

}  // namespace moed
