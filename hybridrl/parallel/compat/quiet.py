"""Warnings that are not news on a machine without CUDA: the one place where any are silenced.

Megatron says at import, on every rank, that Transformer Engine and Apex are not installed, which on a CPU they cannot
be, and torch that names which Megatron 0.16 uses have successors. Each filter names a text and the module that says
it, so a warning of the user's own code, and any other of these libraries, is shown as ever. Where CUDA is present
nothing is silenced: there a missing Transformer Engine matters.
"""

import re
import warnings

SILENCED: tuple[tuple[str, type[Warning], str], ...] = (
    ("Transformer Engine and Apex are not installed", UserWarning, r"megatron\.core\."),
    ("Apex is not installed. Falling back to Torch Norm", UserWarning, r"megatron\.core\.models\."),
    # Megatron's own default value.
    ("full scope is deprecated. Use empty cuda_graph_scope", UserWarning, r"megatron\.core\.transformer\."),
    # Megatron looks at .grad of the optimizer's views of its buffers.
    ("The .grad attribute of a Tensor that is not a leaf Tensor", UserWarning, r"megatron\.core\.optimizer\."),
    ("`torch.distributed.all_gather_into_tensor` is deprecated", FutureWarning, r"torch\.distributed\."),
    ("`torch.distributed.reduce_scatter_tensor` is deprecated", FutureWarning, r"torch\.distributed\."),
)
"""Start of the text, category, and start of the name of the module that warns."""


def silence() -> None:
    """Adds the filters, in front of those that there are."""
    for text, category, module in SILENCED:
        warnings.filterwarnings("ignore", re.escape(text), category, module)
