"""Changes of what a server serves, while it serves it: service Admin of moe.proto, as `moectl load`, `swap`, `rollback` and
`unload` have them.

Threads: any; the server makes one change at a time and refuses others meanwhile (FailedPrecondition).
"""
from __future__ import annotations

from typing import Any, Optional

from moed import _reporting, reports
from moed.client import Client

__all__ = ["Admin"]


class Admin:
    def __init__(self, address: str, *, token: Optional[str] = None, tls_ca: Optional[str] = None, tls_cert: Optional[str] = None,
                 tls_key: Optional[str] = None, timeout: Optional[float] = 3600.0):
        """Administers the server whose admin listener is at `address`, or that asks for admin tokens there. Options as of
        moed.Client; `timeout` is long because loading takes minutes.

        Each method returns when its change is made, with the server's models as they are then. When the time is over before, on
        Ctrl-C, or when the program ends, the change ends and the same weights are served as before. `path` is a checkpoint's
        folder on the server's machine.

        Raises FailedPrecondition while another change is under way, ResourceExhausted with the bytes when memory does not
        suffice, Unimplemented where the server has no such service, and what is wrong with the checkpoint as at a start."""
        self._client = Client(address, token=token, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, transport="rpc",
                              timeout=timeout)

    def load(self, model: str, path: str, *, timeout: Optional[float] = None) -> reports.ServerStatus:
        """Serves one more model. AlreadyExists for a name that is taken."""
        return self._client._ask(_reporting.load(model, path), timeout)

    def swap(self, model: str, path: str, *, keep_previous: bool = False,
             timeout: Optional[float] = None) -> reports.ServerStatus:
        """Has all calls that begin from then on computed by other weights, and returns when the old ones are not used any more.
        Every answer is wholly of the old or of the new weights, and `Result.generation` tells which. `model` may be "" when the
        server has one. `keep_previous`: the old weights stay in memory, for a rollback at once."""
        return self._client._ask(_reporting.swap(model, path, keep_previous), timeout)

    def rollback(self, model: str = "", *, timeout: Optional[float] = None) -> reports.ServerStatus:
        """Takes back the last swap of a model. FailedPrecondition when there was none."""
        return self._client._ask(_reporting.rollback(model), timeout)

    def unload(self, model: str, *, timeout: Optional[float] = None) -> reports.ServerStatus:
        """Serves a model no longer. Calls that have begun are answered."""
        return self._client._ask(_reporting.unload(model), timeout)

    def close(self) -> None:
        """Ends the connection, and with it a change of another thread. May be called again."""
        self._client.close()

    def __enter__(self) -> "Admin":
        return self

    def __exit__(self, *unused: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<moed.Admin of {self._client.address}>"
