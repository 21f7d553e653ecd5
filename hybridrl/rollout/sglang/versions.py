"""Which SGLang this code was written against. Imports neither torch nor SGLang."""

import ast
from importlib import metadata, util
from pathlib import Path

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


def server_arg_names() -> frozenset[str]:
    """Names of the fields of the installed SGLang's ServerArgs, read from its source, which it declares them in.

    Importing them takes ten seconds and chooses a device. Raises UnsupportedSGLangError where the source is not there.
    """
    found = util.find_spec("sglang")
    folder = Path(found.origin).parent / "srt" / "arg_groups" / "fields" if found and found.origin else None
    sources = sorted(folder.glob("*.py")) if folder else []
    nodes = (node for file in sources for node in ast.walk(ast.parse(file.read_text())))
    names = {
        field.target.id
        for node in nodes
        if isinstance(node, ast.ClassDef)
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }
    if not names:
        raise UnsupportedSGLangError(f"the installed SGLang declares no fields of ServerArgs in {folder}")
    return frozenset(names)
