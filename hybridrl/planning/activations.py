"""What a forward pass keeps for the backward pass, in bytes of one rank.

Counted tensor by tensor as the modules save them, in the manner of Korthikanti et al. 2022 (Reducing Activation
Recomputation in Large Transformer Models, section 4), for attention that keeps no scores. Layers of Transformer Engine
fuse what Megatron's local ones keep apart. Experts are reckoned as evenly loaded, times `IMBALANCE`.
"""

from dataclasses import dataclass
from math import ceil

from hybridrl.config.kinds import samples_per_row
from hybridrl.config.schema import Config
from hybridrl.models.spec import MlaSpec, ModelSpec
from hybridrl.models.weights import ITEM_BYTES
from hybridrl.parallel.stages import stage_layers

IMBALANCE = 1.2
"""Tokens of the busiest expert-parallel rank over the mean, an assumption for models of many experts."""
FP32 = 4


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Bytes of one rank while it trains a micro-batch of the stated tokens."""

    layers: int
    """Kept by the decoder layers, over all micro-batches in flight."""
    working: int
    """Rebuilt or used within one layer, while the loss is not taken."""
    head: int
    """Final norm and logits; the last stage's."""
    loss: int
    """The gradient of the logits, and chunks of them in float32; the last stage's."""

    @property
    def total(self) -> int:
        """At the fullest moment: while the loss is taken, or while a layer is rebuilt, when logits have gone."""
        return self.layers + max(self.working, self.head + self.loss)

    @property
    def saved(self) -> int:
        """Held for the backward pass at the fullest moment, without what exists in passing."""
        return self.layers + max(self.working, self.head)


def activations(config: Config, spec: ModelSpec, stage: int, *, fused: bool, backward: bool = True) -> Activations:
    """Of a rank of pipeline stage `stage`, with `fused` modules (Transformer Engine) or the local ones.

    A pass without `backward` keeps what one layer needs and the logits.
    """
    parallel = config.parallel
    tokens = config.trainer.max_tokens_per_micro_batch
    stages = stage_layers(
        spec.num_layers, parallel.pp, parallel.vpp, parallel.first_stage_layers, parallel.last_stage_layers
    )
    one = _Layer(config, spec, tokens, fused)
    costs = [[one.nbytes(layer) for layer in chunk] for chunk in stages[stage]]
    largest = max(max(chunk) for chunk in costs)
    last = stage == parallel.pp - 1
    head, loss = _head(config, spec, one, backward) if last else (0, 0)
    if not backward:
        return Activations(layers=0, working=largest, head=head, loss=loss)
    flying = _in_flight(config, stage, stages)
    kept = costs if config.model.recompute != "full" else [[one.boundary] * len(chunk) for chunk in costs]
    # Chunks are alike but for dense layers; the fullest stands for each in flight.
    layers = max(map(sum, kept)) * flying if parallel.vpp > 1 else sum(kept[0]) * flying
    return Activations(layers=layers, working=largest if config.model.recompute == "full" else 0, head=head, loss=loss)


def _in_flight(config: Config, stage: int, stages: list[list[list[int]]]) -> int:
    """Chunks whose activations a stage holds at once: Megatron's schedule without and with interleaving."""
    parallel = config.parallel
    count = micro_batches(config)
    if parallel.vpp == 1:
        return min(parallel.pp - stage, count)
    warm = (parallel.pp - stage - 1) * 2 + (parallel.vpp - 1) * parallel.pp + 1
    return min(warm, count * len(stages[stage]))


def micro_batches(config: Config) -> int:
    """Micro-batches of a data-parallel rank in an update, of the longest samples there can be."""
    parallel, trainer, rollout = config.parallel, config.trainer, config.rollout
    world = trainer.nodes * trainer.ranks_per_node
    replicas = world // (parallel.tp * parallel.cp * parallel.pp)
    samples = (trainer.mini_batch_prompts or trainer.prompts_per_step) * samples_per_row(config)
    longest = rollout.max_prompt_length + rollout.max_response_length
    rows = max(1, trainer.max_tokens_per_micro_batch * parallel.cp // longest)
    if trainer.micro_batch_size is not None:
        rows = min(rows, trainer.micro_batch_size)
    count = max(1, ceil(samples / replicas / rows))
    return ceil(count / parallel.pp) * parallel.pp if parallel.vpp > 1 else count


def _head(config: Config, spec: ModelSpec, layer: "_Layer", backward: bool) -> tuple[int, int]:
    """What is kept: the norm's input and output, and logits in the model's dtype. What the loss needs: their gradient,
    and a chunk of them in float32, four times over, six times where it learns from the entropy too."""
    columns = ceil(spec.vocab_size / config.parallel.tp)
    chunk = min(config.trainer.logprob_chunk, layer.tokens)
    logits = layer.tokens * columns * layer.item
    copies = 6 if backward and config.algorithm.entropy_coef else 4
    return layer.norm + logits, logits * backward + copies * FP32 * chunk * columns


class _Layer:
    """What one decoder layer keeps of `tokens` tokens, those of the rank's context-parallel share."""

    def __init__(self, config: Config, spec: ModelSpec, tokens: int, fused: bool) -> None:
        parallel = config.parallel
        self.config, self.spec, self.tokens, self.fused = config, spec, tokens, fused
        self.item = ITEM_BYTES[config.model.dtype]
        parts = parallel.tp if parallel.sequence_parallel or parallel.sequence_parallel is None else 1
        self.sequence = ceil(tokens / parts)
        """Tokens where sequence parallelism cuts them."""
        self.boundary = self.sequence * spec.hidden_size * self.item
        """The hidden states between layers."""
        self.norm = (2 if fused else 3) * self.boundary
        """A norm's input, and its output, which the next projection keeps; unfused, also what its weight multiplies."""

    def nbytes(self, layer: int) -> int:
        """All that main layer `layer` keeps."""
        mlp = self._experts() if self.spec.is_moe_layer(layer) else self._dense(self.spec.ffn_size)
        return 2 * self.norm + self._attention() + mlp

    def _attention(self) -> int:
        """Projections, rotated queries and keys, values, the output and its statistics; unfused, the output twice,
        normalised heads, and the tables of the rotation. Selective recomputation rebuilds the output and statistics,
        of which the next projection keeps the former."""
        tp, spec = self.config.parallel.tp, self.spec
        heads = spec.num_heads / tp
        again = self.config.model.recompute == "selective"
        if spec.mla is not None:
            width = _latent_width(spec, spec.mla, tp)
        else:
            queries = heads * spec.head_dim
            keys = max(1.0, spec.num_kv_heads / tp) * spec.head_dim
            width = (queries + 2 * keys) + (queries + keys) + queries
            if not self.fused:
                width += (queries + keys if spec.qk_norm else 0) + 4 * spec.head_dim + queries * (not again)
        return int(self.tokens * (width * self.item + heads * FP32 * (not again)))

    def _dense(self, ffn: int) -> int:
        """Gate and up, and their product; unfused, the activated gate and a contiguous half of the two as well."""
        return int(self.tokens * ffn / self.config.parallel.tp * (3 if self.fused else 5) * self.item)

    def _experts(self) -> int:
        moe, parallel = self.spec.moe, self.config.parallel
        assert moe is not None
        routed = self.sequence * moe.top_k * parallel.etp * (IMBALANCE if parallel.ep > 1 else 1)
        inner = moe.ffn_size / parallel.etp
        rows = routed * (self.spec.hidden_size * (2 if parallel.ep > 1 else 1) + inner * (3 if self.fused else 5))
        router = self.sequence * (moe.num_experts * 2 + moe.top_k * 3) * FP32
        shared = self._dense(moe.shared_ffn_size) if moe.shared_ffn_size else 0
        return int(rows * self.item + router + shared)


def _latent_width(spec: ModelSpec, mla: MlaSpec, tp: int) -> float:
    """Elements a token that latent attention keeps: both compressions (whole), expanded heads, the output."""
    head = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    compressed = 2 * ((mla.q_lora_rank or 0) + mla.kv_lora_rank) + mla.qk_rope_head_dim
    expanded = spec.num_heads / tp * (3 * head + mla.qk_nope_head_dim + 3 * mla.v_head_dim)
    return compressed + expanded
