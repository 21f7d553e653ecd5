"""A transformers causal language model as the embedded engine uses it: built without values, and called step by step.

Not supported: sliding-window attention, and models that change their logits after the output projection. Both are
refused, since the key-value cache and the call here would compute something else.
"""

import inspect
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridrl.models.spec import MoeSpec
from hybridrl.rollout.route_recorder import RouteRecorder
from hybridrl.rollout.slots import SlotCache

# Measured on a CPU with 4 to 8 experts in fp32: as quick as `eager` or quicker, up to 100 times quicker than
# `batched_mm`, which copies an expert's weights for every token; and equal to `eager` bit for bit.
EXPERTS_IMPLEMENTATION = "grouped_mm"

_CHANGED_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")


class CausalModel:
    """The model of a Hugging Face folder, in evaluation mode, its parameters frozen.

    Built from `config.json` alone its parameters hold no values until a weight sync writes them; `load` reads them from
    the folder's files. With `record_routes` an MoE model's `recorder` has what a pass chose. Building moves no global
    random state and leaves the default dtype as it is.

    Raises ValueError for a model whose computation is not supported.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        device: torch.device,
        dtype: torch.dtype,
        moe: MoeSpec | None,
        load: bool = False,
        record_routes: bool = False,
    ) -> None:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(folder)
        _refuse_unsupported(config, folder)
        self.module = _build(folder, config, device, dtype, moe is not None, load)
        self.max_positions: int = config.max_position_embeddings
        self.vocab_size: int = config.vocab_size
        self._backbone = self.module.get_decoder()
        self._head = self.module.get_output_embeddings()
        names = inspect.signature(self._backbone.forward).parameters
        self.recorder = RouteRecorder(self._backbone.layers, moe) if moe is not None and record_routes else None
        self._cache_name = "cache" if "cache" in names else "past_key_values"  # renamed in transformers 5.2x

    def tensors(self) -> dict[str, Tensor]:
        """Live parameters and persistent buffers under the names of the module; a tied weight once, under its first."""
        named = dict(self.module.named_parameters())
        kept = self.module.state_dict(keep_vars=True)
        named.update({name: buffer for name, buffer in self.module.named_buffers() if name in kept})
        return named

    def forward(self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: SlotCache, column: Tensor) -> Tensor:
        """Logits [rows, vocabulary] after the token in each row's `column`.

        `tokens` and `positions` are int64 [rows, tokens]; `mask` is bool [rows, 1, tokens, keys], True where a token
        attends; `column` is int64 [rows]. Keys and values go to `cache`.
        """
        cached: dict[str, Any] = {self._cache_name: cache}
        output = self._backbone(input_ids=tokens, position_ids=positions, attention_mask=mask, use_cache=True, **cached)
        hidden = output.last_hidden_state
        rows = torch.arange(len(hidden), device=hidden.device)
        logits: Tensor = self._head(hidden[rows, column])
        return logits


def _build(folder: Path | str, config: Any, device: torch.device, dtype: torch.dtype, moe: bool, load: bool) -> Any:
    from transformers import AutoModelForCausalLM, initialization

    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": "sdpa"}
    if moe:  # transformers refuses the choice for a dense model
        options["experts_implementation"] = EXPERTS_IMPLEMENTATION
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        if load:
            module: Any = AutoModelForCausalLM.from_pretrained(folder, **options)
            module.to(device)
            for parameter in module.parameters():  # out of the mapped file, into storage that can be released
                parameter.data = parameter.data.clone()
        else:
            with initialization.no_init_weights(), torch.device(device):
                module = AutoModelForCausalLM.from_config(config, **options)
            module.tie_weights()
    return module.eval().requires_grad_(False)


def _refuse_unsupported(config: Any, folder: Path | str) -> None:
    problems = []
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if window is not None and window < config.max_position_embeddings and getattr(config, "use_sliding_window", True):
        problems.append(f"sliding_window={window} below max_position_embeddings={config.max_position_embeddings}")
    elif kinds != {"full_attention"}:
        problems.append(f"layer_types={sorted(kinds)}, of which only full_attention is supported")
    problems += [f"{name}={getattr(config, name)}" for name in _CHANGED_LOGITS if getattr(config, name, None)]
    if problems:
        raise ValueError(
            f"{folder}: the embedded engine cannot compute {config.model_type} with {'; '.join(problems)}. "
            "Use another engine, or a model without it"
        )


def eos_token_ids(folder: Path | str) -> tuple[int, ...]:
    """All ids that end a response by the folder's own word: of `generation_config.json` and of `config.json` together.

    Each may name one id or several, and they often differ: a chat model's turn ends with an id that its `config.json`
    does not know. Ascending; empty if neither file names any.
    """
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        file = Path(folder) / name
        if not file.exists():
            continue
        value = json.loads(file.read_text()).get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        wrong = [i for i in ids if not isinstance(i, int) or i < 0]
        if wrong:
            raise ValueError(f"{file}: eos_token_id holds {wrong}; expected token ids, integers of at least 0")
        found.update(ids)
    return tuple(sorted(found))
