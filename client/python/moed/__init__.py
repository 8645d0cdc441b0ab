"""Client of moed, the server of MoE layers: `moed.Client`, and `moed.aio.AsyncClient` for asyncio. docs/clients.md has the whole
story.

    with moed.Client("unix:/run/moed.sock") as client:
        result = client.forward(3, hidden)   # the checkpoint's own gate routes
        print(result.output, result.backend, result.timing)
"""
from moed._call import Result, Timing
from moed.client import Client
from moed.errors import (Cancelled, DeadlineExceeded, Error, FailedPrecondition, Internal, InvalidArgument, NotFound,
                         PermissionDenied, ResourceExhausted, Unauthenticated, Unavailable, Unimplemented, Unknown)
from moed.quantized import QuantizedHidden, quantize
from moed.reports import Explanation, Health, Hello, SelfCheck, ServerStatus
from moed.stream import Answer, Stream

__version__ = "0.1.0"

__all__ = ["Answer", "Client", "QuantizedHidden", "Result", "Stream", "Timing", "quantize", "Error", "Cancelled",
           "DeadlineExceeded", "FailedPrecondition", "Internal", "InvalidArgument", "NotFound", "PermissionDenied",
           "ResourceExhausted", "Unauthenticated", "Unavailable", "Unimplemented", "Unknown", "Explanation", "Health", "Hello",
           "SelfCheck", "ServerStatus"]
