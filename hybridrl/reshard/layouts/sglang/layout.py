"""SGLang's layout: which rank of which replica holds which box of which tensor, in the engine's own parameters."""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from hybridrl.models.weights import Box, Param, Piece, Role, Tensor, WeightMap
from hybridrl.reshard.layout import Holder
from hybridrl.reshard.layouts.sglang import slabs
from hybridrl.reshard.layouts.sglang.sizes import RolloutSizes
from hybridrl.reshard.layouts.sglang.slabs import AS_EXPERT, Axis, Stored
from hybridrl.reshard.layouts.slabs import Cut, Slab

DRAFT = "draft."
_PREDICTION_ROLES = frozenset({Role.MTP_EMBED_NORM, Role.MTP_HIDDEN_NORM, Role.MTP_PROJ, Role.MTP_HEAD_NORM})


class _Place(NamedTuple):
    """One parameter that holds a tensor: as which role, and on which of its local experts."""

    name: str
    stored: Stored
    role: Role
    ep: int | None
    """Expert-parallel rank that it lies on; None for all."""
    local: int
    """Index in the stack of experts."""


class SGLangLayout:
    """Where each rank keeps which box of which tensor.

    Args:
        weights: the model's tensors. With prediction layers among them and `mtp`, the engine's draft model is laid out
            too, its parameters named `draft.…`; else they are `omitted`.
        sizes: the engine's.
        ranks: world rank of each slot; slot `i` is rank `i mod tp` of replica `i div tp`. None takes `0 … world-1`.
        fused_shared: `num_fused_shared_experts`: 1 puts the only shared expert into the stack of experts.
        dtype: the engine's dtype; None keeps each tensor's own. Correction biases, and GLM's router, are float32.

    Raises ValueError with every reason why the engine cannot hold the model.
    """

    def __init__(
        self,
        weights: WeightMap,
        sizes: RolloutSizes,
        *,
        ranks: Sequence[int] | None = None,
        mtp: bool = False,
        fused_shared: int = 0,
        dtype: str | None = None,
    ) -> None:
        spec = weights.spec
        self.weights = weights
        self.sizes = sizes
        self.slots: tuple[int, ...] = tuple(range(sizes.world) if ranks is None else ranks)
        self.ranks: Sequence[int] = tuple(sorted(self.slots))
        self.mtp = mtp
        self.fused_shared = fused_shared
        self.dtype = dtype
        found = slabs.problems(spec, sizes, fused_shared)
        if len(set(self.slots)) != sizes.world or len(self.slots) != sizes.world:
            found.append(f"ranks are {len(set(self.slots))} different ones in {len(self.slots)} slots of {sizes.world}")
        if mtp and spec.mtp_layers != 1:
            found.append(f"mtp with {spec.mtp_layers} prediction layers: the engine's draft model has one")
        if found:
            raise ValueError(f"{spec.family} does not fit SGLang's layout: " + "; ".join(found))
        self._slot_of = {rank: slot for slot, rank in enumerate(self.slots)}
        kinds = {spec.is_moe_layer(i) for i in range(spec.num_layers)} | {spec.moe is not None and mtp}
        self._layer = {kind: slabs.layer(spec, sizes, moe=kind, fused_shared=fused_shared) for kind in kinds}
        self._embedding, self._head = slabs.embedding(spec, sizes), slabs.head(spec, sizes)
        self._norm = Stored(slabs.whole("model.norm.weight", Role.FINAL_NORM, (spec.hidden_size,)), Axis.WHOLE)
        self._prediction = slabs.prediction(spec) if mtp else []
        self._rank_cache: dict[tuple[Axis, int | None], list[tuple[int, ...]]] = {}
        self._piece_cache: dict[int, tuple[Piece, ...]] = {}
        self._cut_cache: dict[tuple[str, Role], list[tuple[Cut, list[int]]]] = {}
        self._check_weights()

    zero_padding = True
    """Padding is written by no rank but as zero, and never trained."""

    def with_ranks(self, ranks: Sequence[int]) -> "SGLangLayout":
        """The same layout with other ranks in its slots."""
        options = {"mtp": self.mtp, "fused_shared": self.fused_shared}
        return SGLangLayout(self.weights, self.sizes, ranks=ranks, dtype=self.dtype, **options)  # type: ignore[arg-type]

    @cached_property
    def omitted(self) -> frozenset[str]:
        """Tensors that the engine does without: prediction layers where there is no draft model, and in any case
        their own names of the embedding and the head, which the draft model shares with the main one."""
        shared = (Role.MTP_EMBED, Role.MTP_HEAD)
        kinds = (kind for kind in self.weights.kinds if kind.predicts and (not self.mtp or kind.role in shared))
        return frozenset(tensor.name for kind in kinds for tensor in self.weights.kinds[kind])

    def params(self, rank: int) -> Mapping[str, Param]:
        """See `Layout.params`; they are the same on all ranks."""
        self._slot(rank)
        return self._params

    @cached_property
    def _params(self) -> Mapping[str, Param]:
        found = (Param(name, stored.shape, self._dtype(stored)) for name, stored in self._stored)
        return {param.name: param for param in found}

    def pieces(self, rank: int) -> Sequence[Piece]:
        """See `Layout.pieces`; replicas have the same."""
        at = self._slot(rank) % self.sizes.tp
        if at not in self._piece_cache:
            self._piece_cache[at] = tuple(self._pieces(at, self.sizes.moe_ep_rank(at)))
        return self._piece_cache[at]

    def _pieces(self, at: int, ep: int) -> Iterator[Piece]:
        for tensor in self.weights:
            if tensor.expert is None or tensor.expert // self._local_experts == ep:
                for place in self._places(tensor):
                    yield from _cut(tensor, place, self._shard(place.stored, at))

    def holders(self, tensor: str) -> Sequence[Holder]:
        """See `Layout.holders`."""
        one = self.weights[tensor]
        found = []
        for place in self._places(one):
            ranks = self._ranks(place.stored.axis, place.stored.slab.shards, place.ep)
            lead = (place.local,) if place.stored.stack else ()
            for cut, shards in self._cuts(place.stored.slab, place.role):
                own = ranks[shards[0]] if len(shards) == 1 else tuple(sorted(r for s in shards for r in ranks[s]))
                found.append(Holder(Piece(tensor, cut.box, place.name, lead + cut.offset), own))
        return found

    def _cuts(self, slab: Slab, role: Role) -> list[tuple[Cut, list[int]]]:
        """Each different cut of a role, with the shards that have it (key and value heads may be on several)."""
        key = slab.name, role
        if key not in self._cut_cache:
            by_cut: dict[Cut, list[int]] = defaultdict(list)
            for shard, cuts in enumerate(slab.cuts[role]):
                for cut in cuts:
                    by_cut[cut].append(shard)
            self._cut_cache[key] = list(by_cut.items())
        return self._cut_cache[key]

    def alike(self, tensor: Tensor) -> Hashable:
        """See `ClassedLayout.alike`."""
        if tensor.layer is None:
            return tensor.role
        ep = None if tensor.expert is None else tensor.expert // self._local_experts
        return tensor.role, self._is_moe(tensor.layer), ep, tensor.name in self.omitted

    def _slot(self, rank: int) -> int:
        if rank not in self._slot_of:
            raise KeyError(f"rank {rank} is not among the {len(self.slots)} ranks of the engine")
        return self._slot_of[rank]

    def _shard(self, stored: Stored, tp_rank: int) -> int:
        """The shard that a rank of a replica holds."""
        sizes = {Axis.WHOLE: 1, Axis.TP: self.sizes.tp, Axis.ATTENTION: self.sizes.attention_tp}
        return tp_rank % sizes.get(stored.axis, self.sizes.moe_tp)

    def _ranks(self, axis: Axis, shards: int, ep: int | None) -> list[tuple[int, ...]]:
        """World ranks by shard, those of one expert-parallel rank or all."""
        if (axis, ep) not in self._rank_cache:
            found: list[list[int]] = [[] for _ in range(shards)]
            probe = Stored(self._norm.slab, axis)
            for slot, rank in enumerate(self.slots):
                at = slot % self.sizes.tp
                if ep is None or self.sizes.moe_ep_rank(at) == ep:
                    found[self._shard(probe, at)].append(rank)
            self._rank_cache[axis, ep] = [tuple(sorted(ranks)) for ranks in found]
        return self._rank_cache[axis, ep]

    def _places(self, tensor: Tensor) -> list[_Place]:
        """Parameters that hold the tensor."""
        if tensor.layer is None:
            outer = (self._embedding, self._norm, self._head)
            return [_Place(s.slab.name, s, tensor.role, None, 0) for s in outer if s and tensor.role in s.slab.cuts]
        if tensor.name in self.omitted:
            return []
        prefix = self._prefix(tensor.layer)
        role, local, ep = tensor.role, 0, None
        if tensor.expert is not None:
            ep, local = divmod(tensor.expert, self._local_experts)
        elif self.fused_shared and role in AS_EXPERT:
            role, local = AS_EXPERT[role], self._local_experts
        stored = self._roles[self._is_moe(tensor.layer)][role]
        if role in _PREDICTION_ROLES:
            prefix = f"{DRAFT}model."
        return [_Place(prefix + stored.slab.name, stored, role, ep, local)]

    @cached_property
    def _roles(self) -> Mapping[bool, Mapping[Role, Stored]]:
        """What holds each role, in layers without experts and with them; those of the draft model among the latter."""
        return {
            moe: {role: s for s in (*stored, *(self._prediction if moe else ())) for role in s.slab.roles}
            for moe, stored in self._layer.items()
        }

    def _is_moe(self, layer: int) -> bool:
        spec = self.weights.spec
        return spec.is_moe_layer(layer) if layer < spec.num_layers else spec.moe is not None

    def _prefix(self, layer: int) -> str:
        main = layer < self.weights.spec.num_layers
        return f"model.layers.{layer}." if main else f"{DRAFT}model.decoder."

    @property
    def _local_experts(self) -> int:
        moe = self.weights.spec.moe
        return moe.num_experts // self.sizes.ep if moe else 0

    @cached_property
    def _stored(self) -> list[tuple[str, Stored]]:
        """Names and parameters of every rank, in module order."""
        spec = self.weights.spec
        found = [(self._embedding.slab.name, self._embedding)]
        for layer in range(spec.num_layers):
            found += [(self._prefix(layer) + s.slab.name, s) for s in self._layer[spec.is_moe_layer(layer)]]
        found += [(s.slab.name, s) for s in (self._norm, self._head) if s]
        if self.mtp:
            found += [(f"{DRAFT}model.{s.slab.name}", s) for s in self._prediction]
            found += [(f"{DRAFT}model.decoder.{s.slab.name}", s) for s in self._layer[spec.moe is not None]]
        return found

    def _dtype(self, stored: Stored) -> str:
        spec = self.weights.spec
        return stored.slab.dtype or self.dtype or spec.dtypes.get(stored.slab.roles[0], spec.dtype)

    def _misplaced(self, tensor: Tensor) -> list[str]:
        """What is wrong with a tensor's places."""
        if tensor.layer is not None and tensor.role not in (*self._roles[self._is_moe(tensor.layer)], *AS_EXPERT):
            return [f"({tensor.role}) has no place"]
        places = [(place.name, _tensor_shape(place)) for place in self._places(tensor)]
        if not places:
            return [f"({tensor.role}) has no place"]
        return [
            f"has shape {list(tensor.shape)}, {name} takes {list(shape)}"
            for name, shape in places
            if shape != tensor.shape
        ]

    def _check_weights(self) -> None:
        """Every tensor has a place of its shape: a role that is not known here must not vanish silently."""
        wrong = []
        for tensors in self.weights.kinds.values():
            if tensors[0].name not in self.omitted:
                problems = self._misplaced(tensors[0])  # the others of its kind lie alike, and are omitted alike
                wrong += [f"{tensor.name} {problem}" for tensor in tensors for problem in problems]
        if wrong:
            more = f" and {len(wrong) - 20} more" if len(wrong) > 20 else ""
            raise ValueError(f"{self.weights.spec.family} in SGLang's layout: " + "; ".join(wrong[:20]) + more)


def _cut(tensor: Tensor, place: _Place, shard: int) -> Iterator[Piece]:
    """The tensor's pieces in one shard of a parameter."""
    lead = (place.local,) if place.stored.stack else ()
    for box, offset in place.stored.slab.cuts[place.role][shard]:
        yield Piece(tensor.name, box, place.name, lead + offset)


def _tensor_shape(place: _Place) -> tuple[int, ...]:
    """Shape that the tensor of a place must have: up to where its last box ends."""
    boxes: list[Box] = [box for shard in place.stored.slab.cuts[place.role] for box, _ in shard]
    return tuple(max(stops) for stops in zip(*(box.stop for box in boxes), strict=True))
