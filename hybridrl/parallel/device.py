"""Which device a rank computes on, and what follows from it: the backend of `torch.distributed` and the CPU threads."""

import os

import torch

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def choose_device(name: str = "auto") -> torch.device:
    """The device of this rank, made current.

    `auto` takes CUDA where there is one, `cpu` and `cuda` insist. On CUDA the rank takes GPU `LOCAL_RANK`.
    Raises ValueError for another name, RuntimeError where CUDA is asked for and absent or has too few GPUs.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"trainer.device={name!r}: expected auto, cpu or cuda")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        _set_threads()
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError("trainer.device=cuda: this torch sees no CUDA device; install a CUDA build or use cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank >= torch.cuda.device_count():
        raise RuntimeError(
            f"LOCAL_RANK={local_rank} but this node has {torch.cuda.device_count()} GPUs: "
            "start at most one rank a GPU (trainer.ranks_per_node)"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def backend(device: torch.device) -> str:
    """The `torch.distributed` backend for tensors of this device."""
    return BACKENDS[device.type]


def threads_per_rank(cores: int, local_ranks: int, omp_num_threads: str | None) -> int | None:
    """CPU threads that a rank should use, None to leave torch's setting alone.

    The cores are shared out over the ranks of the node. A value of `OMP_NUM_THREADS` other than 1 is the user's and
    stays; 1 is what torchrun itself puts there, whatever the number of cores.
    """
    if omp_num_threads not in (None, "1"):
        return None
    return max(1, cores // local_ranks)


def _set_threads() -> None:
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    threads = threads_per_rank(len(os.sched_getaffinity(0)), local_ranks, os.environ.get("OMP_NUM_THREADS"))
    if threads is not None:
        torch.set_num_threads(threads)
