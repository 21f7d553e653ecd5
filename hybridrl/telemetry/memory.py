"""Peak memory of this process."""

import resource

import torch


def peak_bytes() -> int:
    """Peak device memory where CUDA is used, else the peak resident set of the process; bytes."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
