"""Train `needle`, in resumable runs that end by themselves.

    python benchmark/needle/data.py models/needle out/needle-data.npz
    python benchmark/needle/train.py models/needle out/needle-data.npz out/needle --minutes 8
    python benchmark/needle/train.py models/needle out/needle-data.npz out/needle --minutes 8 --resume out/needle

A run ends after `--minutes` or with the plan (plan.py), writes bf16 weights and its place in the plan, and prints the
recall. Resuming starts from the bf16 weights with a fresh optimizer and a short warm-up. Batches depend on the seed and
the step only, not on how the steps are spread over runs.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import data
import plan
import torch
from checkpoint import load, read_state, save
from evaluate import Maker, evaluate, table
from model import Config, Layer, Needle
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

KIND_WEIGHTS = (0.2, 0.5, 1.0)  # of the mean loss over filler and prompt, answer wording, answer digits
KL_ROWS = 128  # query positions a sequence at which the indexer learns in one step
REPORT_S = 8.0
SAVE_EVERY_S = 60.0


class Batches(Dataset):  # type: ignore[type-arg]
    """Batch of step i as item i - first."""

    def __init__(self, prepared: data.Prepared, first: int, last: int, tokens: int) -> None:
        self.prepared, self.first, self.last, self.tokens = prepared, first, last, tokens

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, item: int) -> tuple[Tensor, Tensor]:
        step = self.first + item
        stage = plan.PLAN[plan.locate(step)[0]]
        length = min(stage.length(step), self.tokens)
        ids, kinds = data.batch(self.prepared, plan.SEED, step, length, self.tokens, stage.repeat_share)
        return torch.from_numpy(ids), torch.from_numpy(kinds)


def token_losses(hidden: Tensor, head: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """hidden [N, hidden], targets [N] -> cross entropy float32 [N], whether the first choice is right bool [N]"""
    logits = F.linear(hidden, head.to(hidden.dtype)).float()
    return F.cross_entropy(logits, targets, reduction="none"), logits.argmax(-1) == targets


def language_loss(
    losses_of: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
    model: Needle,
    hidden: Tensor,
    ids: Tensor,
    kinds: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weighted sum of the mean losses by kind, and what to report."""
    targets, kinds = ids[:, 1:].flatten(), kinds[:, 1:].flatten()
    losses, hits = losses_of(hidden[:, :-1].flatten(0, 1), model.lm_head.weight, targets)
    masks = [(kinds == kind).float() for kind in range(3)]
    means = [(losses * mask).sum() / mask.sum().clamp_min(1) for mask in masks]
    total = sum((w * mean for w, mean in zip(KIND_WEIGHTS, means, strict=True)), torch.zeros((), device=ids.device))
    chat = (ids[:, :1] == 0).expand(-1, ids.shape[1] - 1).flatten().float()  # repeats do not start with <|bos|>
    report = {name: mean.detach() for name, mean in zip(("text", "reply", "code"), means, strict=True)}
    report["digits"] = (hits * masks[data.CODE] * chat).sum() / (masks[data.CODE] * chat).sum().clamp_min(1)
    repeats = masks[data.CODE] * (1 - chat)
    report["repeats"] = (hits * repeats).sum() / repeats.sum().clamp_min(1)
    return total, report


def trainable(model: Needle, kind: str) -> list[tuple[str, torch.nn.Parameter]]:
    """Freezes what the stage leaves alone; returns the rest."""
    for name, weight in model.named_parameters():
        weight.requires_grad_({"dense": ".indexer." not in name, "indexer": ".indexer." in name, "sparse": True}[kind])
    return [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]


def optimizers(weights: list[tuple[str, torch.nn.Parameter]], muon: bool) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers if asked for, AdamW for the rest."""
    matrices = [w for name, w in weights if muon and w.dim() == 2 and ".layers." in name]
    chosen = {id(w) for w in matrices}
    rest = [w for _, w in weights if id(w) not in chosen]
    out: list[torch.optim.Optimizer] = []
    if matrices:
        out.append(torch.optim.Muon(matrices, lr=0.0, weight_decay=0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw"))
    if rest:
        out.append(torch.optim.AdamW(rest, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=rest[0].is_cuda))
    return out


def kl_rows(kinds: Tensor, step: int) -> Tensor:
    """Query positions to learn at: half anywhere, half where the first sequence has its questions and answers."""
    generator = torch.Generator().manual_seed(step)
    length = kinds.shape[1]
    turns = max(int((kinds[0] == data.TEXT).long().cumprod(0).sum()) - 16, 0)
    rows = [torch.randint(low, length, (KL_ROWS // 2,), generator=generator) for low in (0, turns)]
    return torch.cat(rows).sort().values


@contextmanager
def compiled_layers(wanted: bool) -> Iterator[None]:
    """The per-token parts of a layer compiled, once for all layers and lengths; eager again on leaving."""
    before, after = Layer.before, Layer.after
    if wanted:
        Layer.before = torch.compile(before, dynamic=False)  # type: ignore[method-assign]
        Layer.after = torch.compile(after, dynamic=False)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Layer.before, Layer.after = before, after  # type: ignore[method-assign]


def progress(step: int) -> dict[str, int]:
    return {"step": step, "of": plan.total_steps(), "seed": plan.SEED}


def train(model: Needle, prepared: data.Prepared, step: int, args: argparse.Namespace, deadline: float) -> int:
    """Steps through the plan until it ends or time is up; returns the next step."""
    device = torch.device(args.device)
    last = min(plan.total_steps(), args.stop_step or plan.total_steps())
    batches = DataLoader(
        Batches(prepared, step, last, args.tokens), batch_size=None, num_workers=args.workers,
        prefetch_factor=4 if args.workers else None, pin_memory=device.type == "cuda",
    )  # fmt: skip
    losses_of = torch.compile(token_losses, dynamic=True) if args.compile else token_losses
    current, since_start, tokens = -1, 0, 0
    reported = saved = time.perf_counter()
    for ids_cpu, kinds_cpu in batches:
        index, within = plan.locate(step)
        stage = plan.PLAN[index]
        if index != current:
            current, since_start = index, 0
            weights = trainable(model, stage.kind)
            opts = optimizers(weights, args.muon)
        rate = stage.lr + (stage.lr_end - stage.lr) * within / stage.steps
        rate *= min(1.0, (since_start + 1) / plan.WARMUP_STEPS)
        ids, kinds = ids_cpu.to(device, non_blocking=True), kinds_cpu.to(device, non_blocking=True)
        rows = None if stage.kind == "dense" else kl_rows(kinds_cpu, step).to(device)
        top_k = model.config.index_topk if stage.kind == "sparse" else None
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            hidden, index_kl = model(ids, top_k, kl_rows=rows, kl_selected=stage.kind == "sparse")
            with torch.set_grad_enabled(stage.kind != "indexer"):
                loss, report = language_loss(losses_of, model, hidden, ids, kinds)
        (index_kl if stage.kind == "indexer" else loss + index_kl).backward()
        norm = torch.nn.utils.clip_grad_norm_([w for _, w in weights], 1.0)
        for opt in opts:
            for group in opt.param_groups:
                group["lr"] = rate
            opt.step()
            opt.zero_grad(set_to_none=True)
        step, since_start, tokens = step + 1, since_start + 1, tokens + ids.numel()
        if time.perf_counter() - reported > REPORT_S or step == last:
            values = {**report, "kl": index_kl.detach(), "norm": norm}
            shown = " ".join(f"{name} {float(value):.3f}" for name, value in values.items())
            now = time.perf_counter()
            left = deadline - now
            print(f"[{step:5d}/{last}] {index}:{stage.kind} {ids.shape[1]:5d} {shown} lr {rate:.1e} "
                  f"{tokens / (now - reported) / 1e3:.0f}k tok/s, {left:.0f} s left", flush=True)  # fmt: skip
            reported, tokens = now, 0
        if time.perf_counter() > saved + SAVE_EVERY_S:
            save(model, args.out, progress(step))
            saved = time.perf_counter()
        if time.perf_counter() > deadline:
            break
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="folder with config.json and tokenizer.json")
    parser.add_argument("data", type=Path, help="file written by data.py")
    parser.add_argument("out", type=Path, help="folder to write the checkpoint to")
    parser.add_argument("--resume", type=Path, help="folder of an earlier run")
    parser.add_argument("--minutes", type=float, default=9.0, help="stop training after so long (at most 9.5)")
    parser.add_argument("--stop-step", type=int, default=0, help="stop before this step of the plan")
    parser.add_argument("--step", type=int, help="start at this step of the plan instead of where --resume stopped")
    parser.add_argument("--tokens", type=int, default=plan.TOKENS_A_STEP, help="tokens a step")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--muon", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--filler", type=Path, help="held-out lines for the final evaluation (default: the docstrings)")
    parser.add_argument("--eval-samples", type=int, default=0, help="prompts a cell in the final evaluation; 0: none")
    parser.add_argument("--eval-lengths", default="1024,2048,4096,8192,16384")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if not 0 < args.minutes <= 9.5:
        parser.error(f"--minutes is {args.minutes}; a run lasts more than 0 and at most 9.5 minutes")
    deadline = time.perf_counter() + 60 * args.minutes

    torch.manual_seed(plan.SEED)
    torch.set_float32_matmul_precision("high")
    prepared = data.Prepared.load(args.data)
    if args.resume:
        model, step = load(args.resume), int(read_state(args.resume)["step"])
    else:
        model, step = Needle(Config.load(args.config)), 0
        model.initialise(plan.SEED)
    model = model.to(args.device).train()
    step = args.step if args.step is not None else step
    with compiled_layers(args.compile):
        step = train(model, prepared, step, args, deadline)
    save(model, args.out, progress(step))
    for name in ("config.json", "tokenizer.json"):
        if (args.config / name).resolve() != (args.out / name).resolve():
            shutil.copy(args.config / name, args.out / name)
    print(f"saved step {step} of {plan.total_steps()} to {args.out}", flush=True)
    if args.eval_samples:
        served = load(args.out, torch.bfloat16).to(args.device)
        maker = Maker(args.config, args.filler.read_text().splitlines() if args.filler else None)
        lengths = tuple(map(int, args.eval_lengths.split(",")))
        print(table(evaluate(served, maker, lengths, args.eval_samples, "dense,256")))


if __name__ == "__main__":
    main()
