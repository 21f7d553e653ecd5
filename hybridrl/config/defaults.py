"""Defaults that follow from other values, filled in where the user left None; nothing that was set is touched."""

from dataclasses import replace

from hybridrl.config.schema import Config


def resolve_defaults(config: Config) -> Config:
    """A copy in which every derived default is spelt out, so that the saved configuration shows what runs."""
    parallel, trainer, algorithm, model = config.parallel, config.trainer, config.algorithm, config.model
    if parallel.sequence_parallel is None:
        parallel = replace(parallel, sequence_parallel=parallel.tp > 1)
    if trainer.mini_batch_prompts is None:
        trainer = replace(trainer, mini_batch_prompts=trainer.prompts_per_step)
    if algorithm.aggregate_length is None:
        algorithm = replace(algorithm, aggregate_length=config.rollout.max_response_length)
    if algorithm.overlong.cache is not None and algorithm.overlong.max_length is None:
        overlong = replace(algorithm.overlong, max_length=config.rollout.max_response_length)
        algorithm = replace(algorithm, overlong=overlong)
    if algorithm.dynamic_sampling.enabled and algorithm.dynamic_sampling.generation_prompts is None:
        sampling = replace(algorithm.dynamic_sampling, generation_prompts=trainer.prompts_per_step)
        algorithm = replace(algorithm, dynamic_sampling=sampling)
    if model.tokenizer is None:
        model = replace(model, tokenizer=model.path)
    return replace(config, parallel=parallel, trainer=trainer, algorithm=algorithm, model=model)
