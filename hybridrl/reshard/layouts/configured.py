"""The training layout that a configuration asks for, the same to the trainer and to the dry run."""

from hybridrl.config.schema import Config
from hybridrl.models.weights import WeightMap
from hybridrl.parallel.sizes import ParallelSizes
from hybridrl.reshard.layouts.megatron import MegatronLayout


def configured_layout(
    config: Config, weights: WeightMap, sizes: ParallelSizes, *, transformer_engine: bool
) -> MegatronLayout:
    """Where each rank of this training world keeps which weights; raises as `MegatronLayout` does."""
    parallel = config.parallel
    return MegatronLayout(
        weights,
        sizes,
        vpp=parallel.vpp,
        first_stage_layers=parallel.first_stage_layers,
        last_stage_layers=parallel.last_stage_layers,
        vocab_multiple=config.model.vocab_multiple,
        transformer_engine=transformer_engine,
        engine_order=config.model.parameter_layout == "engine",
        dtype=config.model.dtype,
    )
