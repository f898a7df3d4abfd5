"""Streaming requests to SGLang's /generate, with the arrival time of every token."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from dataclasses import dataclass, field

import aiohttp


@dataclass
class Stream:
    """One request. `arrivals`: seconds (perf_counter) at which each output token came."""

    sent: float
    arrivals: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first token."""
        return self.arrivals[0] - self.sent


@dataclass(frozen=True)
class Window:
    """What arrived between two moments: running = streams that got a token, gaps = seconds between tokens."""

    seconds: float
    running: int
    tokens: int
    gaps: list[float]

    @classmethod
    def of(cls, streams: list[Stream], start: float, end: float) -> Window:
        inside = [[t for t in stream.arrivals if start <= t < end] for stream in streams]
        gaps = [b - a for times in inside for a, b in itertools.pairwise(times)]
        return cls(end - start, sum(bool(times) for times in inside), sum(map(len, inside)), sorted(gaps))

    def gap_ms(self, share: float) -> float:
        """The gap that this share of all gaps does not exceed, in ms; 0 where there is none."""
        return 1e3 * self.gaps[min(int(len(self.gaps) * share), len(self.gaps) - 1)] if self.gaps else 0.0


def prompt(seed: int, length: int, vocabulary: int) -> list[int]:
    """Token ids without meaning, the same for the same arguments."""
    source = random.Random(seed)
    return [source.randrange(10, vocabulary) for _ in range(length)]


def start(session: aiohttp.ClientSession, url: str, prompt_ids: list[int], new_tokens: int) -> Stream:
    """Send a request; its stream fills while the event loop runs."""
    stream = Stream(sent=time.perf_counter())
    stream.task = asyncio.create_task(_read(session, url, prompt_ids, new_tokens, stream))
    return stream


async def _read(
    session: aiohttp.ClientSession, url: str, prompt_ids: list[int], new_tokens: int, stream: Stream
) -> None:
    body = {
        "input_ids": prompt_ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
        "stream": True,
    }
    try:
        async with session.post(url + "/generate", json=body) as answer:
            if answer.status != 200:
                stream.error = f"{answer.status}: {(await answer.text())[:300]}"
                return
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    stream.error = str(event["error"])[:300]
                    return
                now = time.perf_counter()
                ids = event["output_ids"]  # of this event alone: --incremental-streaming-output
                stream.tokens += ids
                stream.arrivals += [now] * len(ids)
    except aiohttp.ClientError as error:
        stream.error = repr(error)[:300]


async def finish(streams: list[Stream]) -> None:
    """Disconnect; SGLang aborts the requests."""
    for stream in streams:
        if stream.task is not None:
            stream.task.cancel()
    await asyncio.gather(*(s.task for s in streams if s.task is not None), return_exceptions=True)


def session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None), read_bufsize=2**20
    )
