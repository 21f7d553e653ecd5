"""How a rank fails, so that torchrun's last words are the error that came first and not one that followed from it."""

import functools
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import ParamSpec

from torch.distributed.elastic.multiprocessing.errors import record

from hybridrl.config.compose import ConfigError
from hybridrl.parallel.signals import StopSignals

Arguments = ParamSpec("Arguments")

PAUSE_S = 1.1
"""torchrun compares the times of errors in whole seconds, and takes the lowest rank of equals."""


def _end_if_told(error: Exception) -> None:
    """Ends the process, with the status of the signal that it has got, if it has."""
    stop = StopSignals.current
    if stop is not None and stop.number is not None:
        name = signal.Signals(stop.number).name
        print(f"ended after {name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        sys.exit(128 + stop.number)


def recorded(task: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """`task`, whose error is left for torchrun to show.

    The process then lives a little longer with its connections open: the other ranks fail when these close, and their
    errors must be later ones. So `task` itself must not close them on its way out of an error. A ConfigError passes as
    it is: every rank has the same one, and `hybridrl.config.launch.refuse` tells it. An error after a signal follows
    from it, nearly always, and gets one line: other ranks have ended, and their connections with them.
    """

    @functools.wraps(task)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        refused: list[ConfigError] = []

        def attempt() -> None:
            try:
                task(*args, **kwargs)
            except ConfigError as error:
                refused.append(error)
            except Exception as error:
                _end_if_told(error)
                raise

        try:
            record(attempt)()
        except Exception:
            if "TORCHELASTIC_ERROR_FILE" in os.environ:
                time.sleep(PAUSE_S)
            raise
        if refused:
            raise refused[0]

    return run
