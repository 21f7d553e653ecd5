"""What SGLang does otherwise on a CPU, and is kept from: the engine is to be laid out as on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hybridrl.rollout.sglang import internals as sg
from hybridrl.rollout.sglang.cpu import attention, experts
from hybridrl.rollout.sglang.replaced import replaced


@contextmanager
def laid_out_as_on_a_gpu() -> Iterator[None]:
    """While a scheduler is built: no padding for AMX kernels, which are not used; no threads bound; no CUDA asked.

    Expert parallelism, and what attention needs, stay in place afterwards.
    """
    experts.install()
    with (
        attention.served(),
        replaced(sg.model_runner_module, adjust_config_with_unaligned_cpu_tp=_as_it_is),
        replaced(sg.bootstrap, _bind_threads_if_cpu=lambda *, device: None),
        # the capture of routed experts has its host memory pinned by CUDA
        replaced(torch.cuda, cudart=lambda: _NoCuda),
    ):
        yield


def _as_it_is(model_config: Any, load_config: Any, tp_size: int) -> Any:
    return model_config


class _NoCuda:
    """The part of the CUDA runtime that pins host memory, on a machine that has none."""

    class cudaError:  # noqa: N801 - CUDA's own name
        success = 0

    @staticmethod
    def cudaHostRegister(*_: Any) -> int:  # noqa: N802 - CUDA's own name
        return 0
