"""Modules of SGLang whose kernels want another order of parameters than shapes show.

Both an alias and a write in place put values where the layout says they lie. Some of SGLang's kernels permute, pack or
pad parameters after loading, in place and often in the same shape: a module that does is refused by name.
"""

import torch

PLAIN_METHODS = ("UnquantizedFusedMoEMethod", "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
"""Of a module's `quant_method`: those that leave parameters as they were loaded, but for what `REORDERING` says."""
PLAIN_BACKEND = "triton"
"""Of the experts' runner on a GPU; it is set, and unused, where SGLang computes natively."""
REORDERING = (
    "use_triton_kernels",
    "use_flashinfer_cutlass",
    "use_flashinfer_trtllm_moe",
    "use_deep_gemm",
    "use_intel_amx_backend",
    "w13_swiglu_interleaved",
    "load_up_proj_weight_first",
)
"""Marks of a module or its method that its parameters are in another order, or packed."""
SHUFFLED = ("is_shuffled", "weight_padded")
"""Marks of a parameter that it is."""


def order_problems(model: torch.nn.Module) -> list[str]:
    """Modules whose parameters are not in the order of SGLang's checkpoints, each with what says so."""
    found = []
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        parameters = dict(module.named_parameters(recurse=False))
        if method is None or not parameters:
            continue
        if type(method).__name__ not in PLAIN_METHODS:
            found.append(f"{name}: its {type(method).__name__} may keep parameters in another order")
        backend = getattr(getattr(method, "runner", None), "runner_backend", None)
        if backend is not None and backend.value != PLAIN_BACKEND:
            found.append(f"{name}: its runner backend {backend.value} may keep experts in another order")
        marks = [mark for mark in REORDERING if getattr(module, mark, False) or getattr(method, mark, False)]
        if marks:
            found.append(f"{name}: its parameters are in another order ({', '.join(marks)})")
        for own, parameter in parameters.items():
            found += [f"{name}: its {own} is in another order ({m})" for m in SHUFFLED if getattr(parameter, m, False)]
    return found
