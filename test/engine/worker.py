"""SGLang's real scheduler, one event-loop iteration at a time.

A process of its own, forked from one that has imported everything: the unmodified scheduler with model, pools and radix
tree, without HTTP server, tokenizer and detokenizer. In their place a gate: each time the event loop looks for new
requests, the gate lets it go on or waits for the next command, so what happens in which iteration is the test's choice
and never a matter of timing.

A command is one line of JSON on stdin, its answer one line on stdout (see `stepped.py`, the other end); everything that
SGLang prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from array import array
from typing import Any

import torch

SETTLED = 3
"""Idle iterations after which nothing moves any more; SGLang's idle checks have run in them."""


class Gate:
    """Takes the place of SGLang's receiving and sending sockets."""

    def __init__(self, commands: Any, answers: Any) -> None:
        self.commands, self.answers = commands, answers
        self.scheduler: Any = None
        self.left = 0  # iterations the present command still has
        self.until_idle = False
        self.idle_for = 0
        self.idle_checks = 0
        self.integrity_checks = 0
        self.retracted = 0
        self.outputs: list[dict[str, Any]] = []
        self.messages: list[str] = []

    def pull(self, receiver: Any) -> list[Any]:
        """The requests of this iteration."""
        if self.left > 0:
            self.left = 0 if self.until_idle and self._settled() else self.left - 1
            if self.left > 0:
                return []
        self.answer()  # before the first command: ready
        command = json.loads(self.commands.readline() or '{"stop": true}')
        if command.get("stop"):
            os._exit(0)  # SGLang's threads would keep the process
        self.left = command["steps"]
        self.until_idle = command["until_idle"]
        self.idle_for = 0
        return [self._request(item) for item in command["requests"] if not self._planted(item)]

    def take(self, output: Any, recv_obj: Any = None) -> None:
        """An output of the scheduler."""
        kind = type(output).__name__
        if kind == "BatchTokenIDOutput":
            for i, rid in enumerate(output.rids):
                finished = output.finished_reasons[i]
                self.outputs.append(
                    {
                        "rid": rid,
                        "output_ids": list(output.output_ids[i]),
                        "finished": finished and finished.get("type"),
                        "cached_tokens": output.cached_tokens[i],
                    }
                )
        elif kind == "AbortReq":
            self.outputs.append({"rid": output.rid, "output_ids": [], "finished": "abort", "cached_tokens": 0})
        elif kind == "FlushCacheReqOutput":
            self.messages.append(f"flushed {output.success}")

    def _settled(self) -> bool:
        self.idle_for = self.idle_for + 1 if self.scheduler.is_fully_idle() else 0
        return self.idle_for > SETTLED

    def answer(self) -> None:
        answer = {"outputs": self.outputs, "messages": self.messages, "state": self._state()}
        self.outputs, self.messages = [], []
        self.answers.write(json.dumps(answer) + "\n")
        self.answers.flush()

    def _state(self) -> dict[str, Any]:
        scheduler = self.scheduler
        tree = scheduler.tree_cache
        running = scheduler.running_batch.reqs or []
        return {
            "waiting": [req.rid for req in scheduler.waiting_queue],
            "running": [req.rid for req in running],
            "chunked": scheduler.chunked_req and scheduler.chunked_req.rid,
            "free_tokens": int(scheduler.token_to_kv_pool_allocator.available_size()),
            "evictable_tokens": int(tree.evictable_size()),
            "free_requests": len(scheduler.req_to_token_pool.free_slots),
            "idle": bool(scheduler.is_fully_idle()),
            "idle_checks": self.idle_checks,
            "integrity_checks": self.integrity_checks,
            "retracted": self.retracted,
            "max_req_len": scheduler.max_req_len,
            "max_total_tokens": scheduler.max_total_num_tokens,
            "overlap": scheduler.enable_overlap,
            "hisparse": self._hisparse(),
        }

    def _hisparse(self) -> dict[str, Any] | None:
        from hisparse.coordinator import POISON
        from hisparse.plugin.hooks import active_coordinator

        coordinator = active_coordinator(self.scheduler.tp_worker.model_runner)
        if coordinator is None:
            return None
        allocator, page_size = self.scheduler.token_to_kv_pool_allocator, self.scheduler.page_size
        free = torch.cat((allocator.free_pages, allocator.release_pages))
        rows = coordinator.host_pool.rows[:, (free[:, None] * page_size + torch.arange(page_size)).flatten()]
        return {
            "debug": coordinator.debug,
            "all_free_rows_are_poison": bool((rows == POISON).all()),
            **coordinator.statistics(),
        }

    def _planted(self, item: dict[str, Any]) -> bool:
        """Damage that SGLang's check must find."""
        planted = item["kind"] == "leak a page"
        if planted:
            self.scheduler.token_to_kv_pool_allocator.alloc(self.scheduler.page_size)
        return planted

    @staticmethod
    def _request(item: dict[str, Any]) -> Any:
        from sglang.srt.managers import io_struct
        from sglang.srt.sampling.sampling_params import SamplingParams

        if item["kind"] == "abort":
            return io_struct.AbortReq(rid=item["rid"])
        if item["kind"] == "flush":
            return io_struct.FlushCacheReqInput()
        sampling = SamplingParams(temperature=0.0, max_new_tokens=item["max_new_tokens"], ignore_eos=True)
        sampling.normalize(None)
        return io_struct.TokenizedGenerateReqInput(
            rid=item["rid"],
            input_text=None,
            input_ids=array("q", item["input_ids"]),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=sampling,
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
        )


def nurse(requests: socket.socket) -> None:
    """Fork a scheduler for each message (arguments as JSON, with stdin, stdout and stderr); answer its process id."""
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    while True:
        message, files, _, _ = socket.recv_fds(requests, 1 << 16, 3)
        if not message:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            requests.close()
            for number, file in enumerate(files):
                os.dup2(file, number)
                os.close(file)
            sys.argv[1:] = json.loads(message)
            main()
            os._exit(0)
        for file in files:
            os.close(file)
        requests.send(str(pid).encode())


def main() -> None:
    commands, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    gate = Gate(commands, answers)
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.invariant_checker import SchedulerInvariantChecker
    from sglang.srt.managers.scheduler_components.output_sender import SenderWrapper
    from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import PortArgs, prepare_server_args
    from sglang.srt.utils import configure_logger

    arguments = prepare_server_args(sys.argv[1:])
    configure_logger(arguments)
    publish(arguments, role="scheduler")
    SchedulerRequestReceiver._pull_raw_reqs = lambda receiver: gate.pull(receiver)
    SenderWrapper.send_output = gate.take
    from hisparse.coordinator import HiSparseCoordinator

    _count(SchedulerInvariantChecker, "_check_all_pools", gate, "idle_checks")
    _count(HiSparseCoordinator, "check", gate, "integrity_checks")
    scheduler = Scheduler(arguments, PortArgs.init_new(arguments), 0, 0, 0, 0, 0, 0, None)
    _count_retractions(gate)
    gate.scheduler = scheduler
    scheduler.run_event_loop()


def _count(owner: type, name: str, gate: Gate, counter: str) -> None:
    original = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        setattr(gate, counter, getattr(gate, counter) + 1)
        return original(*args, **kwargs)

    setattr(owner, name, counted)


def _count_retractions(gate: Gate) -> None:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    original = ScheduleBatch.retract_decode

    def counted(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        gate.retracted += len(result[0])
        return result

    ScheduleBatch.retract_decode = counted


if __name__ == "__main__":
    nurse(socket.socket(fileno=int(sys.argv[1])))
