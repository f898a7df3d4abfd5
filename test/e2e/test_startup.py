"""A server that cannot start says why in one sentence, wherever the mistake shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from hisparse.local_server import LocalServer, ServerDied


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--hisparse-config", '{"device_buffer_size": 100}'), "device_buffer_size=100 must be a multiple of"),
        (("--hisparse-config", '{"host_memory_gib": 100000}'), "the host pool needs 100000.00 GiB but only "),
        (("--max-running-requests", "60000"), "60000 requests need"),
    ],
    ids=["server arguments", "too little memory", "scheduler"],
)
def test_one_sentence_and_no_traceback(
    plain_checkpoint: Path, tmp_path: Path, flags: tuple[str, str], sentence: str
) -> None:
    log = tmp_path / "log"
    with pytest.raises(ServerDied), LocalServer(plain_checkpoint, "--enable-hisparse", *flags, log=log):
        pass
    text = log.read_text()
    assert [line for line in text.splitlines() if line.startswith("hisparse: error: ") and sentence in line]
    assert "Traceback" not in text
