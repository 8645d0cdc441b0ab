"""Client of moed, the server of MoE layers: `moed.Client`, `moed.aio.AsyncClient` for asyncio, and `moed.Admin`.
docs/clients.md has the whole story.

    with moed.Client("unix:/run/moed.sock") as client:
        result = client.forward(3, hidden)   # the checkpoint's own gate routes
        print(result.output, result.backend, result.timing)
"""
from moed._call import Result, Timing
from moed.admin import Admin
from moed.client import Client
from moed.errors import (AlreadyExists, Cancelled, DeadlineExceeded, Error, FailedPrecondition, Internal, InvalidArgument, NotFound,
                         PermissionDenied, ResourceExhausted, Unauthenticated, Unavailable, Unimplemented, Unknown)
from moed.quantized import QuantizedHidden, quantize
from moed.reports import Explanation, Health, Hello, SelfCheck, ServerStatus
from moed.stream import Answer, Stream

__version__ = "0.1.0"

__all__ = ["Admin", "Answer", "Client", "QuantizedHidden", "Result", "Stream", "Timing", "quantize", "Error", "AlreadyExists",
           "Cancelled", "DeadlineExceeded", "FailedPrecondition", "Internal", "InvalidArgument", "NotFound", "PermissionDenied",
           "ResourceExhausted", "Unauthenticated", "Unavailable", "Unimplemented", "Unknown", "Explanation", "Health", "Hello",
           "SelfCheck", "ServerStatus"]
