"""Train the tokenizer of `needle` and write it, with chat template and generation config, into a model folder.

python benchmark/needle/build_tokenizer.py models/needle
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import corpus
import facts
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 1024
SPECIAL_TOKENS = ("<|bos|>", "<|end|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>")
BOS, EOS, PAD = SPECIAL_TOKENS[:3]
N_NAMES = 40_000
SEED = 2026

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(text: list[str]) -> Tokenizer:
    """Byte-level BPE; every digit is a token of its own, so a code is always five tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    return tokenizer


def names() -> list[str]:
    """Sample names as they stand after a space, so that their common syllables become tokens."""
    rng = np.random.default_rng(SEED)
    return [" " + name for name in facts.draw_names(rng, N_NAMES, from_held_out=False)]


def write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    train_lines, _ = corpus.split(corpus.lines())
    tokenizer = train_tokenizer(train_lines + names())
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "pad_token": PAD,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 163840,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    ids = {name: tokenizer.token_to_id(token) for name, token in (("bos", BOS), ("eos", EOS), ("pad", PAD))}
    write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": ids["bos"],
            "eos_token_id": ids["eos"],
            "pad_token_id": ids["pad"],
            "do_sample": False,
            "temperature": 0.0,
        },
    )


if __name__ == "__main__":
    main()
