"""Which SGLang this code was written against. Imports neither torch nor SGLang."""

from importlib import metadata

SUPPORTED = ("0.5.23",)
"""Releases whose internals were compared with what `hybridrl.rollout.sglang.internals` names."""


class UnsupportedSGLangError(RuntimeError):
    """SGLang is absent, or is not a release that hybridrl knows."""


def require_supported() -> str:
    """The installed release of SGLang. Raises UnsupportedSGLangError if there is none or it is not in `SUPPORTED`."""
    known = " or ".join(SUPPORTED)
    try:
        version = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        raise UnsupportedSGLangError(
            f"rollout.engine=sglang needs SGLang {known}, and none is installed: `pip install '.[sglang]'` on a "
            "machine with a GPU, `make sglang-cpu` on one without, or take rollout.engine=transformers"
        ) from None
    if version not in SUPPORTED:
        raise UnsupportedSGLangError(
            f"SGLang {version} is installed; its scheduler is driven by name and was checked for {known} only. "
            f"Install one of these, or compare hybridrl/rollout/sglang/internals.py with {version} and add it there"
        )
    return version
