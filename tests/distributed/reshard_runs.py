"""What the reshard tests run on ranks: layouts of small models, shards of element codes, syncs compared with twins."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from hybridrl.models.families import weight_map
from hybridrl.models.spec import ModelSpec
from hybridrl.models.weights import WeightMap
from hybridrl.parallel.sizes import ParallelSizes
from hybridrl.reshard.golden import box_slices, golden_sync, write_piece, zero_padding
from hybridrl.reshard.layout import Layout
from hybridrl.reshard.layouts.megatron import MegatronLayout
from hybridrl.reshard.layouts.sglang import RolloutSizes, SGLangLayout
from hybridrl.reshard.layouts.transformers import TransformersLayout
from hybridrl.reshard.sync import WeightSync
from hybridrl.reshard.transports import GlooTransport, SharedTransport
from tests.reshard.models import weights
from tests.reshard.simulated import DENSE, MIXTRAL, MOE, whole_tensors

ALL_MOE = replace(MOE, moe=replace(MOE.moe, layers=(True,) * MOE.num_layers))
SPECS: Mapping[str, ModelSpec] = {
    "moe": ALL_MOE,
    "tied moe": replace(ALL_MOE, tied=True),
    "mixtral": MIXTRAL,
    "dense": DENSE,
    "tied": replace(DENSE, tied=True),
    "deepseek": weights("deepseek_v3").spec,
    "moonlight": weights("deepseek_v3_whole_q").spec,
    "glm": weights("glm4_moe").spec,
}
"""Models that SGLang has too."""
TRAINING: Mapping[str, dict[str, int]] = {
    "one": {"world": 1},
    "dp2": {"world": 2},
    "tp2": {"world": 2, "tp": 2},
    "tp4": {"world": 4, "tp": 4},
    "pp4": {"world": 4, "pp": 4},
    "pp2 uneven": {"world": 2, "pp": 2, "first_stage_layers": 3},
    "pp2 vpp2": {"world": 2, "pp": 2, "vpp": 2},
    "tp2 cp2": {"world": 4, "tp": 2, "cp": 2},
    "tp2 pp2": {"world": 4, "tp": 2, "pp": 2},
    "tp2 pp2 vpp2": {"world": 4, "tp": 2, "pp": 2, "vpp": 2},
    "ep2": {"world": 2, "ep": 2},
    "ep4": {"world": 4, "ep": 4},
    "tp2 ep4": {"world": 4, "tp": 2, "ep": 4},
    "pp2 ep2 uneven": {"world": 4, "pp": 2, "ep": 2, "last_stage_layers": 1},
    "tp2 ep2 etp2": {"world": 4, "tp": 2, "ep": 2, "etp": 2},
    "etp4": {"world": 4, "etp": 4},
    "tp4, engine's order": {"world": 4, "tp": 4, "engine_order": True},
    "tp2 twice, engine's order": {"world": 4, "tp": 2, "engine_order": True},
    "pp2 ep2, engine's order": {"world": 4, "pp": 2, "ep": 2, "engine_order": True},
    "tp4 ep2 etp2, engine's order": {"world": 4, "tp": 4, "ep": 2, "etp": 2, "engine_order": True},
}
ENGINES: Mapping[str, dict[str, Any]] = {
    "whole on all": {"transformers": (0, 1, 2, 3)},
    "whole on the last two": {"transformers": (2, 3)},
    "tp2 twice": {"world": 4, "tp": 2},
    "tp4": {"world": 4, "tp": 4},
    "tp4 permuted": {"world": 4, "tp": 4, "ranks": (2, 0, 3, 1)},
    "tp4 ep4": {"world": 4, "tp": 4, "ep": 4},
    "tp4 ep2": {"world": 4, "tp": 4, "ep": 2},
    "tp4 dp2 ep4": {"world": 4, "tp": 4, "dp": 2, "ep": 4},
    "tp2 ep2 twice, crossed": {"world": 4, "tp": 2, "ep": 2, "ranks": (0, 2, 1, 3)},
    "tp2 elsewhere": {"world": 2, "tp": 2, "ranks": (3, 2)},
}


def training_layout(weights: WeightMap, name: str, dtype: str = "float32") -> MegatronLayout:
    """The training layout of that name."""
    options = dict(TRAINING[name])
    sizes = {key: options.pop(key) for key in ("world", "tp", "cp", "pp", "ep", "etp") if key in options}
    return MegatronLayout(weights, ParallelSizes(**sizes), vocab_multiple=4, dtype=dtype, **options)


def engine_layout(weights: WeightMap, name: str, dtype: str = "float32") -> Layout:
    """The engine layout of that name."""
    options = dict(ENGINES[name])
    if "transformers" in options:
        return TransformersLayout(weights, options["transformers"], dtype=dtype)
    ranks = options.pop("ranks", None)
    return SGLangLayout(weights, RolloutSizes(**options), ranks=ranks, dtype=dtype)


def shard(layout: Layout, rank: int, tensors: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    """The rank's parameters as the layout describes them; without tensors, full of NaN."""
    params = {
        name: torch.full(p.shape, float("nan"), dtype=getattr(torch, p.dtype))
        for name, p in (layout.params(rank) if rank in layout.ranks else {}).items()
    }
    if tensors is not None:
        write_shard(layout, rank, tensors, params)
    return params


def write_shard(
    layout: Layout, rank: int, tensors: Mapping[str, torch.Tensor], params: dict[str, torch.Tensor]
) -> None:
    """Writes whole tensors into the rank's parameters in place, padding 0."""
    pieces = layout.pieces(rank) if rank in layout.ranks else ()
    zero_padding(pieces, params)
    for piece in pieces:
        write_piece(params, piece, tensors[piece.tensor][box_slices(piece.box)])


TRANSPORTS: Mapping[str, Callable[..., Any]] = {"gloo": GlooTransport, "shared": SharedTransport.connect}


def same_bits(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    """Whether two shards are equal in every bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)) for name in a)


def codes(weights: WeightMap, version: int) -> dict[str, torch.Tensor]:
    """Tensors of which every element is another number, and another one in every version."""
    whole = whole_tensors(weights)
    shift = version * sum(tensor.size for tensor in weights)
    assert shift < 2**23
    return {name: value + shift for name, value in whole.items()}


def sync_pairs(
    spec: str, pairs: Sequence[tuple[str, str]], bucket_bytes: int, verify: bool = False, transport: str = "shared"
) -> list[dict[str, Any]]:
    """Three syncs with changing weights for each pair, each compared with the golden path and with the layouts."""
    rank, weights = dist.get_rank(), weight_map(SPECS[spec])
    versions = [codes(weights, version) for version in range(3)]
    told = []
    for train, engine in pairs:
        source, destination = training_layout(weights, train), engine_layout(weights, engine)
        trained, served, golden = (
            shard(source, rank, None),
            shard(destination, rank, None),
            shard(destination, rank, None),
        )
        options: dict[str, Any] = {"bucket_bytes": bucket_bytes, "verify": verify, "transport": TRANSPORTS[transport]()}
        rebuilt: list[Any] = []
        options["hooks"] = {"post_load_weights": rebuilt.append}
        sync = WeightSync(source, trained, destination, served, rank, **options)
        buffers = [buffer.data_ptr() for buffer in (*sync.executor.staging.send, *sync.executor.staging.receive)]
        for version, tensors in enumerate(versions):
            write_shard(source, rank, tensors, trained)
            before = {name: value.clone() for name, value in trained.items()}
            metrics = sync.run(version)
            golden_sync(source, trained, destination, golden, rank)
            assert same_bits(trained, before), (train, engine, version, "the source was changed")
            assert same_bits(served, golden), (train, engine, version, "differs from the golden path")
            assert same_bits(served, shard(destination, rank, tensors)), (
                train,
                engine,
                version,
                "differs from the codes",
            )
            assert sync.version == version
            assert len(rebuilt) == (version + 1 if sync.plan.derived else 0)
        assert buffers == [b.data_ptr() for b in (*sync.executor.staging.send, *sync.executor.staging.receive)]
        assert sync.executor.staging.nbytes <= 2 * bucket_bytes
        sync.close()
        told.append({"pair": (train, engine), "rounds": len(sync.plan.rounds), **metrics})
    return told
