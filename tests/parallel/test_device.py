"""Choosing a device, its backend and the CPU threads."""

import pytest
import torch

from hybridrl.parallel import device


def test_auto_takes_the_cpu_where_there_is_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # the threads of this process stay as they are
    chosen = device.choose_device("auto")
    assert (chosen, device.backend(chosen)) == (torch.device("cpu"), "gloo")


def test_cuda_takes_the_gpu_of_the_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setenv("LOCAL_RANK", "1")
    chosen = device.choose_device("auto")
    assert (chosen, device.backend(chosen), taken) == (torch.device("cuda", 1), "nccl", [1])
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(RuntimeError, match="LOCAL_RANK=2 but this node has 2 GPUs"):
        device.choose_device("cuda")


def test_cuda_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"trainer\.device=cuda"):
        device.choose_device("cuda")


def test_an_unknown_device_is_named() -> None:
    with pytest.raises(ValueError, match=r"trainer\.device='tpu': expected auto, cpu or cuda"):
        device.choose_device("tpu")


@pytest.mark.parametrize(
    ("cores", "ranks", "omp", "threads"),
    [(8, 2, None, 4), (8, 2, "1", 4), (8, 3, None, 2), (2, 4, None, 1), (8, 2, "3", None), (8, 1, None, 8)],
)
def test_ranks_share_the_cores_unless_the_user_says_otherwise(
    cores: int, ranks: int, omp: str | None, threads: int | None
) -> None:
    assert device.threads_per_rank(cores, ranks, omp) == threads
