// Changes the models of a soaked server: the swapped one's weights to and fro, by swaps and rollbacks, and another model comes and
// goes.
//
// Threads: one of its own, from construction to Stop.
#ifndef MOED_TESTS_SOAK_SOAK_SWAPPER_H_
#define MOED_TESTS_SOAK_SOAK_SWAPPER_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "client/moed_client.h"

namespace moed::testing {

class SoakSwapper {
 public:
  // `folders`: of the swapped model's weights, of which those of `generation` are served. `other`: a checkpoint that is loaded and
  // unloaded.
  SoakSwapper(const std::string& admin, std::vector<std::string> folders, std::string other, uint64_t generation, uint32_t seed);
  ~SoakSwapper();

  // Ends the thread; the server then serves the first weights again, keeps no others, and has no other model.
  void Stop();
  uint64_t generation() const { return generation_; }  // after Stop

  int changes() const { return changes_; }
  std::vector<std::string> Problems() const;

 private:
  void Main();
  absl::Status Change(int number);
  // The other weights: by a rollback, or by a swap that keeps these or not.
  absl::Status ToOther(bool back, bool keep);
  void Problem(const std::string& text);

  const std::unique_ptr<client::MoeClient> client_;
  const std::vector<std::string> folders_;
  const std::string other_;
  std::mt19937 random_;
  uint64_t generation_;  // of the swapped model
  bool loaded_ = false;  // the other model
  std::atomic<int> changes_{0};
  std::atomic<bool> stop_{false};
  mutable std::mutex mutex_;
  std::vector<std::string> problems_;  // guarded by mutex_
  std::thread thread_;
};

}  // namespace moed::testing

#endif  // MOED_TESTS_SOAK_SOAK_SWAPPER_H_
