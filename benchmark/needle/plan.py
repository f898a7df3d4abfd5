"""The training plan: stages in the order in which DSA is trained, counted in steps of TOKENS_A_STEP tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

TOKENS_A_STEP = 65536
SEED = 2026
WARMUP_STEPS = 40  # at the start of a stage and after every resumption, since optimizer state is not kept


@dataclass(frozen=True)
class Stage:
    """One stage; `lengths` are drawn per step with `shares`, the learning rate falls linearly from `lr` to `lr_end`."""

    kind: Literal["dense", "indexer", "sparse"]
    steps: int
    lengths: tuple[int, ...]
    shares: tuple[float, ...]
    lr: float
    lr_end: float
    repeat_share: float = 0.0

    def length(self, step: int) -> int:
        return int(np.random.default_rng([SEED, 1, step]).choice(self.lengths, p=self.shares))


PLAN = (
    Stage("dense", 1400, (256, 512), (0.6, 0.4), 3e-3, 3e-3, repeat_share=0.2),
    Stage("dense", 700, (512, 1024, 2048), (0.2, 0.4, 0.4), 3e-3, 2e-3),
    Stage("dense", 700, (1024, 2048, 4096), (0.2, 0.3, 0.5), 2e-3, 1e-3),
    Stage("dense", 1000, (1024, 4096, 8192, 16384), (0.1, 0.2, 0.3, 0.4), 1e-3, 1e-4),
    Stage("indexer", 600, (1024, 4096, 16384), (0.25, 0.35, 0.4), 2e-3, 2e-4),
    Stage("sparse", 200, (1024, 4096, 8192, 16384), (0.15, 0.25, 0.3, 0.3), 3e-4, 3e-5),
)


def locate(step: int, plan: tuple[Stage, ...] = PLAN) -> tuple[int, int]:
    """(index of the stage, step within it) of a step counted from the start of the plan."""
    for index, stage in enumerate(plan):
        if step < stage.steps:
            return index, step
        step -= stage.steps
    raise ValueError(f"the plan has {sum(stage.steps for stage in plan)} steps; none is numbered that far")


def total_steps(plan: tuple[Stage, ...] = PLAN) -> int:
    return sum(stage.steps for stage in plan)
