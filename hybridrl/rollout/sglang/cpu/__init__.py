"""SGLang on a machine without a GPU: what has to be so before it is imported.

SGLang runs on a CPU by its native torch operations, but its imports ask for two compiled packages that exist for CUDA
only. `enable` puts import stubs for them (`stubs/`) on the path, in this process and in those that it spawns, and only
where CUDA is absent.
"""

import os
import sys
from pathlib import Path

STUBS = Path(__file__).parent / "stubs"

ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
"""SGLang's own switch for CPUs; and no compiler, which costs more at the first token than it saves on small models."""


def enable() -> bool:
    """Prepares the import of SGLang where there is no GPU; True if there is none. Calling it again changes nothing.

    Raises RuntimeError if SGLang was imported before, since it has then chosen a device already.
    """
    import torch

    if torch.cuda.is_available():
        return False
    if "sglang" in sys.modules and os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        raise RuntimeError(
            "sglang was imported before hybridrl prepared it for a CPU: import hybridrl.rollout.sglang.internals first"
        )
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if str(STUBS) not in sys.path:
        sys.path.append(str(STUBS))  # last: a real package of that name goes first
    return True
