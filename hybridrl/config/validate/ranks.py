"""The ranks: the stated hardware, the sizes of the training world, and what Megatron refuses or gets wrong."""

from collections.abc import Iterator

from hybridrl.config.schema import Config
from hybridrl.config.validate.model import Model
from hybridrl.parallel.sizes import ParallelSizes


def rank_problems(config: Config, world: int | None, local_world: int | None, spec: Model | None) -> Iterator[str]:
    """Mistakes in `parallel` and in the number of ranks."""
    yield from _hardware(config, world, local_world)
    yield from _sizes(config)
    yield from _pipeline(config)
    yield from _sequence(config, spec)


def _hardware(config: Config, world: int | None, local_world: int | None) -> Iterator[str]:
    nodes, ranks = config.trainer.nodes, config.trainer.ranks_per_node
    if world is not None and world != nodes * ranks:
        launcher = f"--nproc-per-node {ranks}" if nodes == 1 else f"--nnodes {nodes} --nproc-per-node {ranks}"
        yield (
            f"trainer.nodes={nodes} · trainer.ranks_per_node={ranks} = {nodes * ranks} ranks, but world={world} was "
            f"started: start by `torchrun {launcher} -m hybridrl.train …`, or state the ranks that there are"
        )
    elif local_world is not None and local_world != ranks:
        yield f"trainer.ranks_per_node={ranks}, but {local_world} ranks were started on this node"


def _sizes(config: Config) -> Iterator[str]:
    parallel, trainer = config.parallel, config.trainer
    world = trainer.nodes * trainer.ranks_per_node
    sizes = {k: getattr(parallel, k) for k in ("tp", "cp", "pp", "ep", "etp")}
    try:
        ParallelSizes(world=world, **sizes)
    except ValueError as error:
        keys = ", ".join(f"parallel.{k}={v}" for k, v in sizes.items())
        yield (
            f"{error} (world = trainer.nodes={trainer.nodes} · trainer.ranks_per_node={trainer.ranks_per_node}; "
            f"{keys}; each defaults to 1)"
        )


def _pipeline(config: Config) -> Iterator[str]:
    parallel = config.parallel
    if parallel.pp > 1:
        return
    if parallel.vpp > 1:
        yield f"parallel.vpp={parallel.vpp} interleaves the chunks of pipeline stages, but parallel.pp=1: set pp over 1"
    for key in ("first_stage_layers", "last_stage_layers"):
        if (layers := getattr(parallel, key)) is not None:
            yield f"parallel.{key}={layers}, but there are no stages: parallel.pp=1; leave it null"


def _sequence(config: Config, spec: Model | None) -> Iterator[str]:
    parallel = config.parallel
    moe = parallel.ep > 1 or (spec is not None and spec.moe is not None)
    if parallel.sequence_parallel is True and parallel.tp == 1:
        yield "parallel.sequence_parallel=true needs tensor parallelism, but parallel.tp=1"
    if parallel.sequence_parallel is False and parallel.tp > 1 and moe:
        yield (
            f"parallel.sequence_parallel=false with parallel.tp={parallel.tp} on a model with experts: Megatron trains "
            "experts under tensor parallelism only with sequence parallelism; leave it null or set it true"
        )
    megatron_experts = spec is not None and spec.moe is not None and config.model.parameter_layout == "megatron"
    if megatron_experts and parallel.ep == 1 and parallel.etp != parallel.tp:
        yield (
            f"parallel.etp={parallel.etp} with parallel.tp={parallel.tp} and parallel.ep=1: Megatron's experts would "
            "train silently wrong, since gradients of the expert replicas are not summed over the tensor-parallel "
            f"ranks; set model.parameter_layout=engine, parallel.etp={parallel.tp}, or parallel.ep over 1"
        )
