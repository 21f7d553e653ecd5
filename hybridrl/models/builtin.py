"""Models that are made on first use, so that a recipe runs on any machine: `builtin:tiny_moe`.

`tiny_moe` is a Qwen3-MoE of about 0.2 M parameters with random weights from a fixed seed, and a tokenizer of one token
a character that knows digits and signs. It is no trained model: it knows nothing until something teaches it.
"""

from pathlib import Path
from typing import Any

from hybridrl.files import folder_aside

PREFIX = "builtin:"
NAMES = ("tiny_moe",)
CHARACTERS = "0123456789+-*=? "
SEED = 20
REVISION = 2
"""Part of the folder's name: counted up whenever what is made changes."""


def resolve(path: str, cache: Path) -> Path:
    """The folder of a model: `path` itself, or for `builtin:<name>` a folder under `cache`, made if it is not there.

    Several processes may ask at once: each makes its own copy aside, and the first to rename it wins.
    Raises ValueError for an unknown builtin and FileNotFoundError for a folder without a `config.json`.
    """
    if not path.startswith(PREFIX):
        folder = Path(path)
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(f"model.path={path}: found no config.json there; expected a Hugging Face folder")
        return folder
    name = path.removeprefix(PREFIX)
    if name not in NAMES:
        raise ValueError(f"model.path={path}: no such builtin model; there are {', '.join(NAMES)}")
    folder = cache / f"{name}-{REVISION}"
    if not folder.is_dir():
        with folder_aside(folder, first_wins=True) as aside:
            make_tiny_moe(aside)
    return folder


def make_tiny_moe(folder: Path) -> None:
    """Writes the model and its tokenizer. The same bytes each time."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.utils import logging

    tokenizer = character_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=256,
        initializer_range=0.05,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = Qwen3MoeForCausalLM(config)
        # transformers zeroes the padding token's row, whose gradient RMSNorm would blow up wherever it is sampled.
        torch.nn.init.normal_(model.get_input_embeddings().weight, std=config.initializer_range)
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # over the one file of a small model
    model.save_pretrained(folder)
    if shown:
        logging.enable_progress_bar()
    tokenizer.save_pretrained(folder)


def character_tokenizer() -> Any:
    """A tokenizer of one token a character, with `<pad>` and `<eos>`; other characters are refused as `<unk>`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>", model_max_length=256
    )
