"""A moed of one's own for one checkpoint, on a unix socket in a temporary folder."""
from __future__ import annotations

import pathlib
import shutil
import subprocess
import tempfile
import time
from typing import Any, Sequence

from moed.errors import DeadlineExceeded, FailedPrecondition, NotFound

__all__ = ["Server"]


class Server:
    """`with Server(program, path) as address`: ready when entered, ended by SIGTERM. NotFound without the program, what moed wrote
    when it refuses the checkpoint, DeadlineExceeded when it is not ready within `limit` seconds."""

    def __init__(self, program: str, path: pathlib.Path, options: Sequence[str] = (), limit: float = 3600.0):
        self._command = [program, "serve", "--model", f"{path}", *options]
        self._limit = limit

    def __enter__(self) -> str:
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="moed-eval-", dir="/tmp"))  # short: a socket's path has 107 bytes
        address, ready, errors = f"unix:{self._folder}/s", self._folder / "ready", self._folder / "errors"
        try:
            with open(errors, "wb") as file:
                self._process = subprocess.Popen([*self._command, "--listen", address, "--ready-file", str(ready)],
                                                 stdout=subprocess.DEVNULL, stderr=file)
            end = time.monotonic() + self._limit
            while not ready.exists():  # it gets its name when it is whole
                if self._process.poll() is not None:
                    raise FailedPrecondition(f"{self._command[0]} ended with {self._process.returncode}: "
                                             f"{errors.read_text(errors='replace').strip()}")
                if time.monotonic() > end:
                    raise DeadlineExceeded(f"{self._command[0]}: wanted it ready within {self._limit:.0f} s")
                time.sleep(0.01)
        except OSError as error:
            self._end()
            raise NotFound(f"{self._command[0]}: wanted the program moed, got {error.strerror}") from None
        except BaseException:
            self._end()
            raise
        return address

    def __exit__(self, *unused: Any) -> None:
        self._end()

    def _end(self) -> None:
        process = getattr(self, "_process", None)
        if process is not None and process.poll() is None:
            process.terminate()
            process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
