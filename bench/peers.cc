#include "bench/peers.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "bench/cases.h"

namespace moed::bench {
namespace {

using Json = nlohmann::json;

absl::Status Wrong(size_t entry, const char* key, const std::string& wanted, const std::string& got) {
  return absl::InvalidArgumentError(absl::StrCat("entry ", entry, ": ", key, ": wanted ", wanted, ", got ", got));
}

// The text of an optional member, for a message.
std::string Text(const Json& object, const char* key) {
  const auto at = object.find(key);
  return at == object.end() ? "nothing" : at->dump(-1, ' ', false, Json::error_handler_t::replace);
}

absl::Status ReadName(const Json& object, size_t entry, const char* key, const std::vector<std::string>& known,
                      std::string* out) {
  const auto at = object.find(key);
  const bool fits = at != object.end() && at->is_string() && !at->get_ref<const std::string&>().empty() &&
                    (known.empty() || std::count(known.begin(), known.end(), at->get_ref<const std::string&>()) > 0);
  if (!fits) {
    return Wrong(entry, key, known.empty() ? "a name" : absl::StrCat("one of ", absl::StrJoin(known, ", ")), Text(object, key));
  }
  *out = at->get<std::string>();
  return absl::OkStatus();
}

absl::Status ReadNumbers(const Json& object, size_t entry, PeerTime* time) {
  const auto tokens = object.find("tokens");
  if (tokens == object.end() || !tokens->is_number_integer() || *tokens < 1 || *tokens > kMaxTokens) {
    return Wrong(entry, "tokens", absl::StrCat("an integer from 1 to ", kMaxTokens), Text(object, "tokens"));
  }
  time->tokens = tokens->get<int64_t>();
  const auto ms = object.find("ms");
  if (ms == object.end() || !ms->is_number() || !(ms->get<double>() > 0) || !std::isfinite(ms->get<double>())) {
    return Wrong(entry, "ms", "milliseconds above 0", Text(object, "ms"));
  }
  time->ms = ms->get<double>();
  return absl::OkStatus();
}

absl::Status ReadEntry(const Json& object, size_t entry, const std::vector<std::string>& shapes,
                       const std::vector<std::string>& schemes, PeerTime* time) {
  if (!object.is_object()) {
    return absl::InvalidArgumentError(absl::StrCat("entry ", entry, ": wanted an object, got a ", object.type_name()));
  }
  for (const auto& [key, value] : object.items()) {
    const bool known = key == "shape" || key == "scheme" || key == "tokens" || key == "peer" || key == "ms";
    if (!known) return Wrong(entry, "keys", "shape, scheme, tokens, peer and ms", Text({{"key", key}}, "key"));
  }
  absl::Status status = ReadName(object, entry, "shape", shapes, &time->shape);
  if (status.ok()) status = ReadName(object, entry, "scheme", schemes, &time->scheme);
  if (status.ok()) status = ReadName(object, entry, "peer", {}, &time->peer);
  if (status.ok()) status = ReadNumbers(object, entry, time);
  return status;
}

}  // namespace

absl::StatusOr<std::vector<PeerTime>> ParsePeers(const std::string& text) {
  const Json list = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (list.is_discarded()) return absl::InvalidArgumentError("wanted a JSON list, got text that is no JSON");
  if (!list.is_array()) return absl::InvalidArgumentError(absl::StrCat("wanted a JSON list, got a ", list.type_name()));
  std::vector<std::string> shapes, schemes;
  for (const Shape& shape : Shapes()) shapes.push_back(shape.name);
  for (const NamedScheme& scheme : Schemes()) schemes.push_back(scheme.name);
  std::vector<PeerTime> times(list.size());
  for (size_t entry = 0; entry < times.size(); ++entry) {
    const absl::Status status = ReadEntry(list[entry], entry, shapes, schemes, &times[entry]);
    if (!status.ok()) return status;
  }
  return times;
}

absl::StatusOr<std::vector<PeerTime>> ReadPeers(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (!file.is_open() || file.bad()) return absl::NotFoundError(absl::StrCat("peers: cannot read ", path));
  absl::StatusOr<std::vector<PeerTime>> times = ParsePeers(text);
  if (times.ok()) return times;
  return absl::Status(times.status().code(), absl::StrCat("peers: ", path, ": ", times.status().message()));
}

void AddPeers(const std::vector<PeerTime>& peers, std::vector<Row>* rows) {
  for (Row& row : *rows) {
    for (const PeerTime& time : peers) {
      if (time.shape != row.shape || time.scheme != row.scheme || time.tokens != row.tokens) continue;
      if (!row.peer.empty() && row.peer_ms <= time.ms) continue;
      row.peer = time.peer;
      row.peer_ms = time.ms;
    }
  }
}

}  // namespace moed::bench
