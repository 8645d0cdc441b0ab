"""The messages of moe.v1, grpc.health.v1 and google.rpc, made from the descriptors that generate.sh wrote.

They live in a descriptor pool of their own, so that a program with generated code of the same .proto files can use both.
"""
from __future__ import annotations

import pathlib
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError as DecodeError  # noqa: F401

_FILE = pathlib.Path(__file__).with_name("messages.binpb")


def _load() -> descriptor_pool.DescriptorPool:
    try:
        files = descriptor_pb2.FileDescriptorSet.FromString(_FILE.read_bytes())
    except FileNotFoundError:
        raise ImportError(f"moed: wanted {_FILE}, which client/python/generate.sh writes; got none") from None
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:  # each after those that it imports
        pool.AddSerializedFile(file.SerializeToString())
    return pool


_pool = _load()
_factory = message_factory.MessageFactory(_pool) if not hasattr(message_factory, "GetMessageClass") else None


def _message(name: str) -> Any:
    descriptor = _pool.FindMessageTypeByName(name)
    if _factory is not None:  # before protobuf 4.22
        return _factory.GetPrototype(descriptor)
    return message_factory.GetMessageClass(descriptor)


Tensor = _message("moe.v1.Tensor")
ForwardRequest = _message("moe.v1.ForwardRequest")
ForwardResponse = _message("moe.v1.ForwardResponse")
HelloRequest = _message("moe.v1.HelloRequest")
HelloResponse = _message("moe.v1.HelloResponse")
StatusRequest = _message("moe.v1.StatusRequest")
StatusResponse = _message("moe.v1.StatusResponse")
ExplainRequest = _message("moe.v1.ExplainRequest")
ExplainResponse = _message("moe.v1.ExplainResponse")
SelfCheckRequest = _message("moe.v1.SelfCheckRequest")
SelfCheckResponse = _message("moe.v1.SelfCheckResponse")
LoadModelRequest = _message("moe.v1.LoadModelRequest")
SwapModelRequest = _message("moe.v1.SwapModelRequest")
UnloadModelRequest = _message("moe.v1.UnloadModelRequest")
RollbackModelRequest = _message("moe.v1.RollbackModelRequest")
HealthCheckRequest = _message("grpc.health.v1.HealthCheckRequest")
HealthCheckResponse = _message("grpc.health.v1.HealthCheckResponse")
Status = _message("google.rpc.Status")
RetryInfo = _message("google.rpc.RetryInfo")

LAYER_STATES = {value.number: value.name[len("LAYER_STATE_"):].lower()
                for value in _pool.FindEnumTypeByName("moe.v1.LayerState").values}
DTYPES = {value.number: value.name[len("DTYPE_"):].lower() for value in _pool.FindEnumTypeByName("moe.v1.DType").values}
HEALTH_STATES = {value.number: value.name
                 for value in _pool.FindEnumTypeByName("grpc.health.v1.HealthCheckResponse.ServingStatus").values}
