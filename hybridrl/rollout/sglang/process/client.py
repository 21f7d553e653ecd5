"""The pipe to a replica's server, from its first rank."""

import os
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from hybridrl.rollout.sglang.process.guard import clean_environment

START_S = 600.0
STOP_S = 30.0


class ServerError(RuntimeError):
    """The server refused a command, or is gone."""


class ServerProcess:
    """A server and SGLang's processes under it. All end with `close`, or with this process in whatever way."""

    def __init__(self, server_args: Mapping[str, Any], vocab_limit: int | None, tokenizer: Path | None) -> None:
        self._pipe, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__.replace("client", "server"), str(theirs.fileno()), str(os.getpid())],
                env=clean_environment(os.environ) | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
                pass_fds=[theirs.fileno()],
            )
        self._send("start", (dict(server_args), vocab_limit, tokenizer))
        self._answer("start", START_S)

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    def command(self, name: str, *arguments: Any) -> Any:
        """The result of a method of `Server`. Raises ServerError where it raised, or where the server has ended."""
        self._send(name, (name, arguments))
        return self._answer(name, None)

    def close(self) -> None:
        """Ends the server and waits for it."""
        self._pipe.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # SGLang's own processes die with it
            self._process.wait()

    def _send(self, name: str, message: Any) -> None:
        try:
            self._pipe.send(message)
        except OSError as error:
            raise self._gone(name) from error

    def _answer(self, name: str, timeout: float | None) -> Any:
        try:
            if not self._pipe.poll(timeout):
                self._process.kill()
                raise ServerError(f"SGLang's server gave no answer to {name} in {timeout:.0f} s")
            ok, value = self._pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            raise self._gone(name) from error
        if not ok:
            raise ServerError(f"SGLang's server could not {name}: {value}")
        return value

    def _gone(self, name: str) -> ServerError:
        code = self._process.wait(STOP_S)
        return ServerError(
            f"SGLang's server ended with exit code {code} before it answered {name}; its own messages are above"
        )
