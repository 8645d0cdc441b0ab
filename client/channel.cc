#include "client/channel.h"

#include <sys/un.h>

#include <charconv>
#include <limits>

#include "absl/strings/str_cat.h"
#include "client/credentials.h"
#include "client/retry_after.h"

namespace moed::client {
namespace {

constexpr char kUnixPrefix[] = "unix:";
constexpr size_t kUnixPrefixLength = sizeof(kUnixPrefix) - 1;

absl::Status BadAddress(const std::string& address, const std::string& why) {
  return absl::InvalidArgumentError(
      absl::StrCat("address \"", address, "\": wanted HOST:PORT, [IPV6]:PORT or unix:PATH, ", why));
}

absl::Status CheckUnixPath(const std::string& address) {
  const size_t length = address.size() - kUnixPrefixLength;
  if (length == 0) return BadAddress(address, "got an empty path");
  // The kernel's limit counts a closing zero byte.
  const size_t limit = sizeof(sockaddr_un::sun_path) - 1;
  if (length > limit) return BadAddress(address, absl::StrCat("got a path of ", length, " bytes, the limit is ", limit));
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckAddress(const std::string& address) {
  if (address.rfind(kUnixPrefix, 0) == 0) return CheckUnixPath(address);
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos) return BadAddress(address, "got no port");
  const std::string host = address.substr(0, colon);
  if (host.empty()) return BadAddress(address, "got no host");
  const bool bracketed = host.front() == '[' && host.back() == ']';
  if (!bracketed && host.find_first_of(":/[] ") != std::string::npos) {
    return BadAddress(address, absl::StrCat("got the host \"", host, "\""));
  }
  const char* begin = address.data() + colon + 1;
  const char* end = address.data() + address.size();
  int port = 0;
  const auto [stop, error] = std::from_chars(begin, end, port);
  if (error != std::errc() || stop != end || port < 1 || port > 65535) {
    return BadAddress(address, absl::StrCat("got the port \"", address.substr(colon + 1), "\""));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<grpc::Channel>> MakeChannel(const std::string& address, const ClientOptions& options) {
  if (absl::Status status = CheckAddress(address); !status.ok()) return status;
  if (options.max_message_bytes < 1 || options.max_message_bytes > std::numeric_limits<int>::max()) {
    return absl::InvalidArgumentError(absl::StrCat("max_message_bytes: wanted 1 to ", std::numeric_limits<int>::max(),
                                                   ", got ", options.max_message_bytes));
  }
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(static_cast<int>(options.max_message_bytes));
  arguments.SetMaxSendMessageSize(static_cast<int>(options.max_message_bytes));
  // A proxy that is meant for web pages must not see a serving stack's internal traffic.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  if (options.own_connection) arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> credentials = MakeCredentials(address, options);
  if (!credentials.ok()) return credentials.status();
  return grpc::CreateCustomChannel(address, *credentials, arguments);
}

absl::Status ToAbsl(const grpc::Status& status, const std::string& address) {
  if (status.ok()) return absl::OkStatus();
  std::string text = status.error_message();
  if (status.error_code() == grpc::StatusCode::UNAVAILABLE) text = absl::StrCat("server ", address, ": ", text);
  absl::Status result(static_cast<absl::StatusCode>(status.error_code()), text);
  AddDetails(status.error_details(), &result);
  return result;
}

}  // namespace moed::client
