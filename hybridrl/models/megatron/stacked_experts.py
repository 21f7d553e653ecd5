"""Experts as two parameters: all of a rank's gate and up projections, and all its down projections.

That is how inference engines hold experts, so that a rank's parameters can be the engine's own. One grouped matrix
product serves all experts of a projection, on a CPU and on a GPU; sizes that it does not take go expert by expert.
There are no biases, no fp8 and no latent experts.
"""

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from hybridrl.models.megatron.engine_shards import EXTRA, Stack, experts_state_dict

REFUSED: dict[str, object] = {
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "fp8": None,
    "fp4": None,
    "moe_apply_probs_on_input": False,
    "moe_latent_size": None,
    "activation_func_clamp_value": None,
    "glu_linear_offset": 0.0,
    "delay_wgrad_compute": False,
}
"""Settings of Megatron that must have these values."""
ALIGNMENT_BYTES = 16
"""Rows of the operands of a grouped product must be a multiple of this long."""


class StackedExperts(MegatronModule):
    """A rank's experts, in place of Megatron's `SequentialMLP` and `TEGroupedMLP`.

    - `w13` [local experts, 2·ffn/etp, hidden]: of each expert, its gate rows and then its up rows;
    - `w2` [local experts, hidden, ffn/etp].

    With expert tensor parallelism the output is a partial sum, which Megatron's token dispatcher adds up, as it does
    for its own experts. Gradients are summed over expert data parallelism wherever that differs from data parallelism
    (`allreduce=False`), so that replicas over tensor-parallel ranks stay equal too.

    Raises ValueError with every setting that these experts do not honour.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: object = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        assert pg_collection is not None
        self.num_local_experts = num_local_experts
        self.ep_group, self.tp_group = pg_collection.ep, pg_collection.expt_tp
        self.dp_group = pg_collection.expt_dp
        ffn, over = divmod(config.moe_ffn_hidden_size, self.tp_group.size())
        problems = [
            f"{name}={getattr(config, name)}, only {needed}"
            for name, needed in REFUSED.items()
            if getattr(config, name, needed) != needed
        ]
        if over:
            problems.append(f"moe_ffn_hidden_size={config.moe_ffn_hidden_size} over {self.tp_group.size()} ranks")
        if problems:
            raise ValueError(f"stacked experts do not take {'; '.join(problems)}: use model.parameter_layout=megatron")
        rows = (size * config.params_dtype.itemsize for size in (ffn, config.hidden_size))
        self._product = grouped if not any(row % ALIGNMENT_BYTES for row in rows) else one_by_one
        # Megatron's own experts say so only where EP > 1, and go unsummed over TP ranks that hold replicas.
        replicated_as_dense = self.ep_group.size() == 1 and self.tp_group.size() == config.tensor_model_parallel_size
        self.w13 = self._parameter((2 * ffn, config.hidden_size), 1, 2, config.init_method, replicated_as_dense)
        self.w2 = self._parameter((config.hidden_size, ffn), 2, 1, config.output_layer_init_method, replicated_as_dense)

        self.register_load_state_dict_pre_hook(_drop_extra_states)

    def _parameter(
        self, shape: tuple[int, int], dim: int, stride: int, init: Any, replicated_as_dense: bool
    ) -> torch.nn.Parameter:
        device, dtype = torch.cuda.current_device(), self.config.params_dtype
        parameter = torch.nn.Parameter(torch.empty((self.num_local_experts, *shape), dtype=dtype, device=device))
        set_tensor_model_parallel_attributes(parameter, True, dim, stride)
        parameter.allreduce = replicated_as_dense  # type: ignore[attr-defined]
        if self.config.perform_initialization:
            with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                for expert in parameter.data:
                    init(expert)
        return parameter

    def forward(
        self, hidden: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Each expert's tokens through that expert, weighted by their routing probabilities.

        Args:
            hidden: `[tokens, hidden]`, those of expert 0 first.
            tokens_per_expert: int `[local experts]`, on any device; they add up to `tokens`, which may be 0.
            probs: `[tokens]`, in any floating dtype.

        Returns `[tokens, hidden]` in the dtype of `hidden` and, as Megatron's experts do, a bias, which is None.
        """
        ends = tokens_per_expert.to(hidden.device, non_blocking=True).cumsum(0).to(torch.int32)
        gate, up = self._product(hidden, self.w13, ends).chunk(2, dim=-1)
        activated = self.config.activation_func(gate) * up
        weighted = (activated * probs.unsqueeze(-1)).to(activated.dtype)
        return self._product(weighted, self.w2, ends), None

    def backward_dw(self) -> None:
        """Nothing: gradients of the weights are never delayed here."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """For Megatron's distributed checkpoint, as the same whole tensors that its own experts write and read."""
        stack = Stack(self.ep_group, self.tp_group, self.dp_group, prefix, tuple(sharded_offsets))
        return experts_state_dict(self.w13, self.w2, stack, metadata)


def _drop_extra_states(_: torch.nn.Module, state_dict: dict[str, Any], prefix: str, *__: Any) -> None:
    for name in [name for name in state_dict if name.startswith(prefix + EXTRA)]:
        del state_dict[name]


def grouped(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """`[n, k]` with `[experts, m, k]` → `[n, m]`: rows up to `ends[0]` by expert 0, and so on."""
    product = torch.nn.functional.grouped_mm(rows, weights.transpose(1, 2), offs=ends)
    if product.requires_grad:
        product.register_hook(_gapless)
    return product


def _gapless(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient with strides of its own: a grouped product refuses an expanded one, or is wrong."""
    if gradient.numel():
        return gradient.contiguous()
    return torch.empty_like(gradient, memory_format=torch.contiguous_format)  # any strides of nothing are contiguous


def one_by_one(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The same as `grouped`, for any sizes."""
    parts = rows.tensor_split(ends[:-1].to("cpu", torch.int64))
    return torch.cat([part @ weight.t() for part, weight in zip(parts, weights, strict=True)])
