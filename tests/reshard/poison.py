"""Pages that show every use of memory that is not there."""

import torch

from hybridrl.memory.region import Region

POISON = 0xFF  # NaN, in all floating dtypes


class PoisonPages:
    """Small pages of ordinary memory. What is read before it was written, or after it was given back, is NaN."""

    page_bytes = 64

    def __init__(self, nbytes: int) -> None:
        whole = -(-nbytes // self.page_bytes) * self.page_bytes
        self.base = torch.full((whole,), POISON, dtype=torch.uint8)

    def take(self, start: int, stop: int) -> None:
        assert bool((self.base[start:stop] == POISON).all()), "bytes were written without a page under them"

    def give(self, start: int, stop: int) -> None:
        self.base[start:stop] = POISON

    def trim(self) -> None: ...

    def close(self) -> None: ...


def poison_region(nbytes: int, device: torch.device | str = "cpu") -> Region:
    """A region of such pages."""
    return Region(nbytes, device, pages=PoisonPages(nbytes))
