"""A gRPC server of nothing but grpcio, which sends back what it gets: the bare thing that moed.bench compares a call with.
Program: python -m moed._bench_echo ADDRESS. Runs until its input ends."""
from __future__ import annotations

import concurrent.futures
import sys

import grpc

from moed import _connection


def main() -> None:
    echo = grpc.unary_unary_rpc_method_handler(lambda request, context: request)
    _, service, method = _connection.FORWARD.split("/")
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(2), options=_connection.CHANNEL_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: echo}),))
    server.add_insecure_port(sys.argv[1])
    server.start()
    print("ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
