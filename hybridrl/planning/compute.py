"""Seconds of a step by phase: training by floating-point operations and collectives, decoding by memory bandwidth."""

from dataclasses import dataclass

from hybridrl.config.schema import Config
from hybridrl.models.weights import ITEM_BYTES, WeightMap
from hybridrl.planning.activations import micro_batches
from hybridrl.planning.cache import KvCache, wanted_sequences
from hybridrl.planning.communication import communication_seconds
from hybridrl.planning.hardware import Hardware
from hybridrl.planning.layouts import Layouts
from hybridrl.planning.work import parameters_met


@dataclass(frozen=True, kw_only=True)
class Work:
    """Floating-point operations of a forward pass."""

    token: float
    """Of one token, attention apart: twice the weights that it meets."""
    pair: float
    """Of one token for each earlier token that it attends to, all layers."""

    def forward(self, tokens: float, context: float) -> float:
        """Of so many tokens that each see `context` tokens on average."""
        return tokens * (self.token + self.pair * context)


def work_of(weights: WeightMap) -> Work:
    """Each token meets all dense weights, its head, and `top_k` of the experts; the embedding is looked up."""
    spec = weights.spec
    dense, experts = parameters_met(weights)
    if spec.tied:
        dense += spec.vocab_size * spec.hidden_size
    chosen = spec.moe.top_k / spec.moe.num_experts if spec.moe else 0.0
    width = spec.head_dim * 2
    if spec.mla is not None:
        width = spec.mla.qk_nope_head_dim + spec.mla.qk_rope_head_dim + spec.mla.v_head_dim
    return Work(token=2 * (dense + experts * chosen), pair=2.0 * spec.num_layers * spec.num_heads * width)


@dataclass(frozen=True, kw_only=True)
class StepSeconds:
    """A step, phase by phase; rewards are judged on CPUs and are not reckoned."""

    prefill: float
    decode: float
    logprob: float
    update: float
    communication: float
    """Collectives of `logprob` and `update`, which count operations alone."""
    switches: float

    @property
    def total(self) -> float:
        return self.prefill + self.decode + self.logprob + self.update + self.communication + self.switches


def step_seconds(
    config: Config, layouts: Layouts, hardware: Hardware, cache: KvCache | None, switches: float
) -> StepSeconds:
    """The estimate; `cache` is None where nothing is generated."""
    work = work_of(layouts.weights)
    rollout, trainer = config.rollout, config.trainer
    response = config.plan.mean_response_length or rollout.max_response_length
    length = rollout.max_prompt_length + response
    samples = trainer.prompts_per_step * (rollout.n if cache else 1)
    forward = work.forward(samples * length, length / 2)
    peak = layouts.world * hardware.bf16_tflops * 1e12
    training = forward / (peak * hardware.training_efficiency) / _pipeline_share(config)
    # Backward is two forwards; full recomputation runs each layer's forward once more.
    passes = 3 + (config.model.recompute == "full")
    update = trainer.update_epochs * passes * training
    scored = (config.algorithm.old_log_probs == "trainer") + (config.algorithm.kl.where != "none") if cache else 0
    sent = communication_seconds(
        config, layouts.weights, layouts.sizes, hardware, tokens=samples * length, forwards=scored
    )
    if cache is None:
        return StepSeconds(prefill=0.0, decode=0.0, logprob=0.0, update=update, communication=sent, switches=switches)
    prompts = work.forward(trainer.prompts_per_step * rollout.max_prompt_length, rollout.max_prompt_length / 2)
    return StepSeconds(
        prefill=prompts / (peak * hardware.prefill_efficiency),
        decode=_decode(config, layouts, hardware, work, cache, response),
        logprob=scored * training,
        update=update,
        communication=sent,
        switches=switches,
    )


def _pipeline_share(config: Config) -> float:
    """Share of the time that a pipeline stage works: m·v of m·v + p - 1 slots (Narayanan et al. 2021, section 2.2)."""
    slots = micro_batches(config) * config.parallel.vpp
    return slots / (slots + config.parallel.pp - 1)


def _decode(config: Config, layouts: Layouts, hardware: Hardware, work: Work, cache: KvCache, response: float) -> float:
    """Waves of sequences, each of as many decode steps as a response has tokens, bound by the slowest resource."""
    spec, sizes, rollout = layouts.spec, layouts.engine_sizes, config.rollout
    replicas = layouts.world // sizes.tp
    share = -(-config.trainer.prompts_per_step * rollout.n // replicas)
    together = max(1, min(wanted_sequences(config, replicas), cache.sequences or 1))
    context = rollout.max_prompt_length + response / 2
    read = weight_bytes(layouts, together) + together / sizes.dp * context * cache.token_bytes
    bandwidth = hardware.link.device_gb_per_s * 1e9 * hardware.decode_efficiency
    arithmetic = (
        work.forward(together, context) / sizes.tp / (hardware.bf16_tflops * 1e12 * hardware.prefill_efficiency)
    )
    overhead = spec.num_layers * hardware.decode_layer_us / 1e6
    waves = share / together
    return waves * response * (max(read / bandwidth, arithmetic) + overhead)


def weight_bytes(layouts: Layouts, sequences: int) -> float:
    """Weights that one rank reads in a decode step: its dense shard, and those of its experts that any token meets."""
    sizes, spec = layouts.engine_sizes, layouts.spec
    item = ITEM_BYTES[layouts.config.model.dtype]
    dense, experts = parameters_met(layouts.weights)
    if spec.moe is None:
        return dense * item / sizes.tp
    met = 1 - (1 - spec.moe.top_k / spec.moe.num_experts) ** sequences
    return item * (dense / sizes.attention_tp + experts * met / sizes.tp)
