#include "client/load.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

namespace moed::client {
namespace {

using Clock = std::chrono::steady_clock;

// One worker: its connection, its request and what it measured. Used by one thread at a time.
class Worker {
 public:
  Worker(const LoadOptions& options, uint64_t seed) : options_(options) {
    std::mt19937_64 random(seed);
    FillHidden(random);
    if (options.random_ids) FillRouting(random);
    call_.model = options.model;
    call_.layer = options.layer;
    call_.hidden = {options.dtype, options.tokens, options.hidden, hidden_};
    call_.hidden_scales = scales_;
  }

  // Connects and sends the request that is not measured.
  absl::Status WarmUp() {
    ClientOptions connection = options_.connection;
    connection.own_connection = true;
    connection.transport = options_.transport;
    connection.session_bytes = SessionBytes();
    absl::StatusOr<std::unique_ptr<MoeClient>> client = MoeClient::Connect(options_.server, connection);
    if (!client.ok()) return client.status();
    client_ = *std::move(client);
    return UseBuffers();
  }

  // Sends requests until `end`; one that has begun is waited for and counts.
  void Measure(Clock::time_point end) {
    while (Clock::now() < end) {
      const Clock::time_point begin = Clock::now();
      const absl::StatusOr<ForwardResult> answer = Send();
      const int64_t elapsed = std::chrono::nanoseconds(Clock::now() - begin).count();
      if (answer.ok()) {
        Count(elapsed, answer->timing);
      } else {
        if (++result_.errors == 1) result_.first_error = answer.status().ToString();
        std::this_thread::sleep_for(std::chrono::milliseconds(10));  // a server that refuses at once is not hammered
      }
    }
  }

  const LoadResult& result() const { return result_; }

 private:
  // Puts the hidden states where a program that cares for speed would have them, and sends the request that is not measured.
  absl::Status UseBuffers() {
    absl::Status first = client_->Forward(call_, options_.call).status();  // before the session opens, so that its error is this one
    if (!first.ok()) return first;
    absl::StatusOr<Buffer> hidden = client_->Allocate(hidden_.size()), output = client_->Allocate(OutputBytes());
    if (!hidden.ok()) return hidden.status();
    if (!output.ok()) return output.status();
    std::copy(hidden_.begin(), hidden_.end(), hidden->bytes().begin());
    buffers_.push_back(*std::move(hidden));
    buffers_.push_back(*std::move(output));
    call_.hidden.data = buffers_[0].bytes();
    call_.hidden_owner = buffers_[0].owner();
    return Send().status();
  }

  absl::StatusOr<ForwardResult> Send() {
    if (buffers_.empty()) return client_->Forward(call_, options_.call);
    return client_->ForwardInto(call_, buffers_[1].bytes(), options_.call);
  }

  size_t OutputBytes() const {
    return static_cast<size_t>(options_.tokens * options_.hidden) * std::max<size_t>(2, ElementBytes(options_.dtype));
  }

  // Room for one call at a time, and for the copies of the first.
  size_t SessionBytes() const {
    return 2 * (hidden_.size() + OutputBytes()) + static_cast<size_t>(options_.tokens * (8 * options_.top_k + 4)) + (64 << 10);
  }

  // Uniform in [-2, 2): about the spread of normalised hidden states.
  void FillHidden(std::mt19937_64& random) {
    std::uniform_real_distribution<float> uniform(-2.0f, 2.0f);
    std::vector<float> values(static_cast<size_t>(options_.tokens * options_.hidden));
    for (float& value : values) value = uniform(random);
    if (ElementBytes(options_.dtype) > 1) {
      hidden_ = FromFloats(options_.dtype, values);
    } else {
      PackedRows packed = PackRows(options_.dtype, values, options_.hidden);
      hidden_ = std::move(packed.codes), scales_ = std::move(packed.scales);
    }
  }

  // k distinct experts per row with equal weights: the first k of a shuffled list.
  void FillRouting(std::mt19937_64& random) {
    std::vector<int32_t> experts(static_cast<size_t>(options_.num_experts));
    std::iota(experts.begin(), experts.end(), 0);
    for (int64_t row = 0; row < options_.tokens; ++row) {
      for (size_t j = 0; j < static_cast<size_t>(options_.top_k); ++j) {
        const size_t pick = std::uniform_int_distribution<size_t>(j, experts.size() - 1)(random);
        std::swap(experts[j], experts[pick]);
        ids_.push_back(experts[j]);
      }
    }
    weights_.assign(ids_.size(), 1.0f / static_cast<float>(options_.top_k));
    call_.top_k = options_.top_k;
    call_.ids = ids_;
    call_.weights = weights_;
  }

  void Count(int64_t elapsed_ns, const Timing& timing) {
    ++result_.calls;
    const int64_t server_ns = timing.total() * 1000;
    result_.latency.Add(elapsed_ns);
    result_.server.Add(server_ns);
    result_.transport.Add(elapsed_ns - server_ns);
    result_.sum.receive_us += timing.receive_us;
    result_.sum.queue_us += timing.queue_us;
    result_.sum.compute_us += timing.compute_us;
    result_.sum.send_us += timing.send_us;
    result_.sum.batch_rows += timing.batch_rows;
  }

  const LoadOptions& options_;
  std::vector<uint8_t> hidden_;
  std::vector<int32_t> ids_;
  std::vector<float> weights_, scales_;
  ForwardCall call_;
  std::unique_ptr<MoeClient> client_;
  std::vector<Buffer> buffers_;  // hidden states and output; none for the first call
  LoadResult result_;
};

void Merge(const LoadResult& from, LoadResult* into) {
  into->calls += from.calls;
  into->errors += from.errors;
  if (into->first_error.empty()) into->first_error = from.first_error;
  into->latency.Merge(from.latency);
  into->server.Merge(from.server);
  into->transport.Merge(from.transport);
  into->sum.receive_us += from.sum.receive_us;
  into->sum.queue_us += from.sum.queue_us;
  into->sum.compute_us += from.sum.compute_us;
  into->sum.send_us += from.sum.send_us;
  into->sum.batch_rows += from.sum.batch_rows;
}

}  // namespace

absl::StatusOr<LoadResult> RunLoad(const LoadOptions& options) {
  std::deque<Worker> workers;  // a Worker's spans point into itself: it must not move
  for (int64_t i = 0; i < options.concurrency; ++i) {
    workers.emplace_back(options, options.seed + static_cast<uint64_t>(i));
    if (absl::Status status = workers.back().WarmUp(); !status.ok()) return status;
  }
  const Clock::time_point begin = Clock::now();
  const Clock::time_point end =
      begin + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(options.seconds));
  std::vector<std::thread> threads;
  for (Worker& worker : workers) threads.emplace_back([&worker, end] { worker.Measure(end); });
  for (std::thread& thread : threads) thread.join();
  LoadResult result;
  result.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  for (const Worker& worker : workers) Merge(worker.result(), &result);
  return result;
}

}  // namespace moed::client
