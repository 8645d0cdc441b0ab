#include "bench/rpc_bare.h"

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <future>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "moe/v1/moe.grpc.pb.h"
#include "proto/ring/doorbell.h"
#include "proto/ring/session.h"
#include "server/allocator.h"

namespace moed::bench {
namespace {

using std::chrono::steady_clock;

constexpr char kEchoServer[] = "--echo-server", kPingPong[] = "--ping-pong";
constexpr char kBytesMethod[] = "/bench.Echo/Bytes", kMessageMethod[] = "/bench.Echo/Message", kWorkMethod[] = "/bench.Echo/Work";
constexpr size_t kWorkBytes = 40;  // of its messages, as a request without tensors has
constexpr int kMessageLimit = 256 << 20;
constexpr size_t kPage = 4096, kRegion = 2 * Echo::kMostWork;

double MicrosSince(steady_clock::time_point begin) {
  return std::chrono::duration<double, std::micro>(steady_clock::now() - begin).count();
}

// The words that two processes of a ping-pong share.
struct Words {
  alignas(64) std::atomic<uint32_t> ping;
  std::atomic<uint32_t> ping_waits;
  alignas(64) std::atomic<uint32_t> pong;
  std::atomic<uint32_t> pong_waits;
  alignas(64) uint64_t work_bytes;  // written before ping changes
  double work_us;                   // written before pong changes
};

void WaitUntil(std::atomic<uint32_t>& word, uint32_t value, std::atomic<uint32_t>& waits, int spin_us) {
  for (;;) {
    const uint32_t seen = word.load(std::memory_order_acquire);
    if (seen == value) return;
    ring::Wait(word, seen, waits, std::chrono::microseconds(spin_us), std::chrono::seconds(10));
  }
}

// Copies `bytes` from the first half of what an echo's two processes share to the second; microseconds.
double CopyShared(char* region, size_t bytes) {
  const auto begin = steady_clock::now();
  std::memcpy(region + Echo::kMostWork, region, bytes);
  asm volatile("" ::"r"(region) : "memory");
  return MicrosSince(begin);
}

class EchoReactor final : public grpc::ServerGenericBidiReactor {
 public:
  EchoReactor(const std::string& method, char* region)
      : message_(method == kMessageMethod), work_(method == kWorkMethod), region_(region) {
    StartRead(&buffer_);
  }
  void OnReadDone(bool ok) override {
    if (!ok || (message_ && !Remake()) || (work_ && !Work())) return Finish(grpc::Status(grpc::StatusCode::INTERNAL, "no message"));
    StartWriteAndFinish(&buffer_, grpc::WriteOptions(), grpc::Status::OK);
  }
  void OnDone() override { delete this; }

 private:
  using Traits = grpc::SerializationTraits<moe::v1::Tensor>;
  bool Remake() {
    moe::v1::Tensor message;
    bool own = true;
    return Traits::Deserialize(&buffer_, &message).ok() && Traits::Serialize(message, &buffer_, &own).ok();
  }

  // Copies as many bytes as the request says, and answers with the time that took.
  bool Work() {
    grpc::Slice slice;
    uint64_t bytes = 0;
    if (!buffer_.DumpToSingleSlice(&slice).ok() || slice.size() != kWorkBytes) return false;
    std::memcpy(&bytes, slice.begin(), sizeof(bytes));
    if (bytes > Echo::kMostWork) return false;
    std::string answer(kWorkBytes, 'x');
    const double micros = CopyShared(region_, bytes);
    std::memcpy(answer.data(), &micros, sizeof(micros));
    const grpc::Slice answers(answer);
    buffer_ = grpc::ByteBuffer(&answers, 1);
    return true;
  }

  const bool message_, work_;
  char* const region_;
  grpc::ByteBuffer buffer_;
};

class EchoService final : public grpc::CallbackGenericService {
 public:
  explicit EchoService(char* region) : region_(region) {}

 private:
  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext* context) override {
    return new EchoReactor(context->method(), region_);
  }
  char* const region_;
};

int RunEchoServer(const std::string& path, bool tuned, int region) {
  if (tuned) SetUpAllocator();
  grpc::ServerBuilder builder;
  EchoService service(static_cast<char*>(ring::MapRegion(region, kRegion)));
  builder.AddListeningPort(absl::StrCat("unix:", path), grpc::InsecureServerCredentials());
  builder.SetMaxReceiveMessageSize(kMessageLimit);
  builder.RegisterCallbackGenericService(&service);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr) return 1;
  server->Wait();
  return 0;
}

int RunPingPong(int fd, int spin_us) {
  Words* const words = static_cast<Words*>(ring::MapRegion(fd, kPage));
  for (uint32_t round = 1;; ++round) {
    WaitUntil(words->ping, round, words->ping_waits, spin_us);
    if (words->work_bytes > 0) words->work_us = CopyMicros(words->work_bytes);
    words->pong.store(round, std::memory_order_release);
    ring::Ring(words->pong, words->pong_waits);
  }
}

}  // namespace

std::unique_ptr<Child> Child::Start(const std::vector<std::string>& arguments) {
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid < 0) return nullptr;
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // a benchmark that is interrupted leaves nothing behind
    if (getppid() != parent) _exit(1);
    execv(argv[0], argv.data());
    _exit(127);
  }
  return std::unique_ptr<Child>(new Child(pid));
}

Child::~Child() {
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

bool Child::Running() {
  siginfo_t info = {};
  return waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == 0;
}

using MessageStub = grpc::TemplatedGenericStub<moe::v1::Tensor, moe::v1::Tensor>;

struct Echo::Impl {
  std::unique_ptr<Child> child;
  std::unique_ptr<grpc::GenericStub> stub;
  std::unique_ptr<MessageStub> message_stub;
  std::string payload;
  char* region = nullptr;  // of the work
  std::vector<char> in, out;
};

Echo::Echo(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Echo::~Echo() { munmap(impl_->region, kRegion); }

absl::StatusOr<std::unique_ptr<Echo>> Echo::Start(const std::string& path, bool tuned) {
  const int fd = memfd_create("echo", 0);  // which the child inherits
  if (fd < 0 || ftruncate(fd, kRegion) != 0) return absl::ResourceExhaustedError("no memory for an echo");
  auto impl = std::make_unique<Impl>();
  impl->region = static_cast<char*>(ring::MapRegion(fd, kRegion));
  impl->child = Child::Start({"/proc/self/exe", kEchoServer, path, tuned ? "tuned" : "defaults", absl::StrCat(fd)});
  close(fd);
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMessageLimit);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  const auto channel = grpc::CreateCustomChannel(absl::StrCat("unix:", path), grpc::InsecureChannelCredentials(), arguments);
  impl->stub = std::make_unique<grpc::GenericStub>(channel);
  impl->message_stub = std::make_unique<MessageStub>(channel);
  std::unique_ptr<Echo> echo(new Echo(std::move(impl)));
  const auto end = steady_clock::now() + std::chrono::seconds(10);
  for (;;) {
    const absl::StatusOr<double> answer = echo->Call(1);
    if (answer.ok()) return echo;
    if (steady_clock::now() > end) return answer.status();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

namespace {

// As every call of a client that does not wait for ever: a deadline is a timer on either side.
void SetDeadline(grpc::ClientContext* context) {
  context->set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(1));
}

}  // namespace

absl::StatusOr<double> Echo::Call(size_t bytes) {
  impl_->payload.resize(bytes, 'x');
  const auto begin = steady_clock::now();
  const grpc::Slice slice(impl_->payload.data(), bytes, grpc::Slice::STATIC_SLICE);
  const grpc::ByteBuffer request(&slice, 1);
  grpc::ByteBuffer response;
  grpc::ClientContext context;
  SetDeadline(&context);
  std::promise<grpc::Status> done;
  impl_->stub->UnaryCall(&context, kBytesMethod, grpc::StubOptions(), &request, &response,
                         [&done](grpc::Status status) { done.set_value(std::move(status)); });
  const grpc::Status status = done.get_future().get();
  const double micros = MicrosSince(begin);
  if (!status.ok()) return absl::UnavailableError(status.error_message());
  if (response.Length() != bytes) return absl::InternalError("the echo has another size");
  return micros;
}

absl::StatusOr<double> Echo::CallMessage(size_t bytes) {
  impl_->payload.resize(bytes, 'x');
  const auto begin = steady_clock::now();
  moe::v1::Tensor request, response;
  request.set_data(impl_->payload.data(), bytes);
  grpc::ClientContext context;
  SetDeadline(&context);
  std::promise<grpc::Status> done;
  impl_->message_stub->UnaryCall(&context, kMessageMethod, grpc::StubOptions(), &request, &response,
                                 [&done](grpc::Status status) { done.set_value(std::move(status)); });
  const grpc::Status status = done.get_future().get();
  const double micros = MicrosSince(begin);
  if (!status.ok()) return absl::UnavailableError(status.error_message());
  if (response.data().size() != bytes) return absl::InternalError("the echo has another size");
  return micros;
}

absl::StatusOr<double> Echo::CallWork(size_t bytes, bool copies) {
  if (bytes > kMostWork) return absl::InvalidArgumentError(absl::StrCat("work: wanted at most ", kMostWork, " bytes, got ", bytes));
  impl_->in.resize(bytes, 'x'), impl_->out.resize(bytes, 'y');
  std::string payload(kWorkBytes, 'x');
  const uint64_t work = bytes;
  std::memcpy(payload.data(), &work, sizeof(work));
  const auto begin = steady_clock::now();
  if (copies) std::memcpy(impl_->region, impl_->in.data(), bytes);
  const grpc::Slice slice(payload);
  const grpc::ByteBuffer request(&slice, 1);
  grpc::ByteBuffer response;
  grpc::ClientContext context;
  SetDeadline(&context);
  std::promise<grpc::Status> done;
  impl_->stub->UnaryCall(&context, kWorkMethod, grpc::StubOptions(), &request, &response,
                         [&done](grpc::Status status) { done.set_value(std::move(status)); });
  const grpc::Status status = done.get_future().get();
  if (copies) std::memcpy(impl_->out.data(), impl_->region + kMostWork, bytes);
  const double micros = MicrosSince(begin);
  if (!status.ok()) return absl::UnavailableError(status.error_message());
  grpc::Slice answer;
  double work_us = 0;
  const bool whole = response.DumpToSingleSlice(&answer).ok() && answer.size() == kWorkBytes;
  if (!whole) return absl::InternalError("the echo has another size");
  std::memcpy(&work_us, answer.begin(), sizeof(work_us));
  return micros - work_us;
}

struct PingPong::Impl {
  std::unique_ptr<Child> child;
  Words* words = nullptr;
  int spin_us = 0;
  uint32_t round = 0;
};

PingPong::PingPong(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
PingPong::~PingPong() { munmap(impl_->words, kPage); }

absl::StatusOr<std::unique_ptr<PingPong>> PingPong::Start(int spin_us) {
  const int fd = memfd_create("ping-pong", 0);  // which the child inherits
  if (fd < 0 || ftruncate(fd, kPage) != 0) return absl::ResourceExhaustedError("no memory for a ping-pong");
  auto impl = std::make_unique<Impl>();
  impl->words = static_cast<Words*>(ring::MapRegion(fd, kPage));
  impl->spin_us = spin_us;
  impl->child = Child::Start({"/proc/self/exe", kPingPong, absl::StrCat(fd), absl::StrCat(spin_us)});
  close(fd);
  std::unique_ptr<PingPong> ping_pong(new PingPong(std::move(impl)));
  ping_pong->Call();
  return ping_pong;
}

double PingPong::Call() {
  const uint32_t round = ++impl_->round;
  const auto begin = steady_clock::now();
  impl_->words->ping.store(round, std::memory_order_release);
  ring::Ring(impl_->words->ping, impl_->words->ping_waits);
  WaitUntil(impl_->words->pong, round, impl_->words->pong_waits, impl_->spin_us);
  return MicrosSince(begin);
}

double PingPong::CallWork(size_t bytes) {
  impl_->words->work_bytes = bytes;
  const double micros = Call() - impl_->words->work_us;
  impl_->words->work_bytes = 0;
  return micros;
}

double CopyMicros(size_t bytes) {
  static std::vector<char> from, to;
  if (from.size() < bytes) from.assign(bytes, 1), to.assign(bytes, 2);
  const auto begin = steady_clock::now();
  std::memcpy(to.data(), from.data(), bytes);
  asm volatile("" ::"r"(to.data()) : "memory");
  return MicrosSince(begin);
}

std::optional<int> RunChild(int argc, char** argv) {
  if (argc == 5 && std::strcmp(argv[1], kEchoServer) == 0) {
    return RunEchoServer(argv[2], std::strcmp(argv[3], "tuned") == 0, std::atoi(argv[4]));
  }
  if (argc == 4 && std::strcmp(argv[1], kPingPong) == 0) return RunPingPong(std::atoi(argv[2]), std::atoi(argv[3]));
  return std::nullopt;
}

}  // namespace moed::bench
