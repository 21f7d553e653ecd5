"""How a rank fails, so that torchrun's last words are the error that came first and not one that followed from it."""

import functools
import os
import time
from collections.abc import Callable
from typing import ParamSpec

from torch.distributed.elastic.multiprocessing.errors import record

from hybridrl.config.compose import ConfigError

Arguments = ParamSpec("Arguments")

PAUSE_S = 1.1
"""torchrun compares the times of errors in whole seconds, and takes the lowest rank of equals."""


def recorded(task: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """`task`, whose error is left for torchrun to show.

    The process then lives a little longer with its connections open: the other ranks fail when these close, and their
    errors must be later ones. So `task` itself must not close them on its way out of an error. A ConfigError passes as
    it is: every rank has the same one, and `hybridrl.config.launch.refuse` tells it.
    """

    @functools.wraps(task)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        refused: list[ConfigError] = []

        def attempt() -> None:
            try:
                task(*args, **kwargs)
            except ConfigError as error:
                refused.append(error)

        try:
            record(attempt)()
        except Exception:
            if "TORCHELASTIC_ERROR_FILE" in os.environ:
                time.sleep(PAUSE_S)
            raise
        if refused:
            raise refused[0]

    return run
