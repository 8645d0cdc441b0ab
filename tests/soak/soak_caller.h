// One thread of a soak's client process: each step is one random thing that a client may do, or may not. See soak_client.h.
#ifndef MOED_TESTS_SOAK_SOAK_CALLER_H_
#define MOED_TESTS_SOAK_SOAK_CALLER_H_

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <random>
#include <string>

#include "client/moed_client.h"
#include "moe/v1/moe.grpc.pb.h"
#include "tests/soak/soak_cases.h"
#include "tests/soak/soak_client.h"

namespace moed::testing {

// What all threads of a process saw. Any number of threads.
struct SoakReport {
  std::array<std::atomic<uint64_t>, kSeenNames.size()> counts{};

  void Add(Seen seen) { ++counts[static_cast<size_t>(seen)]; }
  // Counts and prints something that should not have happened: kWrong or kError.
  void Problem(Seen seen, const std::string& text);
};

class SoakCaller {
 public:
  // All but `seed` outlive it.
  SoakCaller(const SoakClientOptions& options, const SoakCases& cases, const SoakAnswers& answers, uint32_t seed,
             SoakReport* report);

  void Step();

 private:
  using Stream = grpc::ClientReaderWriter<moe::v1::ForwardRequest, moe::v1::ForwardResponse>;

  uint32_t Random(uint32_t below) { return static_cast<uint32_t>(random_() % below); }
  size_t RandomCase() { return Random(static_cast<uint32_t>(cases_.size())); }
  // Another connection, to another address, with another transport.
  void Reconnect();

  // A case of at most that many rows.
  size_t RandomCase(int64_t most_rows);
  void CallByClient(size_t index);
  absl::StatusOr<client::ForwardResult> CallInBuffers(const SoakCase& each, const client::CallOptions& options);
  void CallAndCancel();
  void CallByStream();
  void ReadStream(Stream* stream, int want, bool cancelled);
  void CallBadly();
  void SendGarbage();
  void SendGarbageBytes();
  void BreakSession();

  // Judges an answer, and the end of a call of which the codes in `allowed` are no problem.
  void Judge(size_t index, uint64_t generation, const std::string& output, Seen way);
  void JudgeError(const std::string& what, int code, const std::string& text, bool may_be_late, bool may_be_cancelled);
  void WantRefused(const std::string& what, const grpc::Status& status);

  const SoakClientOptions& options_;
  const SoakCases& cases_;
  const SoakAnswers& answers_;
  SoakReport* const report_;
  std::mt19937 random_;
  client::Transport transport_ = client::Transport::kRpc;
  std::unique_ptr<client::MoeClient> client_;
  std::unique_ptr<moe::v1::Moe::Stub> stub_;
  std::unique_ptr<grpc::GenericStub> generic_;
  std::string session_socket_;
  size_t largest_ = 0;  // case
  int steps_ = 0;
};

}  // namespace moed::testing

#endif  // MOED_TESTS_SOAK_SOAK_CALLER_H_
