"""Small tokenizers of one token a character, with chat templates."""

from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

MARKS = ("<pad>", "<eos>", "<unk>", "<|start|>", "<|end|>")
CHATML = (
    "{% for m in messages %}<|start|>{{ m.role }}:{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant:{% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}<|start|>{{ m.role }}:"
    "{{ m.content if loop.last else m.content.split('=')[-1] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant:{% endif %}"
)
"""Cuts earlier turns when later ones come."""
STRICT = CHATML.replace(
    "{% for m in messages %}",
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}",
)
PLAIN_END = CHATML.replace("<|start|>", "").replace("<|end|>", "")


def character_tokenizer(template: str | None = None, eos: str = "<|end|>") -> Any:
    """Knows letters, digits, some signs and line breaks; the marks are single tokens."""
    characters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-*=?:,.' \n"
    vocabulary = {token: index for index, token in enumerate([*MARKS, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(MARKS))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, pad_token="<pad>", unk_token="<unk>")
    fast.chat_template = template
    return fast
