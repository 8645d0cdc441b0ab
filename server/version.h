// The version of moed, as `moed --version` and the Status call print it.
#ifndef MOED_SERVER_VERSION_H_
#define MOED_SERVER_VERSION_H_

namespace moed {

inline constexpr char kVersion[] = "0.1.0";

}  // namespace moed

#endif  // MOED_SERVER_VERSION_H_
