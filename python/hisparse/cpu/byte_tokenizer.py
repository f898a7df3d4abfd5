"""A tokenizer whose token ids are byte values, so that any text works and a prompt's length is its length in UTF-8."""

import json
from pathlib import Path

BOS, EOS, PAD = 256, 257, 258
SPECIAL_TOKENS = {"<bos>": BOS, "<eos>": EOS, "<pad>": PAD}
TOKENS = 259
"""Ids in use; a model's vocabulary may be padded beyond."""

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message['role'] }}>\n{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)


def byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level BPE: itself if it is printable and no space, else one from
    U+0100 on.

    This is the alphabet of GPT-2's tokenizer, which the ``tokenizers`` library's ByteLevel steps use.
    """
    own = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = (chr(code) for code in range(0x100, 0x200))
    return [chr(byte) if byte in own else next(others) for byte in range(256)]


def save(directory: Path, context_len: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``, chat template included."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    assert all(tokenizer.token_to_id(token) == number for token, number in SPECIAL_TOKENS.items())
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", BOS)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "model_max_length": context_len,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
