"""Finds the CUDA toolkit of the machine that builds.

The external repository @cuda has `:runtime` (headers and the static CUDA runtime), `:release` (a file that differs between
compilers) and in defs.bzl:
  HAVE_CUDA     whether there is a toolkit; without one moed is built for the host's processors only
  NVCC          the compiler's absolute path, "" without one
  CUDA_VERSION  such as "13.0", "" without one

Looked for, in this order: nvcc on PATH; /usr/local/cuda; the folder .cuda of this workspace, where tools/cuda_wheels.sh puts the
toolkit from PyPI. A toolkit older than 12.8, which does not know every architecture of a release, is passed over. MOED_CUDA in the
environment says otherwise: a toolkit's folder, "wheels" for the folder .cuda only, "none" for a build without CUDA.

tools/cuda_wheels.sh decides by the same rules whether wheels are needed.
"""

OLDEST = [12, 8]

def _version(ctx, nvcc):
    """The release of a compiler, such as "13.0"; None when it does not run."""
    said = ctx.execute([nvcc, "--version"])
    words = said.stdout.replace(",", " ").split(" ")
    if said.return_code != 0 or "release" not in words[:-1]:
        return None
    return words[words.index("release") + 1]

def _known(ctx, place):
    """Struct of a toolkit's folder, compiler and release; None when the folder has no usable toolkit."""
    if not place.get_child("bin").get_child("nvcc").exists:
        return None
    place = place.realpath
    nvcc = place.get_child("bin").get_child("nvcc")
    version = _version(ctx, nvcc)
    if not version or [int(number) for number in version.split(".")] < OLDEST:
        return None
    runtime = _library(place, "libcudart_static.a")
    if not runtime:
        return None
    return struct(folder = place, nvcc = nvcc, version = version, runtime = runtime)

def _library(place, name):
    for folder in ["lib64", "lib", "targets/x86_64-linux/lib"]:
        file = place.get_child(folder).get_child(name)
        if file.exists:
            return file
    return None

def _folder_of(ctx, nvcc):
    """The toolkit of a compiler on PATH, which may be a script that calls the real one: what it says of itself."""
    said = ctx.execute([nvcc, "--dryrun", "-c", "-x", "cu", "/dev/null"])
    for line in said.stderr.split("\n"):
        if line.startswith("#$ TOP="):
            return ctx.path(line[len("#$ TOP="):])
    return nvcc.realpath.dirname.dirname

def _toolkit(ctx):
    wanted = ctx.os.environ.get("MOED_CUDA", "")
    wheels = ctx.path(Label("//:WORKSPACE")).dirname.get_child(".cuda")
    if wanted == "none":
        return None
    if wanted == "wheels":
        return _known(ctx, wheels)
    if wanted:
        toolkit = _known(ctx, ctx.path(wanted)) if wanted.startswith("/") else None
        if not toolkit:
            fail("MOED_CUDA: wanted none, wheels, or the absolute path of a CUDA toolkit from %s on, got %s" % (
                ".".join([str(number) for number in OLDEST]),
                wanted,
            ))
        return toolkit
    nvcc = ctx.which("nvcc")
    for place in ([_folder_of(ctx, nvcc)] if nvcc else []) + [ctx.path("/usr/local/cuda"), wheels]:
        toolkit = _known(ctx, place)
        if toolkit:
            return toolkit
    return None

def _defs(have, nvcc, version):
    return "HAVE_CUDA = %s\nNVCC = \"%s\"\nCUDA_VERSION = \"%s\"\n" % (have, nvcc, version)

def _impl(ctx):
    toolkit = _toolkit(ctx)
    if not toolkit:
        ctx.file("defs.bzl", _defs(False, "", ""))
        ctx.file("BUILD", "cc_library(name = \"runtime\", visibility = [\"//visibility:public\"])\n")
        return
    ctx.symlink(toolkit.folder.get_child("include"), "include")
    ctx.symlink(toolkit.runtime, "libcudart_static.a")
    ctx.file("release.txt", ctx.execute([toolkit.nvcc, "--version"]).stdout)
    ctx.file("defs.bzl", _defs(True, toolkit.nvcc, toolkit.version))
    ctx.file("BUILD", """
cc_library(
    name = "runtime",
    srcs = ["libcudart_static.a"],
    hdrs = glob(["include/*.h", "include/*.hpp", "include/crt/*", "include/nv/**"]),
    includes = ["include"],
    linkopts = ["-ldl", "-lrt", "-lpthread"],
    visibility = ["//visibility:public"],
)

filegroup(
    name = "release",
    srcs = ["release.txt"],
    visibility = ["//visibility:public"],
)
""")

cuda_repository = repository_rule(
    implementation = _impl,
    environ = ["PATH", "MOED_CUDA"],
    local = True,
)
