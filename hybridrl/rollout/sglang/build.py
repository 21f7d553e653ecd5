"""The SGLang engine that a configuration asks for. Imports what the hosting needs, and only then SGLang."""

from pathlib import Path

from hybridrl.config.schema import Config
from hybridrl.models.spec import ModelSpec
from hybridrl.rollout.engine import Engine
from hybridrl.rollout.sglang.options import from_config


def make_engine(
    config: Config, folder: Path, spec: ModelSpec, device: str, *, vocab_limit: int | None = None
) -> Engine:
    """The engine over the model in `folder`, on all ranks of the world together; `close` it at the end.

    `device` is `cpu` or `cuda`. Raises ValueError where `rollout.sglang` makes no engine, UnsupportedSGLangError where
    SGLang is absent or another release than the known ones.
    """
    options = from_config(config, folder, spec, device)
    if config.rollout.sglang.hosting == "subprocess":
        from hybridrl.rollout.sglang.process.engine import SGLangProcessEngine

        return SGLangProcessEngine(options, vocab_limit=vocab_limit)
    from hybridrl.rollout.sglang.engine import SGLangEngine

    return SGLangEngine(options, vocab_limit=vocab_limit)
