"""The layouts that a configuration makes, for any machine: the dry run's twin of what training builds on its ranks."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from hybridrl.config.schema import Config
from hybridrl.models.families import weight_map
from hybridrl.models.spec import ModelSpec
from hybridrl.models.weights import WeightMap
from hybridrl.parallel.sizes import ParallelSizes
from hybridrl.reshard.layout import Layout
from hybridrl.reshard.layouts.configured import configured_layout
from hybridrl.reshard.layouts.megatron import MegatronLayout
from hybridrl.reshard.layouts.sglang import RolloutSizes, SGLangLayout, argued_sizes
from hybridrl.reshard.layouts.transformers import TransformersLayout


@dataclass(frozen=True)
class Layouts:
    """Both sides of a recipe's weights. Raises ValueError, from `training` and `rollout`, for sizes that cannot hold
    the model."""

    config: Config
    weights: WeightMap
    """The tensors that are trained; see `trained_weights`."""
    transformer_engine: bool
    """Whether Transformer Engine's modules are trained (on GPUs), whose parameters have other names."""

    @property
    def spec(self) -> ModelSpec:
        return self.weights.spec

    @property
    def world(self) -> int:
        return self.config.trainer.nodes * self.config.trainer.ranks_per_node

    @cached_property
    def sizes(self) -> ParallelSizes:
        """The training world."""
        p = self.config.parallel
        return ParallelSizes(world=self.world, tp=p.tp, cp=p.cp, pp=p.pp, ep=p.ep, etp=p.etp)

    @cached_property
    def training(self) -> MegatronLayout:
        return configured_layout(self.config, self.weights, self.sizes, transformer_engine=self.transformer_engine)

    @cached_property
    def engine_sizes(self) -> RolloutSizes:
        """The rollout's sizes; one whole model a rank for the embedded engine."""
        rollout = self.config.rollout
        if rollout.engine == "transformers":
            return RolloutSizes(world=self.world)
        argued = argued_sizes(rollout.sglang.server_args)
        return RolloutSizes(world=self.world, tp=rollout.tp, dp=rollout.dp, ep=rollout.ep, **argued)

    @cached_property
    def rollout(self) -> Layout:
        if self.config.rollout.engine == "transformers":
            return TransformersLayout(self.weights, range(self.world), dtype=self.config.model.dtype)
        return SGLangLayout(self.weights, self.engine_sizes)

    def stage_ranks(self) -> Iterator[int]:
        """One rank of each pipeline stage; the others of a stage hold as much."""
        return (self.sizes.rank(pp=stage) for stage in range(self.sizes.pp))


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Numbers of elements that a rank trains, by what they are sharded over."""

    dense: int
    expert: int
    buffers_nbytes: int
    """Bytes of what is loaded and saved but has no gradient."""
    nbytes: int
    """Bytes of all parameters and buffers."""


def trained_weights(spec: ModelSpec, config: Config) -> WeightMap:
    """The model's tensors in the dtype of the run, without prediction layers, which are not trained."""
    return weight_map(replace(spec, mtp_layers=0, dtype=config.model.dtype))


def is_expert(param: str) -> bool:
    """Whether a parameter of the training layout is sharded as experts are."""
    return ".experts." in param


def training_shard(layouts: Layouts, rank: int) -> Shard:
    """What a rank of the training world holds."""
    params = layouts.training.params(rank)
    experts = {name for name in params if is_expert(name)}
    untrained = {name for name in params if name.endswith(".expert_bias")}
    return Shard(
        dense=sum(p.size for name, p in params.items() if name not in untrained and name not in experts),
        expert=sum(params[name].size for name in experts),
        buffers_nbytes=sum(params[name].nbytes for name in untrained),
        nbytes=sum(p.nbytes for p in params.values()),
    )
