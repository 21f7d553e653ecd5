"""Megatron-core's own `core.resharding`, for the one kind of case that it can do: between two dense Megatron models.

It matches parameters one to one by name and cuts them by the marks that Megatron leaves on them (`partition_dim` and
the like). So it is given modules with just those parameters, over the same storage that the other methods use.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.reshard_methods import Sides

from hybridrl.parallel import compat as compat  # isort: skip - must precede megatron.core

from megatron.core.resharding.copy_services.gloo_copy_service import GlooCopyService
from megatron.core.resharding.refit import reshard_model_weights

from hybridrl.parallel.sizes import ParallelSizes
from hybridrl.reshard.layouts.megatron import MegatronLayout

ABSENT = (
    "core.resharding maps parameters one to one by name between two Megatron models: it has no fused qkv_proj, "
    "gate_up_proj or expert stacks, and refuses padded vocabularies and replicated KV heads"
)


class MegatronMethod:
    """See the module's text."""

    def __init__(self, sides: Sides) -> None:
        assert isinstance(sides.source, MegatronLayout)
        assert isinstance(sides.destination, MegatronLayout)
        self.sides = sides
        self._service = _Service() if sides.device.type == "cpu" else _nccl_service()
        self._source = _module(sides.source, sides.trained)
        self._destination = _module(sides.destination, sides.served)
        self.staging_bytes: int | None = None
        self.run()
        plan = self._destination._cached_reshard_plan
        sizes = {name: value.element_size() for name, value in sides.served.items()}
        self.received_bytes = sum(
            sizes[op.param_name] * _elements(op.my_slice, sides.served[op.param_name])
            for op in plan.recv_ops
            if op.peer_rank != sides.rank
        )

    def run(self) -> dict[str, float]:
        """One sync."""
        start = self.sides.clock()
        reshard_model_weights(self._source, self._destination, service=self._service)
        return {"total": self.sides.clock() - start}


class _Service(GlooCopyService):
    """Megatron's own, without the CUDA stream that it makes and a machine without GPUs cannot."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.gloo_pg = dist.new_group(backend="gloo")
        self.send_ops: list[Any] = []
        self.recv_ops: list[Any] = []
        self._copy_stream = None


def _nccl_service() -> Any:
    from megatron.core.resharding.copy_services.nccl_copy_service import NCCLCopyService

    return NCCLCopyService()


def _module(layout: MegatronLayout, tensors: Mapping[str, torch.Tensor]) -> Any:
    """A module with the parameters under their names, marked as Megatron's layers mark theirs."""
    root: Any = torch.nn.Module()
    whole = MegatronLayout(layout.weights, ParallelSizes(world=1), vocab_multiple=layout.vocab_multiple).params(0)
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module._modules[part]
        param = torch.nn.Parameter(tensor, requires_grad=False)
        cut = [dim for dim, (own, all_) in enumerate(zip(tensor.shape, whole[name].shape, strict=True)) if own != all_]
        if cut:
            param.tensor_model_parallel = True  # type: ignore[attr-defined]
            param.partition_dim = cut[0]  # type: ignore[attr-defined]
            param.partition_stride = 2 if "linear_fc1" in name else 1  # type: ignore[attr-defined]
        module.register_parameter(last, param)
    root.config = SimpleNamespace(num_moe_experts=None)
    root.pg_collection = _groups(layout.sizes)
    return root


def _groups(sizes: ParallelSizes) -> SimpleNamespace:
    """This rank's groups; every rank makes all of them."""
    rank, found = dist.get_rank(), {}
    for axis in ("tp", "dp", "pp"):
        others = [a for a in ("tp", "dp", "pp") if a != axis]
        by_place: dict[tuple[int, ...], list[int]] = {}
        for one in range(sizes.world):
            at = sizes.coordinates(one)
            by_place.setdefault(tuple(getattr(at, other) for other in others), []).append(one)
        for ranks in by_place.values():
            group = dist.new_group(ranks)
            if rank in ranks:
                found[axis] = group
    return SimpleNamespace(**found, ep=None, expt_tp=None)


def _elements(slices: tuple[slice, ...], tensor: torch.Tensor) -> int:
    return tensor[slices].numel()
