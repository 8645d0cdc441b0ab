#include "server/client_gate.h"

#include <grpc/grpc_security_constants.h>

#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace moed {
namespace {

constexpr char kHeader[] = "authorization";
constexpr std::string_view kBearer = "Bearer ";
constexpr char kWanted[] = "authorization: wanted one header 'Bearer TOKEN', got ";

// The token of the one header, which views `context`.
absl::StatusOr<std::string_view> BearerToken(const grpc::ServerContextBase& context) {
  const auto [begin, end] = context.client_metadata().equal_range(kHeader);
  if (begin == end) return absl::UnauthenticatedError(absl::StrCat(kWanted, "none"));
  if (std::next(begin) != end) return absl::UnauthenticatedError(absl::StrCat(kWanted, "several"));
  const std::string_view value(begin->second.data(), begin->second.size());
  if (!absl::StartsWithIgnoreCase({value.data(), value.size()}, {kBearer.data(), kBearer.size()})) {
    return absl::UnauthenticatedError(absl::StrCat(kWanted, "another kind"));
  }
  return value.substr(kBearer.size());
}

absl::StatusOr<std::unique_ptr<TokenFile>> OpenTokens(const std::string& option, const std::string& path, TokenFile::Clock clock) {
  if (path.empty()) return std::unique_ptr<TokenFile>();
  absl::StatusOr<std::unique_ptr<TokenFile>> file = TokenFile::Open(path, std::move(clock));
  if (file.ok()) return file;
  return absl::Status(file.status().code(), absl::StrCat(option, ": ", file.status().message()));
}

// Of a verified certificate: its subject, or its first alternative name where that is empty. Nothing on clear text.
std::optional<std::string> CertificateName(const grpc::ServerContextBase& context) {
  const std::shared_ptr<const grpc::AuthContext> auth = context.auth_context();
  if (auth == nullptr) return std::nullopt;
  for (const char* property : {GRPC_X509_SUBJECT_PROPERTY_NAME, GRPC_X509_SAN_PROPERTY_NAME}) {
    const std::vector<grpc::string_ref> values = auth->FindPropertyValues(property);
    if (!values.empty() && !values.front().empty()) return std::string(values.front().data(), values.front().size());
  }
  return std::nullopt;
}

std::string NameOfToken(std::string_view token) {
  const TokenDigest digest = DigestOf(token);
  return absl::StrCat("token ", absl::BytesToHexString({reinterpret_cast<const char*>(digest.data()), digest.size()}));
}

}  // namespace

std::string HostOfPeer(const std::string& peer) {
  if (peer.rfind("unix", 0) == 0) return "unix";
  return peer.substr(0, peer.rfind(':'));
}

ClientGate::ClientGate(const Rules& rules)
    : client_certificates_(rules.client_certificates), limits_(rules.client_rows, rules.client_bytes) {}

absl::StatusOr<std::unique_ptr<ClientGate>> ClientGate::Open(const Rules& rules, TokenFile::Clock clock) {
  std::unique_ptr<ClientGate> gate(new ClientGate(rules));
  absl::StatusOr<std::unique_ptr<TokenFile>> data = OpenTokens("--token-file", rules.token_file, clock);
  if (!data.ok()) return data.status();
  absl::StatusOr<std::unique_ptr<TokenFile>> admin = OpenTokens("--admin-token-file", rules.admin_token_file, clock);
  if (!admin.ok()) return admin.status();
  gate->data_tokens_ = *std::move(data);
  gate->admin_tokens_ = *std::move(admin);
  return gate;
}

absl::Status ClientGate::Admit(Plane plane, const grpc::ServerContextBase& context) const {
  if (TokensOf(plane) == nullptr) return AdmitToken(plane, "");
  const absl::StatusOr<std::string_view> token = BearerToken(context);
  return token.ok() ? AdmitToken(plane, *token) : token.status();
}

absl::Status ClientGate::AdmitToken(Plane plane, std::string_view token) const {
  TokenFile* const tokens = TokensOf(plane);
  if (tokens == nullptr) {
    if (plane == Plane::kData || data_tokens_ == nullptr) return absl::OkStatus();
    return absl::UnauthenticatedError("this server takes no admin calls: it was started with --token-file alone");
  }
  if (tokens->Contains(DigestOf(token))) return absl::OkStatus();
  return absl::UnauthenticatedError(absl::StrCat(kWanted, token.empty() ? "none" : "a token that is not known"));
}

std::string ClientGate::NameOf(Plane plane, const grpc::ServerContextBase& context) const {
  if (client_certificates_) {
    if (const std::optional<std::string> name = CertificateName(context)) return absl::StrCat("certificate ", *name);
  }
  if (TokensOf(plane) != nullptr) {
    const absl::StatusOr<std::string_view> token = BearerToken(context);
    if (token.ok()) return NameOfToken(*token);
  }
  return HostOfPeer(context.peer());
}

ClientShare ClientGate::ShareOfToken(Plane plane, std::string_view token) {
  if (!limits_.any()) return {};
  return {&limits_, TokensOf(plane) == nullptr ? HostOfPeer("unix:") : NameOfToken(token)};
}

ClientShare ClientGate::ShareOf(Plane plane, const grpc::ServerContextBase& context) {
  if (!limits_.any()) return {};
  return {&limits_, NameOf(plane, context)};
}

}  // namespace moed
