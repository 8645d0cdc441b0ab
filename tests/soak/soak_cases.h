// The calls of a soak: the same ones in every process that makes them from the same models, and what the right answer to each is,
// as a digest for each of the weights that the server has in turn. Pure functions; files only where a name says so.
#ifndef MOED_TESTS_SOAK_SOAK_CASES_H_
#define MOED_TESTS_SOAK_SOAK_CASES_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/moed_client.h"
#include "moe/v1/moe.pb.h"

namespace moed::testing {

// The served models: the weights of the first change between two, those of the second stay.
inline constexpr char kSwapped[] = "swapped";
inline constexpr char kSteady[] = "steady";
inline constexpr int kVariants = 2;

// One call. Its spans point into itself: not to be moved.
struct SoakCase {
  client::ForwardCall call;
  std::vector<uint8_t> hidden;
  std::vector<int32_t> ids;
  std::vector<float> weights, logits;

  SoakCase() = default;
  SoakCase(const SoakCase&) = delete;
  SoakCase& operator=(const SoakCase&) = delete;

  size_t OutputBytes() const;
  // The same call as a message.
  moe::v1::ForwardRequest Request() const;
};
using SoakCases = std::vector<std::unique_ptr<SoakCase>>;

// Calls of the two models' layers in random sizes, dtypes and routings. NOT_FOUND when `status` has not both models.
absl::StatusOr<SoakCases> MakeCases(const client::ServerStatus& status);

// The digest of an output. Of use within one build of one program.
uint64_t Digest(const std::string& output);

// Right answers: digests by case, one for each variant of the weights.
class SoakAnswers {
 public:
  // Asks servers, of which the i-th has the i-th variant of the weights, for all answers.
  static absl::StatusOr<SoakAnswers> Ask(const SoakCases& cases, const std::vector<client::MoeClient*>& servers);
  static absl::StatusOr<SoakAnswers> Read(const std::string& file);
  absl::Status Write(const std::string& file) const;

  // Whether `output` is what the weights of `generation` give for a case: those of the first variant have odd generations.
  bool Right(size_t index, uint64_t generation, const std::string& output) const;

 private:
  std::vector<uint64_t> digests_;  // kVariants of each case
};

}  // namespace moed::testing

#endif  // MOED_TESTS_SOAK_SOAK_CASES_H_
