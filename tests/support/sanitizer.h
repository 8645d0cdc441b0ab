// Which sanitizer a test was built with (`./dev sanitize`), for tests that measure what it changes.
#ifndef MOED_TESTS_SUPPORT_SANITIZER_H_
#define MOED_TESTS_SUPPORT_SANITIZER_H_

namespace moed::testing {

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define MOED_ADDRESS_SANITIZER true
#endif
#if __has_feature(thread_sanitizer)
#define MOED_THREAD_SANITIZER true
#endif
#endif
#ifndef MOED_ADDRESS_SANITIZER
#define MOED_ADDRESS_SANITIZER false
#endif
#ifndef MOED_THREAD_SANITIZER
#define MOED_THREAD_SANITIZER false
#endif

// Memory is not given back at once and costs more: no test of the size of a process holds.
inline constexpr bool kAddressSanitizer = MOED_ADDRESS_SANITIZER;
// Everything takes some ten times as long.
inline constexpr bool kThreadSanitizer = MOED_THREAD_SANITIZER;

}  // namespace moed::testing

#endif  // MOED_TESTS_SUPPORT_SANITIZER_H_
