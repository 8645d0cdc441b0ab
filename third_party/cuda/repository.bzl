"""Finds the CUDA toolkit of the machine that builds.

The external repository @cuda has `:runtime` (headers and the static CUDA runtime) and in defs.bzl:
  HAVE_CUDA  whether there is a toolkit; without one moed is built for the host's processors only
  NVCC       the compiler's absolute path, "" without one

Looked for, in this order: MOED_CUDA, a toolkit's folder, or "none" for a build without; nvcc on PATH; /usr/local/cuda; the folder
.cuda of this workspace, where tools/cuda_wheels.sh puts the toolkit from PyPI.
"""

def _toolkit(ctx):
    wanted = ctx.os.environ.get("MOED_CUDA", "")
    if wanted == "none":
        return None
    if wanted:
        if not ctx.path(wanted + "/bin/nvcc").exists:
            fail("MOED_CUDA: wanted a folder with bin/nvcc, or none, got " + wanted)
        return ctx.path(wanted)
    nvcc = ctx.which("nvcc")
    if nvcc:
        return nvcc.realpath.dirname.dirname
    here = ctx.path(Label("//:WORKSPACE")).dirname
    for place in [ctx.path("/usr/local/cuda"), here.get_child(".cuda")]:
        if place.get_child("bin").get_child("nvcc").exists:
            return place
    return None

def _library(ctx, toolkit, name):
    for folder in ["lib64", "lib", "targets/x86_64-linux/lib"]:
        file = ctx.path(str(toolkit) + "/" + folder + "/" + name)
        if file.exists:
            return file
    return None

def _impl(ctx):
    toolkit = _toolkit(ctx)
    runtime = _library(ctx, toolkit, "libcudart_static.a") if toolkit else None
    if not runtime:
        ctx.file("defs.bzl", "HAVE_CUDA = False\nNVCC = \"\"\n")
        ctx.file("BUILD", "cc_library(name = \"runtime\", visibility = [\"//visibility:public\"])\n")
        return
    ctx.symlink(str(toolkit) + "/include", "include")
    ctx.symlink(runtime, "libcudart_static.a")
    ctx.file("defs.bzl", "HAVE_CUDA = True\nNVCC = \"%s/bin/nvcc\"\n" % toolkit)
    ctx.file("BUILD", """
cc_library(
    name = "runtime",
    srcs = ["libcudart_static.a"],
    hdrs = glob(["include/*.h", "include/*.hpp", "include/crt/*"]),
    includes = ["include"],
    linkopts = ["-ldl", "-lrt", "-lpthread"],
    visibility = ["//visibility:public"],
)
""")

cuda_repository = repository_rule(
    implementation = _impl,
    environ = ["PATH", "MOED_CUDA"],
    local = True,
)
