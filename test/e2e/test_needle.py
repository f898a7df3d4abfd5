"""A trained model through the server: with HiSparse its answers are right, and a wrong row in the hot buffer makes them
wrong. Equality of on and off cannot show that: both could be wrong.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from hisparse.local_server import LocalServer

from .pair import FORKED

ROOT = Path(__file__).parents[2]
FAULTS_FOLDER = ROOT / "test" / "mutation" / "faults"
CODES = {"Lyra": "48213", "Tovani": "20417", "Kest": "90938", "Berudo": "55172"}
ASKED = (
    ("Lyra", "Kest", "Tovani", "Berudo"),
    ("Tovani", "Berudo", "Kest", "Lyra"),
    ("Kest", "Lyra", "Berudo", "Tovani"),
    ("Berudo", "Tovani", "Lyra", "Kest"),
)
"""All in every question. What a short answer needs may happen to be seeded whole; the longer one, the more is swapped
in, and so read through a planted fault."""

TEXT_CHARACTERS = 6_500
"""About 3,000 tokens: more than ten times what a step selects, and six times the hot buffer."""


class Needle(NamedTuple):
    server: LocalServer
    fault: Path

    def answers(self) -> list[str]:
        """To the questions of `ASKED`, in one batch, the text coming from the host pool where it is cached."""
        prompts = [f"<|bos|><|user|>{_text()}\n{_question(names)}<|end|><|assistant|>" for names in ASKED]
        answers = self.server.generate(prompts, max_new_tokens=96)
        assert min(answer["meta_info"]["prompt_tokens"] for answer in answers) > 2_500
        return [answer["text"] for answer in answers]


@pytest.fixture(scope="module")
def needle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Needle]:
    directory = tmp_path_factory.mktemp("needle")
    fault = directory / "fault"
    fault.write_text("")
    environment = {
        "HISPARSE_FAULT_FILE": str(fault),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(FAULTS_FOLDER), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
    }
    flags = (
        *("--enable-hisparse", "--hisparse-config", '{"device_buffer_size": 512}'),
        *("--context-length", "4096", "--max-total-tokens", "16384", "--max-running-requests", str(len(CODES))),
        "--sleep-on-idle",
    )
    model = ROOT / "models" / "needle"
    with LocalServer(model, *flags, log=directory / "log", environment=environment, launcher=FORKED) as server:
        yield Needle(server, fault)


def test_answers_are_right_and_a_wrong_row_makes_them_wrong(needle: Needle) -> None:
    right = ["\n".join(_fact(name) for name in names) for names in ASKED]
    needle.server.generate([f"<|bos|><|user|>{_text()}"], max_new_tokens=1)  # one prefill for all questions
    assert needle.answers() == right
    needle.fault.write_text("wrong row")
    try:
        broken = needle.answers()
    finally:
        needle.fault.write_text("")
    assert all(ours != plain for ours, plain in zip(broken, right, strict=True)), broken
    assert needle.answers() == right, "the fault outlived its removal"


def _fact(name: str) -> str:
    return f"The access code of {name} is {CODES[name]}."


def _question(names: tuple[str, ...]) -> str:
    return f"What are the access codes of {', '.join(names[:-1])} and {names[-1]}?"


def _text() -> str:
    """The project's licence with the facts spread evenly from its first line to its last."""
    lines = (ROOT / "LICENSE").read_text()[:TEXT_CHARACTERS].splitlines()
    for place, name in reversed(list(enumerate(CODES))):
        lines.insert(place * len(lines) // (len(CODES) - 1), _fact(name))
    return "\n".join(lines)
