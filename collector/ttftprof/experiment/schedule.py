"""The order of the runs: interleaved in blocks, shuffled by the plan's seed, the same each time.

A block holds each scenario of each variant once, so that drift of the machine falls on all alike
and the runs of one block are pairs. Variants that need the server restarted stay together within a
block; their order changes from block to block.
"""

from __future__ import annotations

import random

from ttftprof.experiment.plan import READAHEAD, REQUEST_PREFIX, Plan, variants_of
from ttftprof.experiment.store import Slot


def slots_of(plan: Plan) -> list[Slot]:
    """The whole schedule; warm-up blocks come first."""
    found: list[Slot] = []
    for block in range(plan.warmups + plan.runs):
        for scenario, variant in _block(plan, block):
            found.append(Slot(len(found) + 1, block, scenario, variant, block < plan.warmups))
    return found


def needs_restart(factor: str) -> bool:
    """Whether another value of this factor means another command."""
    return factor != READAHEAD and not factor.startswith(REQUEST_PREFIX)


def _block(plan: Plan, block: int) -> list[tuple[str, str]]:
    order = random.Random(f"{plan.seed}/{block}")
    scenarios = [scenario.name for scenario in plan.chosen()]
    variants = [variant.name for variant in variants_of(plan)]
    order.shuffle(variants)
    pairs = []
    for variant in variants:
        order.shuffle(scenarios)
        pairs += [(scenario, variant) for scenario in scenarios]
    if not any(needs_restart(factor.name) for factor in plan.factors):
        order.shuffle(pairs)
    return pairs
