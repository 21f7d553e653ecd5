"""Megatron's tracker of named random states, over the CPU generator."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from hybridrl.parallel.compat.registry import patch


def _get_state(device: Any = "cpu", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    return torch.get_rng_state()


def _set_state(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


@patch(
    where="CudaRNGStatesTracker and its state functions (tensor_parallel/random.py)",
    reason="RuntimeError: random states of a CUDA generator that is not there",
)
def rng_tracker() -> None:
    from megatron.core import tensor_parallel
    from megatron.core.tensor_parallel import random

    class CpuRngStatesTracker(random.CudaRNGStatesTracker):
        """The same names and forks; the original warns when the CPU's state moves, which here is the point."""

        def add(self, name: str, seed: int) -> None:
            if name in self.states_ or seed in self.seeds_:
                raise ValueError(f"the random state {name!r} or the seed {seed} is in the tracker already")
            self._is_initialized = True
            self.seeds_.add(seed)
            self.states_[name] = torch.Generator().manual_seed(seed).get_state()

        @contextlib.contextmanager
        def fork(self, name: str = random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
            if name not in self.states_:
                raise KeyError(f"no random state {name!r} in the tracker; it has {sorted(self.states_)}")
            outside = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(outside)

    seed_states = random.model_parallel_cuda_manual_seed

    def seed_all(seed: int, *args: Any, **kwargs: Any) -> None:
        seed_states(seed, *args, **kwargs)
        torch.manual_seed(seed)  # the original seeds the default CUDA generator here

    random._get_cuda_rng_state, random._set_cuda_rng_state = _get_state, _set_state
    random.CudaRNGStatesTracker = CpuRngStatesTracker
    random.model_parallel_cuda_manual_seed = seed_all
    tensor_parallel.model_parallel_cuda_manual_seed = seed_all
