// Names that come from files: compared by hash where keeping them all would cost too much, and shown in messages.
#ifndef MOED_ENGINE_OUTSIDE_NAME_H_
#define MOED_ENGINE_OUTSIDE_NAME_H_

#include <array>
#include <cstdint>
#include <string>

namespace moed {

// Two independent hashes: a false match among a million names has odds below 1e-26.
std::array<uint64_t, 2> HashName(const std::string& name);

// `name` in quotes for a message: control characters escaped, cut after 120 bytes.
std::string QuotedName(const std::string& name);

}  // namespace moed

#endif  // MOED_ENGINE_OUTSIDE_NAME_H_
