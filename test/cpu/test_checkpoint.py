"""checkpoint.py and byte_tokenizer.py: legal sizes, reproducible weights, a tokenizer that loses nothing."""

import json

import pytest
import torch
from dense_model import DenseModel
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from hisparse.cpu import byte_tokenizer
from hisparse.cpu.checkpoint import Shape, main, make_checkpoint, weights


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), layers=1, index_topk=32)


@pytest.fixture(scope="module")
def tokenizer(directory):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def test_files_and_config(directory):
    config = json.loads((directory / "config.json").read_text())
    assert config["architectures"] == ["DeepseekV32ForCausalLM"] and config["index_topk"] == 32
    tensors = load_file(directory / "model.safetensors")
    assert tensors["model.embed_tokens.weight"].shape == (config["vocab_size"], config["hidden_size"])
    assert all(t.dtype == torch.bfloat16 and t.isfinite().all() for t in tensors.values())
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == byte_tokenizer.EOS


@settings(max_examples=50)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_any_text_is_its_bytes_and_comes_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids == [byte_tokenizer.BOS, *text.encode()]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_chat_template(tokenizer):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<bos><user>\nHi\n<assistant>\nHo\n<assistant>\n"
    assert tokenizer.encode(text, add_special_tokens=False)[0] == byte_tokenizer.BOS


@pytest.mark.parametrize("style", ["conditioned", "plain"])
@pytest.mark.parametrize("experts", [0, 4])
def test_weights_depend_on_the_seed_alone(style, experts):
    shape = Shape(layers=2, experts=experts)
    first, again, other = weights(shape, style, 1), weights(shape, style, 1), weights(shape, style, 2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    assert (f"model.layers.1.mlp.experts.{experts - 1}.up_proj.weight" in first) == bool(experts)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"vocab": 258}, "vocab is 258"),
        ({"experts": 3}, "experts is 3; legal: 0"),
        ({"heads": 5}, "heads is 5; legal: divisors of 64"),
        ({"kv_lora_rank": 64}, "kv_lora_rank is 64; legal: more than value_dim"),
    ],
)
def test_illegal_sizes(tmp_path, sizes, message):
    with pytest.raises(ValueError, match=message):
        make_checkpoint(tmp_path / "x", **sizes)
    assert not (tmp_path / "x").exists()


def test_illegal_style(tmp_path):
    with pytest.raises(ValueError, match="style is 'wild'; legal: conditioned, plain"):
        make_checkpoint(tmp_path / "x", style="wild")


def test_command(tmp_path, capsys):
    assert main([str(tmp_path / "x"), "--layers", "1", "--index-topk", "128", "--style", "plain"]) == 0
    assert json.loads((tmp_path / "x" / "config.json").read_text())["index_topk"] == 128
    assert "MB of weights" in capsys.readouterr().out


def generate(style: str, tokens: int) -> tuple[list[int], list[float]]:
    """Greedy tokens of the dense model, and how much of each step's selection (last layer) the step before had selected
    too.
    """
    shape = Shape(layers=2, index_topk=64)
    model = DenseModel(weights(shape, style), shape.config())
    ids = [byte_tokenizer.BOS, *b"The scheduler packs requests into a batch until the pool of slots is exhausted. " * 3]
    prompt, overlap, before = len(ids), [], None
    for _ in range(tokens):
        ids.append(int(model.logits(ids)[-1].argmax()))
        selected = set(model.selected[-1][-1].nonzero().flatten().tolist())
        if before is not None:
            overlap.append(len(selected & before) / len(selected))
        before = selected
    return ids[prompt:], overlap


@pytest.mark.parametrize("style", ["conditioned", "plain"])
def test_greedy_text_is_readable_and_not_one_repeated_token(style):
    tokens, overlap = generate(style, 24)
    assert len(set(tokens)) >= 8
    assert all(32 <= token < 127 or token == 10 for token in tokens)
    mean = sum(overlap) / len(overlap)
    assert mean > 0.5 if style == "conditioned" else mean < 0.5, f"{style}: selections overlap by {mean:.2f}"
