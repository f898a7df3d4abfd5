"""`--hisparse-config`: every refusal is one sentence with the option, the value and what would be legal."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse.config import MAX_VALUE, HiSparseConfig, HiSparseError, ResolvedConfig, TraceConfig

KEYS = (
    "top_k",
    "device_buffer_size",
    "host_to_device_ratio",
    "swap_in_block_size",
    "host_memory_gib",
    "workspace_tokens",
    "trace_requests",
    "trace_mib",
)
WHOLE = ("top_k", "device_buffer_size", "swap_in_block_size", "workspace_tokens")
MODEL: dict[str, int] = {"index_topk": 2048, "page_size": 64, "context_len": 163_840}


def sentence(error: pytest.ExceptionInfo[HiSparseError]) -> str:
    """The message, which must be one sentence in one line and name the option."""
    message = str(error.value)
    assert message.endswith(".") and not message.endswith("..")
    assert ". " not in message and "\n" not in message, message
    assert "--hisparse-config" in message
    return message


def refused(text: str) -> str:
    with pytest.raises(HiSparseError) as error:
        HiSparseConfig.from_json(text)
    return sentence(error)


def resolve(text: str | None = None, **model: int) -> ResolvedConfig:
    return HiSparseConfig.from_json(text).resolve(**(MODEL | model))


def unresolved(text: str, **model: int) -> str:
    with pytest.raises(HiSparseError) as error:
        resolve(text, **model)
    return sentence(error)


# ---- parsing


@pytest.mark.parametrize("text", (None, "", "  ", "{}"))
def test_nothing_given(text: str | None) -> None:
    assert HiSparseConfig.from_json(text) == HiSparseConfig()


def test_every_key_is_read() -> None:
    given_values = {
        "top_k": 2048,
        "device_buffer_size": 4096,
        "host_to_device_ratio": 8,
        "swap_in_block_size": 960,
        "host_memory_gib": 1.5,
        "workspace_tokens": 131_136,
        "trace_requests": 0.25,
        "trace_mib": 100,
        "trace": "a folder",
        "trace_layers": [0, 60],
    }
    assert tuple(given_values) == (*KEYS, "trace", "trace_layers")
    assert set(given_values) == {field.name for field in dataclasses.fields(HiSparseConfig)}
    config = HiSparseConfig.from_json(json.dumps(given_values))
    assert {key: getattr(config, key) for key in given_values} == given_values


def test_null_means_not_given() -> None:
    assert HiSparseConfig.from_json('{"top_k": null}') == HiSparseConfig()


@pytest.mark.parametrize("text", ("{", "top_k=3", '{"top_k": 1,}', "{'top_k': 1}", '{"top_k": 1\n 2}', "[" * 10**5))
def test_invalid_json(text: str) -> None:
    message = refused(text)
    assert "not valid JSON" in message
    assert repr(text[:8])[1:-1] in message


def test_an_integer_of_thousands_of_digits() -> None:
    """Python refuses to parse it with an error of another kind than for bad syntax."""
    assert "not valid JSON" in refused('{"top_k": 1' + "0" * 5000 + "}")


@pytest.mark.parametrize("text", ("[]", "3", '"top_k"', "null", "true", "[1]"))
def test_anything_but_an_object(text: str) -> None:
    message = refused(text)
    assert "must be a JSON object" in message and repr(text) in message


def test_unknown_key() -> None:
    message = refused('{"device_bufer_size": 4096}')
    assert "'device_bufer_size'" in message
    assert all(key in message for key in KEYS)


def test_duplicate_key() -> None:
    assert "'top_k' twice" in refused('{"top_k": 2048, "device_buffer_size": 4096, "top_k": 1024}')


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("value", (True, False, "4096", [4096], {"a": 1}), ids=repr)
def test_wrong_types(key: str, value: Any) -> None:
    message = refused(json.dumps({key: value}))
    assert f"{key}={value!r}" in message
    assert ("must be an integer" if key in WHOLE else "must be a number") in message


@pytest.mark.parametrize("key", WHOLE)
@pytest.mark.parametrize("value", ("4096.0", "0.5", "1e3", "NaN", "Infinity"))
def test_a_float_is_no_integer(key: str, value: str) -> None:
    message = refused(f'{{"{key}": {value}}}')
    assert f"{key}=" in message and "must be an integer" in message


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("value", (0, -1, -(10**30)))
def test_not_positive(key: str, value: int) -> None:
    message = refused(json.dumps({key: value}))
    assert f"{key}={value}" in message and "must be positive" in message


@pytest.mark.parametrize("key", ("host_to_device_ratio", "host_memory_gib"))
@pytest.mark.parametrize("value", ("NaN", "Infinity", "-Infinity", "1e999", "0.0", "-0.5"))
def test_numbers_that_are_no_sizes(key: str, value: str) -> None:
    message = refused(f'{{"{key}": {value}}}')
    assert f"{key}=" in message and "must be positive" in message


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("value", ("1e300", str(10**400), "1e13"))
def test_numbers_that_overflow_later_are_refused_here(key: str, value: str) -> None:
    """Bytes are computed from them, and printed in GiB: neither may overflow."""
    assert f"{key}=" in refused(f'{{"{key}": {value}}}')


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=60)
@given(given_values=st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=4), json_values, max_size=4))
def test_any_object_is_a_configuration_or_one_sentence(given_values: dict[str, Any]) -> None:
    try:
        config = HiSparseConfig.from_json(json.dumps(given_values))
    except HiSparseError as error:
        assert "--hisparse-config" in str(error) and "\n" not in str(error)
        return
    assert set(given_values) <= set(KEYS)
    for key, value in given_values.items():
        assert getattr(config, key) == value
        assert value is None or 0 < value <= MAX_VALUE


# ---- resolving


def test_defaults() -> None:
    resolved = resolve()
    assert resolved == ResolvedConfig(
        top_k=2048,
        device_buffer_size=4096,
        page_size=64,
        workspace_tokens=163_904,
        host_memory_bytes=None,
        host_to_device_ratio=None,
        workspaces=2,
    )
    assert resolved.region_rows == 4096 + 64


@pytest.mark.parametrize(
    ("index_topk", "expected"), ((1, 64), (32, 64), (33, 128), (256, 512), (16_352, 32_704), (20_000, 32_704))
)
def test_default_buffer_is_twice_the_top_k_in_whole_pages(index_topk: int, expected: int) -> None:
    assert resolve(index_topk=index_topk).device_buffer_size == expected


@pytest.mark.parametrize("size", (2048, 2112, 4096, 32_704))
def test_legal_buffer_sizes(size: int) -> None:
    assert resolve(f'{{"device_buffer_size": {size}}}').device_buffer_size == size


@pytest.mark.parametrize("size", (1, 64, 1984, 2047, 2049, 4100, 32_705, 32_767, 32_768, 65_536))
def test_illegal_buffer_sizes(size: int) -> None:
    """FIELD: too small for the model, no whole pages, or more rows than int16 numbers."""
    message = unresolved(f'{{"device_buffer_size": {size}}}')
    assert f"device_buffer_size={size} " in message
    assert "page size 64" in message and "index_topk=2048" in message and "at most 32704" in message
    assert "the default is 4096" in message


def test_a_buffer_of_32767_rows_is_legal_where_pages_divide_it() -> None:
    assert resolve('{"device_buffer_size": 32767}', page_size=1).device_buffer_size == 32_767
    assert "at most 32767" in unresolved('{"device_buffer_size": 32768}', page_size=1)


def test_a_model_that_selects_more_than_any_buffer_holds() -> None:
    with pytest.raises(HiSparseError, match=r"index_topk=32705 is larger than .* 32704\.$"):
        resolve(index_topk=32_705)
    assert resolve(index_topk=32_704).device_buffer_size == 32_704


@pytest.mark.parametrize(("context_len", "smallest"), ((1, 64), (63, 64), (64, 128), (4096, 4160)))
def test_workspace_holds_the_longest_request_and_the_next_token(context_len: int, smallest: int) -> None:
    assert resolve(context_len=context_len).workspace_tokens == smallest
    assert (
        resolve(f'{{"workspace_tokens": {smallest + 64}}}', context_len=context_len).workspace_tokens == smallest + 64
    )
    for illegal in (smallest - 1, smallest + 1, 1):
        message = unresolved(f'{{"workspace_tokens": {illegal}}}', context_len=context_len)
        assert f"workspace_tokens={illegal} " in message
        assert f"multiple of 64 that holds the longest request: at least {smallest} for --context-length" in message


def test_host_memory_is_in_bytes_afterwards() -> None:
    assert resolve('{"host_memory_gib": 1.5}').host_memory_bytes == 3 * 2**29
    assert resolve('{"host_to_device_ratio": 8}').host_to_device_ratio == 8


def test_host_memory_wins_over_the_ratio_and_says_so() -> None:
    resolved = resolve('{"host_memory_gib": 2, "host_to_device_ratio": 8}')
    assert (resolved.host_memory_bytes, resolved.host_to_device_ratio) == (2**31, None)
    assert resolved.notes == ("host_to_device_ratio is ignored because host_memory_gib is given.",)


def test_notes_on_keys_without_a_meaning_here() -> None:
    assert resolve('{"top_k": 2048}').notes == ()
    resolved = resolve('{"top_k": 1024, "swap_in_block_size": 960}')
    assert resolved.top_k == 2048
    assert resolved.notes == (
        "top_k=1024 is ignored: the model selects index_topk=2048 positions.",
        "swap_in_block_size is accepted but has no meaning here: the kernels choose their own grid.",
    )


# ---- traces


def test_a_trace_is_off_by_default() -> None:
    assert resolve().trace is None


def test_defaults_of_a_trace() -> None:
    assert resolve('{"trace": "there"}').trace == TraceConfig("there", 1.0, None, 2**30)


def test_a_trace_as_asked_for() -> None:
    found = resolve('{"trace": "t", "trace_requests": 0.1, "trace_layers": [40, 0], "trace_mib": 0.5}').trace
    assert found == TraceConfig("t", 0.1, (0, 40), 2**19)


@pytest.mark.parametrize("value", ("", "  ", 3, True, ["t"]), ids=repr)
def test_a_trace_is_a_folder(value: Any) -> None:
    message = refused(json.dumps({"trace": value}))
    assert f"trace={value!r}" in message and "must be a folder's name" in message


@pytest.mark.parametrize("value", ([], [-1], [1, 1], [0.5], [True], "3", 3, ["0"]), ids=repr)
def test_layers_of_a_trace(value: Any) -> None:
    message = refused(json.dumps({"trace": "t", "trace_layers": value}))
    assert f"trace_layers={value!r}" in message and "list of distinct layer numbers" in message


def test_a_share_is_at_most_one() -> None:
    assert "trace_requests=1.5 must be a share, at most 1" in refused('{"trace": "t", "trace_requests": 1.5}')


@pytest.mark.parametrize("key, value", (("trace_requests", 0.1), ("trace_layers", [0]), ("trace_mib", 5)))
def test_no_trace_without_a_folder(key: str, value: Any) -> None:
    message = refused(json.dumps({key: value}))
    assert f"{key}={value!r}" in message and "without trace" in message


def test_layers_of_a_process() -> None:
    some = TraceConfig("t", 1.0, (0, 31, 40), 1)
    assert some.layers_of(0, 61) == [0, 31, 40]
    assert some.layers_of(30, 5) == [31]
    assert TraceConfig("t", 1.0, None, 1).layers_of(30, 3) == [30, 31, 32]
    with pytest.raises(HiSparseError) as error:
        some.layers_of(41, 20)
    assert "none of the layers 41 to 60" in sentence(error)
