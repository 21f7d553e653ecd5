"""Batch sizes by groups, updates, ranks and tokens."""

from collections.abc import Iterator
from math import ceil

from hybridrl.config.batch import BatchArithmetic, batch_arithmetic
from hybridrl.config.kinds import learns_from_pairs
from hybridrl.config.schema import Config


def batch_problems(config: Config, world: int) -> Iterator[str]:
    """Mistakes in the batch sizes; the derived table follows the last one."""
    yield from _tokens(config)
    parallel = config.parallel
    if world % (parallel.tp * parallel.cp * parallel.pp):
        return  # no data-parallel size to reckon with; that is reported elsewhere
    batch = batch_arithmetic(config, world)
    found = [*_divisions(config, batch), *_micro_batches(config, batch)]
    if found:
        yield from found[:-1]
        yield f"{found[-1]}\n{batch}"


def _divisions(config: Config, batch: BatchArithmetic) -> Iterator[str]:
    yield from batch.problems
    warm = config.warm_start
    if warm.steps and warm.batch_size % batch.dp:
        yield f"warm_start.batch_size={warm.batch_size} is not a multiple of the {batch.dp} data-parallel ranks"
    data, prompts = config.data, config.trainer.prompts_per_step
    if data.source == "reasoning_gym" and data.size < prompts:
        yield f"data.size={data.size} problems do not fill one step of trainer.prompts_per_step={prompts}"


def _micro_batches(config: Config, batch: BatchArithmetic) -> Iterator[str]:
    micro, parallel = config.trainer.micro_batch_size, config.parallel
    if micro is None:
        return
    if micro < 2 and learns_from_pairs(config):
        yield f"trainer.micro_batch_size={micro} cannot hold the two sequences of a pair; set 2 or more"
    if micro > batch.samples_per_rank:
        yield (
            f"trainer.micro_batch_size={micro} is more than the {batch.samples_per_rank} samples that a rank has in "
            "an update"
        )
    elif parallel.vpp > 1 and (count := ceil(batch.samples_per_rank / micro)) % parallel.pp:
        yield (
            f"parallel.vpp={parallel.vpp} needs micro-batches in multiples of parallel.pp={parallel.pp}, but "
            f"trainer.micro_batch_size={micro} makes {count} of {batch.samples_per_rank} samples"
        )


def _tokens(config: Config) -> Iterator[str]:
    rollout, trainer, parallel = config.rollout, config.trainer, config.parallel
    longest = rollout.max_prompt_length + rollout.max_response_length
    together = 2 if learns_from_pairs(config) else 1  # a pair's two sequences share a micro-batch
    # Sequence parallelism cuts a row into TP parts, context parallelism into two a rank.
    multiple = parallel.tp * (2 * parallel.cp if parallel.cp > 1 else 1)
    padded = ceil(longest / multiple) * multiple
    budget = trainer.max_tokens_per_micro_batch * parallel.cp
    what = "a pair" if together > 1 else "one sample"
    if together * padded > budget:
        yield (
            f"trainer.max_tokens_per_micro_batch={trainer.max_tokens_per_micro_batch} · parallel.cp={parallel.cp} = "
            f"{budget} tokens cannot hold {what} of rollout.max_prompt_length={rollout.max_prompt_length} + "
            f"rollout.max_response_length={rollout.max_response_length} = {longest} (padded to {padded})"
        )
