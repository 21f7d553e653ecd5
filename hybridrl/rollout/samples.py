"""What a rollout takes and gives: prompts, sampling parameters and samples. Token ids throughout, never text."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridrl.rollout.routes import Routes


class Finish(StrEnum):
    """Why a response ended."""

    STOP = "stop"
    """An end-of-sequence or stop token was sampled, or a stop string completed; it is the response's last token."""
    LENGTH = "length"
    """The response (or the context) reached its limit; nothing was appended."""
    ABORT = "abort"
    """Ended from outside; the tokens so far are kept."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt of a step."""

    id: int
    """Identifies the group: unique within a step, alike on all ranks."""
    token_ids: tuple[int, ...]
    text: str = ""
    """The rendered prompt, for judges and records only."""
    answer: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn. Never changed in place: make another by `dataclasses.replace`."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 512
    stop_token_ids: tuple[int, ...] = ()
    """All ids that end a response, EOS ids included."""
    stop: tuple[str, ...] = ()
    """Strings that end a response whose text holds one; see `hybridrl.rollout.stops`."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One response to be generated."""

    prompt: Prompt
    index: int
    """Which of the prompt's n samples this is."""
    seed: int
    """Of this sample alone: the same seed, weights and prompt give the same tokens."""
    params: SamplingParams


@dataclass(kw_only=True)
class Sample:
    """A prompt, one response to it, and what the loop learns about it. Lists are as long as `response_ids`."""

    prompt: Prompt
    index: int
    response_ids: list[int]
    log_probs: list[float]
    """Of each sampled token under the sampling distribution (temperature, top-p and top-k applied)."""
    versions: list[int]
    """Version of the weights that each token was sampled from."""
    finish: Finish
    mask: list[bool] = field(default_factory=list)
    """True for the policy's own tokens; filled with True if left empty."""
    reward: float | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    """Each judge's own score, by name."""
    failed: bool = False
    """A judge failed on it."""
    routed_experts: "Routes | None" = field(default=None, compare=False)
    """Experts that each token was routed to, from an engine that was asked for them (`rollout.routed_experts`) and that
    serves an MoE model; else None. int8 or int16 [prompt + response - 1 tokens, layers, top-k]:

    - row i is of the pass that token i of prompt and response went through; its logits drew token i + 1. The prompt is
      in it. The last token went through none, and has no row;
    - every main layer is in it, in order, and holds `routes.NO_EXPERT` (-1) if it is dense;
    - the k experts of a token are all different, in the engine's order: compare them as sets;
    - ids are the model's own, whatever the engine's expert parallelism.

    A token that was drawn before a pause for new weights keeps the row of the pass that drew its successor, as its
    log-prob does. A prompt token's row is of the pass that computed its KV, perhaps for another sample of the prompt.
    None, too, where nothing was drawn."""

    def __post_init__(self) -> None:
        if not self.mask:
            self.mask = [True] * len(self.response_ids)
        lengths = {len(self.response_ids), len(self.log_probs), len(self.versions), len(self.mask)}
        if len(lengths) != 1:
            raise ValueError(
                f"prompt {self.prompt.id}, sample {self.index}: {len(self.response_ids)} tokens came with "
                f"{len(self.log_probs)} log-probs, {len(self.versions)} versions and {len(self.mask)} mask entries"
            )


@dataclass(frozen=True, kw_only=True)
class Group:
    """The samples of one prompt, in the order of their indices."""

    samples: tuple[Sample, ...]
    greedy: Sample | None = None
    """The prompt's likeliest response, judged as a baseline and not trained."""
