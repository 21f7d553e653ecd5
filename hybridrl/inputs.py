"""What a run reads before anything is started: the model's folder, its tokenizer, and its data as token ids."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from hybridrl.config.compose import ConfigError
from hybridrl.config.kinds import PAIRED, is_supervised, learns_from_pairs
from hybridrl.config.schema import Config
from hybridrl.data.chat import check_template
from hybridrl.data.demonstrations import build_demonstrations
from hybridrl.data.preferences import build_pairs, build_verdicts
from hybridrl.data.prompts import build_prompts
from hybridrl.data.rows import Row, load_rows
from hybridrl.data.stream import DemonstrationStream, PreferenceStream, PromptStream
from hybridrl.files import cache_folder
from hybridrl.models import builtin
from hybridrl.models.families import trained_spec
from hybridrl.models.spec import ModelSpec
from hybridrl.rollout.causal_model import eos_token_ids
from hybridrl.rollout.samples import Prompt

READ_ERRORS = (ValueError, OSError)
"""What reading raises for a folder or data that cannot be used; `DataError` and `UnsupportedModelError` among them."""


@dataclass(frozen=True)
class Inputs:
    """All of it, alike on every rank."""

    model_folder: Path
    tokenizer_folder: Path
    tokenizer: Any
    eos_ids: tuple[int, ...]
    """Ids that end a response by the model folder's own word."""
    demonstrations: DemonstrationStream | None
    """Of a supervised run, and of a warm start."""
    prompts: PromptStream | None
    """Of a run with rollouts."""
    evaluation: Sequence[Prompt] | None
    """On which a run with rollouts is measured."""
    preferences: PreferenceStream | None
    """Of a run that learns from pairs or labels."""
    dropped: int
    """Rows that were left out for their length."""

    @property
    def rows(self) -> int:
        """Rows that are used."""
        stream = self.prompts or self.preferences or self.demonstrations
        return 0 if stream is None else stream.size


def read_inputs(config: Config) -> Inputs:
    """Reads everything. Raises ConfigError with every mistake that can be found without the others being mended."""
    problems: list[str] = []
    path, tokenizer_path = config.model.path, config.model.tokenizer or config.model.path
    tokenizer, spec, rows = None, None, None
    eos_ids: tuple[int, ...] = ()
    with _noted(problems, f"model.path={path}: "):
        spec = trained_spec(builtin.resolve(path, cache_folder()))
        eos_ids = eos_token_ids(builtin.resolve(path, cache_folder()))
        if spec.scalar_head and config.algorithm.name != "reward_model":
            raise ValueError("a reward model; algorithm.name=reward_model trains it further, other kinds need a policy")
    with _noted(problems, f"model.tokenizer={tokenizer_path}: cannot be loaded: "):
        tokenizer = load_tokenizer(_tokenizer_folder(tokenizer_path))
    with _noted(problems):
        rows = load_rows(config.data)
    if tokenizer is not None:
        with _noted(problems):
            check_template(config.data, tokenizer)
    _raise(problems)
    assert tokenizer is not None
    assert spec is not None
    assert rows is not None
    streams = _tokenise(config, tokenizer, rows, eos_ids, spec.vocab_size)
    return Inputs(
        model_folder=builtin.resolve(path, cache_folder()),
        tokenizer_folder=_tokenizer_folder(tokenizer_path),
        tokenizer=tokenizer,
        eos_ids=eos_ids,
        **streams,
    )


def _tokenizer_folder(path: str) -> Path:
    """A folder that need hold no model."""
    return builtin.resolve(path, cache_folder()) if path.startswith(builtin.PREFIX) else Path(path)


def load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer. Raises ValueError for a folder that has none.

    transformers makes an empty one from a model's `config.json` alone.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise ValueError(f"{folder} has no tokenizer files; copy them there, or name their folder by model.tokenizer")
    return tokenizer


def _tokenise(
    config: Config, tokenizer: Any, rows: Sequence[Row], eos_ids: tuple[int, ...], vocabulary: int
) -> dict[str, Any]:
    """The streams of `Inputs`, as far as the run needs them, and the number of rows that were dropped."""
    problems: list[str] = []
    found: dict[str, Any] = dict.fromkeys(("demonstrations", "prompts", "evaluation", "preferences")) | {"dropped": 0}
    common: dict[str, Any] = {"seed": config.data.seed, "shuffle": config.data.shuffle}
    batch = config.trainer.prompts_per_step
    limit = config.rollout.max_prompt_length + config.rollout.max_response_length
    if config.algorithm.name in PAIRED:
        with _noted(problems):
            build = build_pairs if learns_from_pairs(config) else build_verdicts
            compared = build(rows, config.data, tokenizer, limit, eos_ids)
            found["dropped"] = compared.dropped
            _check_ids((example.token_ids for example in compared.examples), vocabulary, config)
            held = config.preference.holdout
            found["preferences"] = PreferenceStream(compared.examples, batch=batch, holdout=held, **common)
    elif is_supervised(config) or config.warm_start.steps:
        supervised = is_supervised(config)
        size = batch if supervised else config.warm_start.batch_size
        option = "trainer.prompts_per_step" if supervised else "warm_start.batch_size"
        with _noted(problems):
            examples = build_demonstrations(rows, config.data, tokenizer, limit, eos_ids)
            found["dropped"] = examples.dropped
            _check_ids((example.token_ids for example in examples.demonstrations), vocabulary, config)
            found["demonstrations"] = DemonstrationStream(examples.demonstrations, batch=size, option=option, **common)
    if not is_supervised(config):
        with _noted(problems):
            asked = build_prompts(rows, config.data, tokenizer, config.rollout.max_prompt_length)
            found["dropped"] = asked.dropped
            _check_ids((prompt.token_ids for prompt in asked.prompts), vocabulary, config)
            found["prompts"] = PromptStream(asked.prompts, batch=batch, **common)
        with _noted(problems, "evaluation: "):
            found["evaluation"] = _evaluation_prompts(config, tokenizer, vocabulary)
    _raise(problems)
    return found


def _evaluation_prompts(config: Config, tokenizer: Any, vocabulary: int) -> Sequence[Prompt] | None:
    """What `evaluation` asks for, read as `data` is; None where it asks for nothing."""
    chosen, data = config.evaluation, config.data
    if chosen.every is None:
        return None
    size = chosen.size or data.size
    rows = load_rows(replace(data, path=chosen.path, split=chosen.split, seed=data.seed + 1, size=size))
    asked = build_prompts(rows[: chosen.size], data, tokenizer, config.rollout.max_prompt_length)
    _check_ids((prompt.token_ids for prompt in asked.prompts), vocabulary, config)
    return asked.prompts


def _check_ids(sequences: Iterable[Sequence[int]], vocabulary: int, config: Config) -> None:
    highest = max((max(ids) for ids in sequences if ids), default=0)
    if highest >= vocabulary:
        raise ValueError(
            f"model.tokenizer={config.model.tokenizer or config.model.path} gives token {highest}, but the model of "
            f"model.path={config.model.path} knows {vocabulary} tokens: it is another model's tokenizer"
        )


@contextmanager
def _noted(problems: list[str], start: str = "") -> Iterator[None]:
    """Adds an error in the block to the problems, once."""
    try:
        yield
    except READ_ERRORS as error:
        text = str(error)
        text = text if "model.path=" in text else start + text
        if text not in problems:
            problems.append(text)


def _raise(problems: list[str]) -> None:
    if problems:
        raise ConfigError(problems)


def other_model(key: str, path: str | None, policy_folder: Path, policy: ModelSpec) -> tuple[Path, ModelSpec]:
    """Folder and sizes of a further model that reads the policy's tokens; `path` of None is the policy's own.

    Raises ConfigError for a folder that cannot be read, or a model with another vocabulary.
    """
    problems: list[str] = []
    folder, spec = policy_folder, policy
    if path is not None:
        with _noted(problems, f"{key}={path}: "):
            folder = builtin.resolve(path, cache_folder())
            spec = trained_spec(folder)
    if spec.vocab_size != policy.vocab_size:
        problems.append(
            f"{key}={path}: a vocabulary of {spec.vocab_size} tokens, the policy has {policy.vocab_size}: the two must "
            "read the same token ids"
        )
    _raise(problems)
    return folder, spec
