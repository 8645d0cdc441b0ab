#include "tests/soak/load_client.h"

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/histogram.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "moe/v1/moe.grpc.pb.h"

namespace moed::testing {
namespace {

using std::chrono::steady_clock;

// What came of the calls of one window. Any threads.
class Window {
 public:
  // `list`: keep and print each time of a good answer.
  explicit Window(bool list) : list_(list) {}

  void Add(const grpc::Status& status, steady_clock::duration took) {
    std::lock_guard<std::mutex> lock(mutex_);
    switch (status.error_code()) {
      case grpc::OK: AddGood(std::chrono::duration_cast<std::chrono::nanoseconds>(took).count()); break;
      case grpc::RESOURCE_EXHAUSTED: ++refused_, untold_ += !TellsWhen(status); break;
      case grpc::DEADLINE_EXCEEDED: ++late_; break;
      default: ++other_;
    }
  }

  void PrintAndClear() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (list_) std::printf("TIMES %s\n", absl::StrJoin(times_, " ").c_str());
    std::printf("%s\n", absl::StrFormat("LOAD ok=%d refused=%d untold=%d late=%d other=%d p50_us=%.0f p99_us=%.0f", ok_, refused_,
                                        untold_, late_, other_, latency_.QuantileMicros(0.5), latency_.QuantileMicros(0.99))
                            .c_str());
    std::fflush(stdout);
    ok_ = refused_ = untold_ = late_ = other_ = 0;
    latency_ = client::LatencyHistogram();
    times_.clear();
  }

 private:
  void AddGood(int64_t nanoseconds) {
    ++ok_, latency_.Add(nanoseconds);
    if (list_) times_.push_back(nanoseconds / 1000);
  }

  // Whether a refusal says when to try again.
  static bool TellsWhen(const grpc::Status& status) {
    google::rpc::Status details;
    google::rpc::RetryInfo retry;
    return details.ParseFromString(status.error_details()) && details.details_size() == 1 && details.details(0).UnpackTo(&retry) &&
           retry.retry_delay().seconds() * 1'000'000'000 + retry.retry_delay().nanos() > 0;
  }

  const bool list_;
  std::mutex mutex_;
  int64_t ok_ = 0, refused_ = 0, untold_ = 0, late_ = 0, other_ = 0;  // all guarded by mutex_
  client::LatencyHistogram latency_;
  std::vector<int64_t> times_;  // microseconds
};

class Load {
 public:
  explicit Load(const LoadClientOptions& options) : options_(options), random_(options.seed), window_(options.list) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    channel_ = grpc::CreateCustomChannel(options.server, grpc::InsecureChannelCredentials(), arguments);
    stub_ = moe::v1::Moe::NewStub(channel_);
    moe::v1::Tensor* hidden = request_.mutable_hidden();
    request_.set_layer(options.layer);
    hidden->set_dtype(moe::v1::DTYPE_BF16);
    hidden->add_shape(options.rows), hidden->add_shape(options.hidden);
    hidden->set_data(std::string(static_cast<size_t>(options.rows * options.hidden) * 2, '\0'));
  }

  // Connects; where that can wait for the first call, only when the process is to stop before that.
  absl::Status Connect() {
    if (options_.transport == client::Transport::kRpc) {
      const auto end = std::chrono::system_clock::now() + std::chrono::seconds(30);
      const bool connected = !options_.stopped || channel_->WaitForConnected(end);
      return connected ? absl::OkStatus() : absl::UnavailableError("load: no connection to " + options_.server);
    }
    auto client = client::MoeClient::Connect(options_.server, {.own_connection = true, .transport = options_.transport});
    if (!client.ok()) return client.status();
    client_ = *std::move(client);
    call_.layer = options_.layer;
    call_.hidden = {client::DType::kBf16, options_.rows, options_.hidden,
                    {reinterpret_cast<const uint8_t*>(request_.hidden().data().data()), request_.hidden().data().size()}};
    return client_->Allocate(1).status();  // opens the session
  }

  void Run() {
    const auto begin = steady_clock::now();
    const auto at = [&](double seconds) {
      return begin + std::chrono::duration_cast<steady_clock::duration>(std::chrono::duration<double>(seconds));
    };
    const auto end = at(options_.window_s * options_.windows);
    std::vector<std::thread> threads;
    if (client_ != nullptr) {
      for (int i = 0; i < options_.concurrency; ++i) threads.emplace_back([this, i, end] { CallByClient(i, end); });
    } else if (options_.rate > 0) {
      threads.emplace_back([&] { CallAtTimes(end); });
    } else {
      for (int i = 0; i < options_.concurrency; ++i) threads.emplace_back([&] { CallInTurn(end); });
    }
    for (int window = 1; window <= options_.windows; ++window) {
      std::this_thread::sleep_until(at(options_.window_s * window));
      window_.PrintAndClear();
    }
    for (std::thread& thread : threads) thread.join();
    std::unique_lock<std::mutex> lock(mutex_);
    none_.wait(lock, [this] { return under_way_ == 0; });
  }

 private:
  void SetDeadline(grpc::ClientContext* context) const {
    context->set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(options_.deadline_ms));
  }

  void CallInTurn(steady_clock::time_point end) {
    while (steady_clock::now() < end) {
      grpc::ClientContext context;
      SetDeadline(&context);
      moe::v1::ForwardResponse response;
      const auto begin = steady_clock::now();
      const grpc::Status status = stub_->Forward(&context, request_, &response);
      window_.Add(status, steady_clock::now() - begin);
    }
  }

  // Thread `number` of those that share the rate.
  void CallByClient(int number, steady_clock::time_point end) {
    std::mt19937 random(options_.seed * 1000 + static_cast<uint32_t>(number));
    std::exponential_distribution<double> pause(options_.rate / options_.concurrency);
    for (auto next = steady_clock::now(); next < end;) {
      std::this_thread::sleep_until(next);
      const auto result = client_->Forward(call_, {.timeout = std::chrono::milliseconds(options_.deadline_ms)});
      const auto now = steady_clock::now();
      const auto code = static_cast<grpc::StatusCode>(result.status().code());
      window_.Add(grpc::Status(code, std::string(result.status().message())), now - next);
      const auto after = std::chrono::duration_cast<steady_clock::duration>(std::chrono::duration<double>(pause(random)));
      next = options_.rate > 0 ? next + after : now;
    }
  }

  void CallAtTimes(steady_clock::time_point end) {
    std::exponential_distribution<double> pause(options_.rate);
    for (auto next = steady_clock::now(); next < end;
         next += std::chrono::duration_cast<steady_clock::duration>(std::chrono::duration<double>(pause(random_)))) {
      std::this_thread::sleep_until(next);
      Begin(next);
    }
  }

  struct Open {
    grpc::ClientContext context;
    moe::v1::ForwardResponse response;
    steady_clock::time_point begin;
  };

  // A call that tells the window when it is over. Its time counts from when it was to begin.
  void Begin(steady_clock::time_point due) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ++under_way_;
    }
    auto open = std::make_shared<Open>();
    open->begin = due;
    SetDeadline(&open->context);
    stub_->async()->Forward(&open->context, &request_, &open->response, [this, open](grpc::Status status) {
      window_.Add(status, steady_clock::now() - open->begin);
      std::lock_guard<std::mutex> lock(mutex_);
      if (--under_way_ == 0) none_.notify_all();
    });
  }

  const LoadClientOptions& options_;
  std::mt19937 random_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<moe::v1::Moe::Stub> stub_;
  moe::v1::ForwardRequest request_;
  std::unique_ptr<client::MoeClient> client_;  // null: calls go by stub_
  client::ForwardCall call_;                   // of client_; its spans point into request_
  Window window_;
  std::mutex mutex_;
  std::condition_variable none_;
  int under_way_ = 0;  // guarded by mutex_
};

}  // namespace

absl::Status RunLoadClient(const LoadClientOptions& options) {
  if (options.hidden < 1 || options.windows < 1)
    return absl::InvalidArgumentError("load: wanted --hidden and --windows of 1 and more");
  if (options.transport == client::Transport::kAuto)
    return absl::InvalidArgumentError("load: --transport: wanted rpc, shared-memory or ring, got auto");
  Load load(options);
  if (absl::Status status = load.Connect(); !status.ok()) return status;
  if (options.stopped) std::raise(SIGSTOP);
  load.Run();
  return absl::OkStatus();
}

}  // namespace moed::testing
