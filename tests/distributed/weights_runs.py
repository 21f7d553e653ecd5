"""What the ranks of the import and export tests run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridrl.checkpoint import huggingface_export
from hybridrl.checkpoint.huggingface_export import export_weights
from hybridrl.checkpoint.huggingface_import import import_weights
from hybridrl.checkpoint.safetensors_file import SafetensorsFile
from hybridrl.models.families import load_spec, trained_spec, weight_map
from hybridrl.models.megatron.build import build_model, named_tensors
from hybridrl.parallel.sizes import ParallelSizes
from hybridrl.reshard.golden import differing_replicas
from hybridrl.reshard.golden_checks import WeightError
from hybridrl.reshard.layouts.megatron import MegatronLayout
from tests.distributed.golden_runs import empty
from tests.distributed.megatron_runs import make_config, make_groups, make_layout

FLAGS = ("tensor_model_parallel", "partition_dim", "partition_stride", "allreduce", "sequence_parallel", "shared")


def round_trip(
    folder: Path, out: Path, parallel: Mapping[str, Any], dtype: str = "float32", order: str = "engine"
) -> None:
    """A real Megatron model, loaded from the folder and exported, without the flags Megatron puts on parameters."""
    config = make_config(parallel, dtype=dtype, parameter_layout=order)
    groups = make_groups(config)
    layout = make_layout(trained_spec(folder), config, groups)
    tensors = named_tensors(build_model(layout.weights.spec, config))
    expected = {name: (param.shape, param.dtype) for name, param in layout.params(groups.rank).items()}
    real = {n: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in tensors.items()}
    assert list(real.items()) == list(expected.items())  # in module order too
    import_weights(folder, layout, tensors, groups.rank)
    for tensor in tensors.values():
        for flag in FLAGS:
            if hasattr(tensor, flag):
                delattr(tensor, flag)
    export_weights(out, layout, tensors, groups.rank, source=folder, max_shard_bytes=40_000, verify_replicas=True)


def check_replicas(folder: Path, out: Path) -> None:
    """A copy that differs in one bit is found and named on every rank, tied copies included; export refuses then."""
    rank = dist.get_rank()
    layout = MegatronLayout(weight_map(load_spec(folder)), ParallelSizes(world=4, pp=2, tp=2), vocab_multiple=16)
    params = empty(layout, rank)
    import_weights(folder, layout, params, rank)
    assert differing_replicas(layout, params, rank) == []
    if rank == 3:
        params["output_layer.weight"][0, 0] *= -1
    elif rank == 0:
        params["decoder.layers.0.input_layernorm.weight"][5] += 1
    expected = [
        "tensor model.embed_tokens.weight[32:50, 0:32] differs between ranks [1] and [3]",
        "tensor model.layers.0.input_layernorm.weight[0:32] differs between ranks [0] and [1]",
    ]
    assert differing_replicas(layout, params, rank) == expected
    with pytest.raises(WeightError) as caught:
        export_weights(out, layout, params, rank, source=folder, verify_replicas=True)
    assert all(line in str(caught.value) for line in expected)


def export_on_a_full_disk(folder: Path, out: Path) -> str:
    """One rank cannot write: the export fails on all, nobody hangs, and the next export works."""
    rank = dist.get_rank()
    layout = MegatronLayout(weight_map(load_spec(folder)), ParallelSizes(world=2, ep=2), vocab_multiple=16)
    params = empty(layout, rank)
    import_weights(folder, layout, params, rank)

    class Full(SafetensorsFile):
        def write(self, name: str, value: torch.Tensor) -> None:
            raise OSError(28, "No space left on device")

    if rank == 1:
        huggingface_export.SafetensorsFile = Full  # type: ignore[misc]
    with pytest.raises(WeightError) as caught:
        export_weights(out, layout, params, rank, source=folder, max_shard_bytes=20_000)
    huggingface_export.SafetensorsFile = SafetensorsFile  # type: ignore[misc]
    dist.barrier()
    assert list(out.parent.iterdir()) == []
    dist.barrier()
    export_weights(out, layout, params, rank, source=folder, max_shard_bytes=20_000)
    return str(caught.value)
