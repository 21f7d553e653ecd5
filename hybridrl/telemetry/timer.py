"""Wall time by phase, within a step."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Timer:
    """Adds up the seconds spent in named phases; `take` hands them over and starts anew.

    Phases may nest and repeat within a step; each counts its own whole time. `synchronize` is called at each border
    (`torch.cuda.synchronize` on a GPU, so that a phase is charged for the work it enqueued), and `on_border` is told
    what begins there.
    """

    def __init__(
        self, synchronize: Callable[[], None] | None = None, on_border: Callable[[str], None] | None = None
    ) -> None:
        self._seconds: dict[str, float] = {}
        self._synchronize = synchronize or (lambda: None)
        self._on_border = on_border or (lambda _: None)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._synchronize()
        self._on_border(phase)
        start = time.perf_counter()
        try:
            yield
        finally:
            self._synchronize()
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start
            self._on_border(f"what follows {phase}")

    def take(self) -> dict[str, float]:
        """Seconds by phase as `time/<phase>`, and an empty timer afterwards."""
        seconds = {f"time/{phase}": value for phase, value in self._seconds.items()}
        self._seconds = {}
        return seconds
