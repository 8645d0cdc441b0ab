"""The one way to declare a test."""

def moed_test(name, srcs, deps = [], data = [], tags = [], size = "medium", **kwargs):
    """A Catch2 test program.

    Args:
      name: of the test; ends in _test.
      srcs: its sources, without a main function.
      deps: what it tests and helpers.
      data: files it reads at run time, reachable below the working directory.
      tags: "gpu" for tests that need a GPU.
      size: Bazel's size: the hang guard.
      **kwargs: passed on to cc_test.
    """
    native.cc_test(
        name = name,
        srcs = srcs,
        data = data,
        size = size,
        linkstatic = True,  # one file that can be copied to another machine and run there
        tags = tags,
        deps = deps + ["//tests/support:main"],
        **kwargs
    )
