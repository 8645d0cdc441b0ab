"""Which GPUs a build is for: one list for all kernels.

By default the one that moed is made for first; with --config=release everything from Ampere on. A kernel whose instructions only
one architecture has passes its own list to cuda_objects.
"""

load("@cuda//:defs.bzl", "CUDA_VERSION", "HAVE_CUDA")

_DEFAULT = ["90a"]
_RELEASE = ["80", "86", "89", "90a", "100", "120"]

ARCHITECTURES = select({
    "//third_party/cuda:release": _RELEASE,
    "//conditions:default": _DEFAULT,
})

def _text(architectures):
    if not HAVE_CUDA:
        return "built without CUDA"
    return "CUDA %s, %s" % (CUDA_VERSION, ", ".join(["sm_" + architecture for architecture in architectures]))

def cuda_build_define(name):
    """A preprocessor definition for local_defines: NAME is a string literal such as "CUDA 13.0, sm_90a" or "built without CUDA"."""
    return select({
        "//third_party/cuda:release": ["%s='\"%s\"'" % (name, _text(_RELEASE))],
        "//conditions:default": ["%s='\"%s\"'" % (name, _text(_DEFAULT))],
    })
