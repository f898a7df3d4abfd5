"""What an OpenAI client and a sampling parameter see is what they see without HiSparse."""

from __future__ import annotations

import json
import urllib.error
from typing import Any

import pytest
from openai import OpenAI

from .pair import Pair, disconnect_after, prompt, wait_until_idle

TEXT = "The hot buffer holds the rows that a decode step reads. " * 40


def clients(pair: Pair) -> list[OpenAI]:
    return [OpenAI(base_url=server.url + "/v1", api_key="none") for server in (pair.on, pair.off)]


def test_chat_completion(pair: Pair) -> None:
    answers = [
        client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": TEXT + "Why?"}], max_tokens=60, temperature=0
        )
        for client in clients(pair)
    ]
    assert answers[0].choices[0].message.content
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
    assert answers[0].usage == answers[1].usage


def test_streaming(pair: Pair) -> None:
    texts = []
    for client in clients(pair):
        stream = client.completions.create(model="m", prompt=TEXT, max_tokens=150, temperature=0, stream=True)
        pieces = [chunk.choices[0].text for chunk in stream if chunk.choices]
        assert len(pieces) > 10
        texts.append("".join(pieces))
    assert texts[0] == texts[1]


def test_stop_string(pair: Pair) -> None:
    whole = clients(pair)[1].completions.create(model="m", prompt=TEXT, max_tokens=60, temperature=0).choices[0].text
    printable = [c for c in whole if c.isascii() and c.isprintable()]
    stop = printable[len(printable) // 2]
    for client in clients(pair):
        choice = client.completions.create(model="m", prompt=TEXT, max_tokens=60, temperature=0, stop=[stop]).choices[0]
        assert choice.finish_reason == "stop"
        assert choice.text == whole.split(stop)[0]


@pytest.mark.parametrize(
    "sampling",
    [{"frequency_penalty": 1.5}, {"presence_penalty": 1.5}, {"repetition_penalty": 1.3}, {"logit_bias": {"77": 3.0}}],
    ids=lambda sampling: next(iter(sampling)),
)
def test_penalties_and_logprobs(pair: Pair, sampling: dict[str, Any]) -> None:
    answers = []
    for server in (pair.on, pair.off):
        answers.append(
            server.post(
                "/generate",
                {
                    "input_ids": [prompt(70, 70), prompt(300, 300)],
                    "sampling_params": {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True, **sampling},
                    "return_logprob": True,
                    "top_logprobs_num": 2,
                    "token_ids_logprob": [5, 6],
                },
            )
        )
    for ours, plain in zip(*answers, strict=True):
        assert ours["output_ids"] == plain["output_ids"]
        for kind in ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs"):
            assert ours["meta_info"][kind] == plain["meta_info"][kind]
            assert len(ours["meta_info"][kind]) == 40


def test_abort_by_disconnect(pair: Pair) -> None:
    """FIELD F25: clients that go away in prefill and in decode leave nothing behind."""
    for tokens_read, length in ((0, 6000), (1, 300), (20, 500), (60, 64)):
        disconnect_after(pair.on, tokens_read, prompt(400 + length, length))
    wait_until_idle(pair.on)
    pair.flush()
    pair.generate([prompt(430 + i, 100 + 90 * i) for i in range(4)], max_new_tokens=60)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": -1}),
        ("/v1/chat/completions", {"model": "m", "messages": "no list"}),
        ("/v1/completions", {"model": "m", "prompt": "x", "max_tokens": -5}),
        ("/v1/completions", {"model": "m", "prompt": [3] * 9000, "max_tokens": 5}),
    ],
    ids=["temperature", "messages", "max_tokens", "too long"],
)
def test_bad_request_gets_a_json_error(pair: Pair, path: str, body: dict[str, Any]) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        pair.on.post(path, body)
    assert 400 <= caught.value.code < 500
    answer = json.loads(caught.value.read())
    assert answer.get("message") or answer["error"]["message"]
