"""Prompts and demonstrations."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True)
class DataConfig:
    """Prompts, or demonstrations for supervised training."""

    source: str = "jsonl"
    """`jsonl`, `parquet`, `dataset` (a Hugging Face data set on disk) or `reasoning_gym`."""
    path: str | None = None
    """File, folder or glob; `builtin:tiny_sums` is made on first use."""
    split: str | None = None
    """Split of a `dataset`."""
    prompt_key: str = "prompt"
    """Field with the prompt: text, or a list of chat messages."""
    answer_key: str = "answer"
    """Field with the reference answer; every other field reaches the judges as metadata."""
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    """Fields with the two responses of a pair."""
    margin_key: str | None = None
    """Field with how much better the chosen response is, for `reward_model`; null: 0 for every pair."""
    completion_key: str = "completion"
    label_key: str = "label"
    """Fields with the response that `kto` learns from, and whether it is good (true or false)."""
    system_prompt: str | None = None
    """A system message before every prompt; None for none."""
    chat_template: bool = True
    """Render prompts by the tokenizer's chat template; False tokenises the text as it is."""
    overlong: str = "drop"
    """Prompts over `rollout.max_prompt_length`: `drop` (and count) or `error`."""
    shuffle: bool = True
    seed: int = 0
    """Whether each epoch has an order of its own, and the seed of the orders and of reasoning-gym problems."""
    task: str | None = None
    """Name of the reasoning-gym data set."""
    task_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the reasoning-gym data set."""
    size: int = 1000
    """Number of reasoning-gym problems."""
