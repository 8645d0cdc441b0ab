"""Compiles CUDA sources: one object a file, which a cc_library then lists among its sources."""

load("@cuda//:defs.bzl", "HAVE_CUDA", "NVCC")
load("//third_party/cuda:architectures.bzl", "ARCHITECTURES")

def _impl(ctx):
    out = ctx.actions.declare_file(ctx.label.name + ".pic.o")
    headers = [dep[CcInfo].compilation_context.headers for dep in ctx.attr.deps]
    args = ctx.actions.args()
    args.add_all(["-c", ctx.file.src, "-o", out])
    args.add_all(["-std=c++20", "-O3", "--expt-relaxed-constexpr", "-I."])
    args.add_all(["-Xcompiler=-fPIC,-Wall,-Wextra,-Wno-unused-parameter,-Wno-missing-field-initializers", "-Werror=all-warnings"])
    for arch in ctx.attr.architectures:
        args.add("-gencode=arch=compute_%s,code=sm_%s" % (arch, arch))
    ctx.actions.run(
        executable = NVCC,
        arguments = [args],
        inputs = depset([ctx.file.src, ctx.file._release] + ctx.files.hdrs, transitive = headers),
        outputs = [out],
        mnemonic = "CudaCompile",
        use_default_shell_env = True,
    )
    return [DefaultInfo(files = depset([out]))]

_cuda_object = rule(
    implementation = _impl,
    attrs = {
        "src": attr.label(allow_single_file = [".cu"]),
        "hdrs": attr.label_list(allow_files = True),
        "deps": attr.label_list(providers = [CcInfo]),
        "architectures": attr.string_list(),
        # The compiler lies outside the tree: an input that changes with it.
        "_release": attr.label(default = "@cuda//:release", allow_single_file = True),
    },
)

def cuda_objects(srcs, hdrs = [], deps = [], architectures = ARCHITECTURES):
    """One object for each source; none, and no targets, in a build without CUDA.

    Args:
      srcs: files NAME.cu; each gives a target NAME_cu.
      hdrs: headers of this package that they include.
      deps: cc_library targets whose headers they include; the cc_library that lists the objects needs them as well.
      architectures: such as ["90a"]; may be a select.

    Returns:
      The labels of the objects.
    """
    labels = []
    if not HAVE_CUDA:
        return labels
    for src in srcs:
        name = src[:-len(".cu")] + "_cu"
        _cuda_object(name = name, src = src, hdrs = hdrs, deps = deps, architectures = architectures, tags = ["cuda"])
        labels.append(":" + name)
    return labels
