"""Megatron-core's layout: TP, PP (uneven and virtual too), EP and ETP, fused and interleaved projections, padding.

Names are those of the model chunk's own `named_parameters()` and buffers (layer and expert indices are local), with
`chunk{v}.` before them where a stage has several chunks. Fused QKV is interleaved by KV group and cut by raw rows, so
that a rank may hold no key or value, or part of a head. Tied embeddings lie on the first stage, and again as
`output_layer.weight` on the last stage where that is another one.

In the engine's order instead (see `hybridrl.models.megatron`), fused QKV is [q; k; v] on each rank, with key and value
heads on several ranks where TP exceeds them; a rank's experts are two stacks; the vocabulary is padded as engines do.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from hybridrl.models.spec import ModelSpec
from hybridrl.models.vocabulary import padded_as_engine, padded_to_multiple
from hybridrl.models.weights import Param, Piece, Role, Tensor, WeightMap
from hybridrl.parallel.sizes import ParallelSizes
from hybridrl.parallel.stages import stage_layers
from hybridrl.reshard.layout import Holder
from hybridrl.reshard.layouts.megatron_slabs import dense_problems, layer_slabs, outer_slabs
from hybridrl.reshard.layouts.slabs import Slab


class _Place(NamedTuple):
    """One parameter (or, of experts, one per local expert) that holds a tensor, on all ranks of a stage."""

    pp: int
    prefix: str
    slab: Slab


class MegatronLayout:
    """Where each rank of a Megatron world keeps which box of which tensor.

    Args:
        weights: the model's tensors.
        sizes: the training world.
        vpp: model chunks of a pipeline stage.
        first_stage_layers, last_stage_layers: layers of these stages, None for an even share.
        vocab_multiple: the vocabulary is padded to a multiple of this times TP.
        transformer_engine: parameters of Transformer Engine's spec (fused norms, grouped experts), else the local's.
        engine_order: attention, experts and padding as the inference engine has them; `vocab_multiple` is not used.
        dtype: the parameters' dtype; None keeps each tensor's own. The router's expert bias is float32 in any case.

    Raises ValueError with every reason why these sizes cannot hold the model, and for a tensor that has no place.
    """

    def __init__(
        self,
        weights: WeightMap,
        sizes: ParallelSizes,
        *,
        vpp: int = 1,
        first_stage_layers: int | None = None,
        last_stage_layers: int | None = None,
        vocab_multiple: int = 128,
        transformer_engine: bool = False,
        engine_order: bool = False,
        dtype: str | None = None,
    ) -> None:
        spec = weights.spec
        self.weights = weights
        self.sizes = sizes
        self.vpp = vpp
        self.vocab_multiple = vocab_multiple
        self.transformer_engine = transformer_engine
        self.engine_order = engine_order
        self.dtype = dtype
        self.ranks: Sequence[int] = range(sizes.world)
        problems = dense_problems(spec, sizes)
        try:
            self.stages = stage_layers(spec.num_layers, sizes.pp, vpp, first_stage_layers, last_stage_layers)
        except ValueError as error:
            problems.append(str(error))
        if problems:
            raise ValueError(f"{spec.family} does not fit its training layout: " + "; ".join(problems))
        self._layer_slabs = {
            moe: layer_slabs(spec, sizes, moe=moe, transformer_engine=transformer_engine, engine_order=engine_order)
            for moe in {spec.is_moe_layer(i) for i in range(spec.num_layers)}
        }
        self._outer_slabs = outer_slabs(spec, sizes, self.padded_vocabulary)
        self._check_weights()

    zero_padding = True
    """Elements that no piece covers are zero and stay so: they are masked, and so have no gradient."""

    @property
    def padded_vocabulary(self) -> int:
        """Rows of the embedding over all TP ranks."""
        vocabulary, tp = self.weights.spec.vocab_size, self.sizes.tp
        return (
            padded_as_engine(vocabulary, tp)
            if self.engine_order
            else padded_to_multiple(vocabulary, self.vocab_multiple, tp)
        )

    def params(self, rank: int) -> Mapping[str, Param]:
        """See `Layout.params`; all chunks of the stage, in module order."""
        pp = self._stage_of(rank)
        found = (Param(name, self._shape(slab), self._dtype(slab)) for name, slab in self._stage_params(pp))
        return {param.name: param for param in found}

    def pieces(self, rank: int) -> Sequence[Piece]:
        """See `Layout.pieces`."""
        pp = self._stage_of(rank)
        at = self.sizes.coordinates(rank)
        found: list[Piece] = []
        for tensor in self._stage_tensors[pp]:
            if tensor.expert is not None and tensor.expert // self._local_experts != at.ep:
                continue
            for place in self._places(tensor):
                if place.pp == pp:
                    shard = 0 if place.slab.shards == 1 else at.etp if place.slab.expert else at.tp
                    found += self._place_pieces(tensor, place, shard)
        return found

    def holders(self, tensor: str) -> Sequence[Holder]:
        """See `Layout.holders`; costs as much as the tensor has pieces, whatever the number of ranks."""
        one = self.weights[tensor]
        places = self._places(one)
        found = [
            Holder(piece, self._shard_ranks(place, one, shard))
            for place in places
            for shard in range(place.slab.shards)
            for piece in self._place_pieces(one, place, shard)
        ]
        return _merged(found) if any(place.slab.repeats for place in places) else found

    def alike(self, tensor: Tensor) -> Hashable:
        """See `ClassedLayout.alike`: tensors of one role lie alike within a stage and an expert-parallel rank."""
        if tensor.layer is None:
            return tensor.role
        ep = None if tensor.expert is None else tensor.expert // self._local_experts
        return tensor.role, self._layer_homes[tensor.layer][0], self.weights.spec.is_moe_layer(tensor.layer), ep

    def _place_pieces(self, tensor: Tensor, place: _Place, shard: int) -> Iterator[Piece]:
        param = place.prefix + place.slab.name
        if tensor.expert is not None:
            param = param.replace("{expert}", str(tensor.expert % self._local_experts))
        lead = (tensor.expert % self._local_experts,) if tensor.expert is not None and self.engine_order else ()
        for box, offset in place.slab.cuts[tensor.role][shard]:
            yield Piece(tensor.name, box, param, lead + offset)

    def _places(self, tensor: Tensor) -> Sequence[_Place]:
        if tensor.layer is None:
            last = (self.sizes.pp - 1, self.vpp - 1)
            found = [((0, 0), self._outer_slabs.first), *((last, slab) for slab in self._outer_slabs.last)]
            return [_Place(pp, self._chunk(v), slab) for (pp, v), slab in found if tensor.role in slab.cuts]
        pp, prefix = self._layer_homes[tensor.layer]
        return [_Place(pp, prefix, self._slab_by_role[self.weights.spec.is_moe_layer(tensor.layer)][tensor.role])]

    def _stage_params(self, pp: int) -> Iterator[tuple[str, Slab]]:
        """Names and slabs of a stage's parameters, in module order."""
        if pp == 0:
            yield self._chunk(0) + self._outer_slabs.first.name, self._outer_slabs.first
        for layers in self.stages[pp]:
            for layer in layers:
                _, prefix = self._layer_homes[layer]
                for name, slab in self._expand(self._layer_slabs[self.weights.spec.is_moe_layer(layer)]):
                    yield prefix + name, slab
        if pp == self.sizes.pp - 1:
            for slab in self._outer_slabs.last:
                yield self._chunk(self.vpp - 1) + slab.name, slab

    def _expand(self, slabs: Sequence[Slab]) -> Iterator[tuple[str, Slab]]:
        """Gives each local expert its own name: by expert in the local spec, by projection in grouped experts."""
        if self.engine_order:
            yield from ((slab.name, slab) for slab in slabs)
            return
        experts = [slab for slab in slabs if slab.expert]
        if self.transformer_engine:
            pairs = [(slab, j) for slab in experts for j in range(self._local_experts)]
        else:
            pairs = [(slab, j) for j in range(self._local_experts) for slab in experts]
        for slab in slabs:
            if not slab.expert:
                yield slab.name, slab
            elif slab is experts[0]:
                yield from ((one.name.replace("{expert}", str(j)), one) for one, j in pairs)

    def _shard_ranks(self, place: _Place, tensor: Tensor, shard: int) -> tuple[int, ...]:
        if tensor.expert is not None:
            return self._expert_ranks[place.pp, tensor.expert // self._local_experts, shard]
        return self._dense_ranks[place.pp, shard if place.slab.shards > 1 else None]

    @cached_property
    def _dense_ranks(self) -> Mapping[tuple[int, int | None], tuple[int, ...]]:
        """Ranks by (stage, TP rank), and all of a stage under None."""
        sizes = self.sizes
        found: dict[tuple[int, int | None], tuple[int, ...]] = {}
        for pp in range(sizes.pp):
            stage = range(pp * sizes.stage, (pp + 1) * sizes.stage)
            found[pp, None] = tuple(stage)
            for tp in range(sizes.tp):
                found[pp, tp] = tuple(rank for rank in stage if sizes.coordinates(rank).tp == tp)
        return found

    @cached_property
    def _expert_ranks(self) -> Mapping[tuple[int, int, int], tuple[int, ...]]:
        """Ranks by (stage, EP rank, ETP rank)."""
        found: dict[tuple[int, int, int], list[int]] = {}
        for rank in self.ranks:
            at = self.sizes.coordinates(rank)
            found.setdefault((at.pp, at.ep, at.etp), []).append(rank)
        return {key: tuple(ranks) for key, ranks in found.items()}

    @cached_property
    def _stage_tensors(self) -> Sequence[Sequence[Tensor]]:
        """Tensors of each stage, in order."""
        stages: list[list[Tensor]] = [[] for _ in range(self.sizes.pp)]
        for tensor in self.weights:
            for pp in dict.fromkeys(place.pp for place in self._places(tensor)):
                stages[pp].append(tensor)
        return stages

    @cached_property
    def _layer_homes(self) -> Mapping[int, tuple[int, str]]:
        """By global layer: its stage, and what its parameters' names begin with."""
        return {
            layer: (pp, f"{self._chunk(v)}decoder.layers.{local}.")
            for pp, chunks in enumerate(self.stages)
            for v, layers in enumerate(chunks)
            for local, layer in enumerate(layers)
        }

    @cached_property
    def _slab_by_role(self) -> Mapping[bool, Mapping[Role, Slab]]:
        return {moe: {role: slab for slab in slabs for role in slab.roles} for moe, slabs in self._layer_slabs.items()}

    @property
    def _local_experts(self) -> int:
        moe = self.weights.spec.moe
        return moe.num_experts // self.sizes.ep if moe else 0

    def _chunk(self, v: int) -> str:
        return f"chunk{v}." if self.vpp > 1 else ""

    def _shape(self, slab: Slab) -> tuple[int, ...]:
        """Shape of a parameter on one rank."""
        return (self._local_experts, *slab.shape) if slab.expert and self.engine_order else slab.shape

    def _dtype(self, slab: Slab) -> str:
        spec: ModelSpec = self.weights.spec
        return slab.dtype or self.dtype or spec.dtypes.get(slab.roles[0], spec.dtype)

    def _stage_of(self, rank: int) -> int:
        if rank not in self.ranks:
            raise KeyError(f"rank {rank} is not in a training world of {self.sizes.world}")
        return rank // self.sizes.stage

    def _check_weights(self) -> None:
        """Every tensor has a place of exactly its shape: a role that is not known here must not vanish silently."""
        problems = []
        for kind, tensors in self.weights.kinds.items():
            if kind.moe is None:
                slabs = [] if kind.predicts else [self._outer_slabs.first, *self._outer_slabs.last]
            else:
                slabs = list(self._layer_slabs[kind.moe])
            slabs = [slab for slab in slabs if kind.role in slab.roles]
            wrong = [slab for slab in slabs if slab.whole_shape(kind.role) != kind.shape]
            found = [] if slabs else [f"({kind.role}) has no place"]
            for slab in wrong:
                expected = list(slab.whole_shape(kind.role))
                found.append(f"has shape {list(kind.shape)}, {slab.name} takes {expected}")
            problems += [f"{tensor.name} {problem}" for tensor in tensors for problem in found]
        if problems:
            more = f" and {len(problems) - 20} more" if len(problems) > 20 else ""
            raise ValueError(f"{self.weights.spec.family} in Megatron's layout: " + "; ".join(problems[:20]) + more)


def _merged(holders: Sequence[Holder]) -> list[Holder]:
    """One holder for each different piece, with the ranks of all."""
    ranks: dict[Piece, list[int]] = {}
    for holder in holders:
        ranks.setdefault(holder.piece, []).extend(holder.ranks)
    return [Holder(piece, tuple(sorted(own))) for piece, own in ranks.items()]
