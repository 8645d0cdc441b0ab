"""C++ code from .proto files by the system's protoc and grpc_cpp_plugin."""

def cc_grpc_proto(name, src, out_dir, visibility):
    """A cc_library with the messages and the service of one .proto file.

    Args:
      name: of the library.
      src: the .proto file, relative to this package.
      out_dir: the directory part of `src`.
      visibility: of the library.
    """
    stem = src[:-len(".proto")]
    sources = [stem + ".pb.cc", stem + ".grpc.pb.cc"]
    headers = [stem + ".pb.h", stem + ".grpc.pb.h"]
    native.genrule(
        name = name + "_gen",
        srcs = [src],
        outs = sources + headers,
        cmd = ("protoc -I proto --cpp_out=$(RULEDIR) --grpc_out=$(RULEDIR) " +
               "--plugin=protoc-gen-grpc=$$(command -v grpc_cpp_plugin) $(SRCS)"),
    )
    native.cc_library(
        name = name,
        srcs = sources,
        hdrs = headers,
        copts = ["-Wno-error", "-w"],
        includes = ["."],
        visibility = visibility,
        deps = ["//third_party:grpc"],
    )
