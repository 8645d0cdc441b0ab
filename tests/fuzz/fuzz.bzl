"""The one way to declare a fuzz target."""

# Calls that memory_folder.cc answers in the place of the system.
_wrapped = ["open", "read", "pread", "fstat", "lstat", "close", "opendir", "readdir", "closedir"]

def moed_fuzz(name, srcs, deps, files = False):
    """A libFuzzer program; it only links with --config=fuzz (`./dev fuzz`).

    Args:
      name: of the program; ends in _fuzz.
      srcs: its sources, with LLVMFuzzerTestOneInput.
      deps: what it feeds.
      files: whether the code under test opens files, which then come from memory_folder.h.
    """
    native.cc_binary(
        name = name,
        srcs = srcs + ["options.cc", "pieces.h", "require.h"] + (["memory_folder.cc", "memory_folder.h"] if files else []),
        linkopts = ["-fsanitize=fuzzer"] + (["-Wl,--wrap=" + call for call in _wrapped] if files else []),
        tags = ["manual"],
        deps = deps,
    )
