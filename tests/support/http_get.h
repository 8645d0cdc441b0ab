// One HTTP request to a server of this machine.
#ifndef MOED_TESTS_SUPPORT_HTTP_GET_H_
#define MOED_TESTS_SUPPORT_HTTP_GET_H_

#include <string>

namespace moed::testing {

// The whole answer, head and body, of `address` (an IPv4 address or localhost, and a port) to a GET of `path`; empty when nobody
// answers within a minute.
std::string HttpGet(const std::string& address, const std::string& path);

// Sends `bytes` as they are, and returns what comes back until the other side closes.
std::string SendRaw(const std::string& address, const std::string& bytes);

}  // namespace moed::testing

#endif  // MOED_TESTS_SUPPORT_HTTP_GET_H_
