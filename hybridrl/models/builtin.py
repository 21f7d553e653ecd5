"""Models that are made on first use, so that a recipe runs on any machine: `builtin:tiny_moe` and others.

Each has about 0.2 M parameters with random weights from a fixed seed, and a tokenizer of one token a character that
knows digits and signs. They are no trained models: they know nothing until something teaches them. `tiny_moe` is a
Qwen3-MoE, `tiny_deepseek` has DeepSeek-V3's architecture and `tiny_glm4` GLM-4.5's.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridrl.files import folder_aside

PREFIX = "builtin:"
SIZES: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 256,
    "initializer_range": 0.05,
    "tie_word_embeddings": False,
    "bos_token_id": None,
}
SIGMOID: Mapping[str, Any] = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.0,
    "num_nextn_predict_layers": 0,
}
LATENT: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "tiny_moe": ("qwen3_moe", {**SIZES, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8}),
    "tiny_deepseek": ("deepseek_v3", {**SIZES, **SIGMOID, **LATENT}),
    "tiny_glm4": (
        "glm4_moe",
        {**SIZES, **SIGMOID, "num_key_value_heads": 2, "head_dim": 16, "use_qk_norm": True, "attention_bias": True},
    ),
}
"""By name: `model_type` and settings."""
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
    if name not in MODELS:
        raise ValueError(f"model.path={path}: no such builtin model; there are {', '.join(MODELS)}")
    folder = cache / f"{name}-{REVISION}"
    if not folder.is_dir():
        with folder_aside(folder, first_wins=True) as aside:
            make_model(aside, name)
    return folder


def make_model(folder: Path, name: str = "tiny_moe") -> None:
    """Writes a model and its tokenizer. The same bytes each time."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    tokenizer = character_tokenizer()
    model_type, settings = MODELS[name]
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = AutoConfig.for_model(model_type, vocab_size=len(tokenizer), **settings, **ids)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = AutoModelForCausalLM.from_config(config)
        # transformers zeroes the padding token's row, whose gradient RMSNorm would blow up wherever it is sampled.
        torch.nn.init.normal_(model.get_input_embeddings().weight, std=config.initializer_range)
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # over the one file of a small model
    # Whichever process is first must write, the first rank or not; transformers leaves it to the first.
    model.should_save_on_this_rank = lambda is_main_process: True
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
