// Defaults of the sanitizers and of libFuzzer for every fuzz target, so that a program that was copied to another machine
// keeps them. ASAN_OPTIONS and flags on the command line win.
//
// A short quarantine and no stacks of allocations: both cost more than the code under test, and a finding is run again
// with them (`./dev fuzz` does).
extern "C" const char* __asan_default_options() {
  return "quarantine_size_mb=16:malloc_context_size=1:allocator_may_return_null=0:detect_leaks=1";
}
extern "C" const char* __ubsan_default_options() { return "print_stacktrace=1"; }
