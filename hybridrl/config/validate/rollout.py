"""Generation: the engine's sizes, and sampling that the trainer can account for."""

from collections.abc import Iterator

from hybridrl.config.kinds import is_supervised
from hybridrl.config.schema import Config
from hybridrl.config.validate.model import Model, head_problems
from hybridrl.config.validate.served import served_problems
from hybridrl.config.validate.sglang import sglang_problems


def rollout_problems(config: Config, world: int, spec: Model | None) -> Iterator[str]:
    """Mistakes in `rollout`; none for supervised training, which generates nothing."""
    if is_supervised(config):
        return
    yield from _sizes(config, world)
    yield from _sampling(config)
    if config.rollout.routed_experts and spec is not None and spec.moe is None:
        yield "rollout.routed_experts=true, but the model has no experts; set rollout.routed_experts=false"
    if config.algorithm.routing_replay != "none" and spec is not None and spec.moe is None:
        yield (
            f"algorithm.routing_replay={config.algorithm.routing_replay}, but the model has no experts; set "
            "algorithm.routing_replay=none"
        )
    if config.rollout.engine == "sglang":
        yield from sglang_problems(config)
        if spec is not None:
            yield from _engine_model(config, spec)
            yield from served_problems(config, spec)


def _sizes(config: Config, world: int) -> Iterator[str]:
    rollout = config.rollout
    if rollout.engine == "transformers":
        for key in ("tp", "dp", "ep"):
            if (size := getattr(rollout, key)) > 1:
                yield (
                    f"rollout.{key}={size}: rollout.engine=transformers runs whole models on single ranks; set "
                    f"rollout.{key}=1, or rollout.engine=sglang"
                )
        if config.reshard.placement != "identity":
            yield (
                f"reshard.placement={config.reshard.placement}: rollout.engine=transformers has a whole model on each "
                "rank, so there is nothing to place; set reshard.placement=identity"
            )
    if world % rollout.tp:
        yield f"rollout.tp={rollout.tp} does not divide the world={world}: each replica of the engine takes tp ranks"
    for key, what in (("dp", "attention replicas"), ("ep", "groups of experts")):
        if rollout.tp % (size := getattr(rollout, key)):
            yield f"rollout.{key}={size} does not divide rollout.tp={rollout.tp}: {what} share a replica's ranks"


def _sampling(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if rollout.temperature == 0:
        yield (
            "rollout.temperature=0: training needs samples, and their log-probs are taken at this temperature; set it "
            "over 0 (1.0 samples the model itself)"
        )
    negative = [token for token in rollout.stop_token_ids if token < 0]
    if negative:
        yield f"rollout.stop_token_ids={rollout.stop_token_ids} holds {negative}: token ids are 0 or more"
    if "" in rollout.stop:
        yield f"rollout.stop={rollout.stop}: an empty string would end every response at its first token; leave it out"
    broken = [text for text in rollout.stop if "\ufffd" in text]
    if broken:
        yield f"rollout.stop={rollout.stop}: {broken} hold U+FFFD, which stands for bytes that are no character"
    for key, neutral in (("top_p", 1.0), ("top_k", 0)):
        if (value := getattr(rollout, key)) != neutral:
            yield (
                f"rollout.{key}={value}: the engine would sample a cut and renormalised distribution, whose log-probs "
                f"the trainer's do not match, so every ratio would be off; set rollout.{key}={neutral}"
            )


def _engine_model(config: Config, spec: Model) -> Iterator[str]:
    rollout, scaling = config.rollout, spec.rope_scaling or {}
    if scaling.get("attention_factor") is not None:
        yield (
            "rollout.engine=sglang: the model scales its positions with attention_factor="
            f"{scaling['attention_factor']}, which SGLang does not read; leave it out of the "
            "model's config.json, or set rollout.engine=transformers"
        )
    if rollout.tp % rollout.dp == 0:
        key = "rollout.tp" if rollout.dp == 1 else f"rollout.tp={rollout.tp} / rollout.dp={rollout.dp}"
        yield from head_problems(key, rollout.tp // rollout.dp, spec)
    if spec.moe is None:
        if rollout.ep > 1:
            yield f"rollout.ep={rollout.ep}, but the model has no experts; set rollout.ep=1"
        return
    if spec.moe.num_experts % rollout.ep:
        yield f"rollout.ep={rollout.ep} does not divide the model's {spec.moe.num_experts} experts"
    if rollout.tp % rollout.ep == 0 and spec.moe.ffn_size % (rollout.tp // rollout.ep):
        yield (
            f"rollout.tp={rollout.tp} / rollout.ep={rollout.ep} does not divide the experts' intermediate size of "
            f"{spec.moe.ffn_size}"
        )
