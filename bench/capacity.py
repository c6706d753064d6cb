"""`python -m bench simulate`: how many drafts for each target, which gamma, up to which distance; and where separate services don't pay.

Three layouts at every load, each with the gamma that suits it best: plain decoding, the draft on the target's own device, and drafts on
devices of their own. The first two are taken at their best, as an engine in one process has it: all requests move in step. Those of
services take turns as they come (see `simulate`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.table import Table

from .simulation import IN_STEP, IN_TURNS, Constants, Curve, Layout, Simulated, simulate
from .tables import results_table

PLAIN, TOGETHER = "plain", "draft on the target's device"
FARTHEST = 0.5
"""Seconds: a round trip that is as good as none at all."""
HALVINGS = 10
EXAMPLE = Constants(
    draft_step=Curve(((1.0, 0.0020), (16.0, 0.0026), (64.0, 0.0040))),
    target_forward=Curve(((1.0, 0.0300), (8.0, 0.0310), (64.0, 0.0340), (256.0, 0.0600), (512.0, 0.1100))),
    overhead=0.0025,
    orchestrator=0.0005,
    acceptance=(0.80, 0.78, 0.76, 0.75),
)
"""Made up, in the proportions of a large model on a GPU with a draft fifteen times cheaper."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityOptions:
    """What to plan for."""

    constants: Constants = EXAMPLE
    requests: Sequence[int] = (1, 4, 16, 64)
    """At the same time, for each target."""
    targets_per_draft: Sequence[int] = (1, 2, 4, 8)
    gammas: Sequence[int] = (1, 2, 3, 4, 5, 6, 8)
    round_trip: float = 0.0005
    """Seconds between the orchestrator and each worker."""
    ahead: float = 0.0
    """Share of blocks that a draft on a device of its own has ready when they are asked for."""
    draft_price: float = 0.25
    """Of a draft's device, in those of a target's."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One layout at one load, at its best gamma."""

    requests: int
    layout: str
    drafts_per_target: float
    gamma: int
    tokens_per_second: float
    """For each target."""
    speedup: float
    """Over plain decoding."""
    speedup_for_the_price: float
    """The same for what the devices cost."""
    milliseconds_per_token: float
    """As one request sees it."""
    draft_busy: float
    target_busy: float


@dataclass(frozen=True, slots=True)
class BreakEven:
    """How far away a draft of its own may be, in milliseconds of round trip; 0 where it never pays, infinite where it always does."""

    requests: int
    against_plain: float
    against_together: float


@dataclass(frozen=True, slots=True)
class CapacityResult:
    """The whole plan."""

    constants: Constants
    round_trip: float
    ahead: float
    draft_price: float
    plans: list[Plan]
    break_even: list[BreakEven]
    verdicts: list[str]


def plan_capacity(options: CapacityOptions) -> CapacityResult:
    """All layouts at all loads."""
    plans, limits, verdicts = [], [], []
    for requests in options.requests:
        at_load = _plans(options, requests)
        plans += at_load
        limits.append(_break_even(options, requests, {plan.layout: plan.tokens_per_second for plan in at_load}))
        verdicts.append(verdict(at_load))
    return CapacityResult(
        options.constants, options.round_trip, options.ahead, options.draft_price, plans, limits, verdicts
    )


def _plans(options: CapacityOptions, requests: int) -> list[Plan]:
    trip = options.round_trip
    layouts = {
        PLAIN: (Layout(target_round_trip=trip), (0,)),
        TOGETHER: (Layout(drafts=0, target_round_trip=trip), options.gammas),
    }
    for targets in options.targets_per_draft:
        layout = Layout(
            targets=targets, orchestrators=targets, draft_round_trip=trip, target_round_trip=trip, ahead=options.ahead
        )
        layouts[f"1 draft for {targets}"] = (layout, options.gammas)
    plans: list[Plan] = []
    for name, (layout, gammas) in layouts.items():
        spread = IN_STEP if name in (PLAIN, TOGETHER) else IN_TURNS
        gamma, found = _best(options.constants, layout, requests * layout.targets, gammas, spread)
        rate = found.tokens_per_second / layout.targets
        drafts = 0.0 if name in (PLAIN, TOGETHER) else layout.drafts / layout.targets
        speedup = rate / plans[0].tokens_per_second if plans else 1.0
        plans.append(
            Plan(
                requests=requests,
                layout=name,
                drafts_per_target=drafts,
                gamma=gamma,
                tokens_per_second=rate,
                speedup=speedup,
                speedup_for_the_price=speedup / (1.0 + options.draft_price * drafts),
                milliseconds_per_token=1000 * requests / rate,
                draft_busy=found.draft_busy,
                target_busy=found.target_busy,
            )
        )
    return plans


def _best(
    constants: Constants, layout: Layout, requests: int, gammas: Sequence[int], spread: float
) -> tuple[int, Simulated]:
    found = {gamma: simulate(constants, layout, requests=requests, gamma=gamma, spread=spread) for gamma in gammas}
    gamma = max(found, key=lambda each: found[each].tokens_per_second)
    return gamma, found[gamma]


def _break_even(options: CapacityOptions, requests: int, rates: dict[str, float]) -> BreakEven:
    """For a draft of each target's own; only the way to the draft gets longer."""

    def rate(round_trip: float) -> float:
        layout = Layout(draft_round_trip=round_trip, target_round_trip=options.round_trip, ahead=options.ahead)
        return _best(options.constants, layout, requests, options.gammas, IN_TURNS)[1].tokens_per_second

    return BreakEven(requests, 1000 * last_above(rate, rates[PLAIN]), 1000 * last_above(rate, rates[TOGETHER]))


def last_above(rate: Callable[[float], float], wanted: float) -> float:
    """The largest argument, up to FARTHEST, at which a falling `rate` is above `wanted`; 0 where none is, infinite where FARTHEST is."""
    if rate(0.0) <= wanted:
        return 0.0
    if rate(FARTHEST) > wanted:
        return math.inf
    low, high = 0.0, FARTHEST
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if rate(middle) > wanted else (low, middle)
    return low


def verdict(plans: Sequence[Plan]) -> str:
    """Whether separate services pay at this load, and against what."""
    by_layout = {plan.layout: plan for plan in plans}
    together = by_layout[TOGETHER]
    apart = max((plan for plan in plans if plan.drafts_per_target), key=lambda plan: plan.speedup)
    cheap = max((plan for plan in plans if plan.drafts_per_target), key=lambda plan: plan.speedup_for_the_price)
    said = f"{apart.requests} requests a target: "
    if apart.speedup <= 1.0 and together.speedup <= 1.0:
        return said + "plain decoding is best; speculation doesn't pay here."
    said += f"apart gives {apart.speedup:.2f}x of plain ({apart.layout}, gamma {apart.gamma}), "
    said += f"the target's own device {together.speedup:.2f}x (gamma {together.gamma}). "
    if apart.speedup <= together.speedup:
        said += "Separate services DON'T PAY in speed: what they buy is isolation, and two pools that scale apart."
    elif cheap.speedup_for_the_price <= together.speedup:
        said += f"Each target gives {apart.speedup / together.speedup - 1:.0%} more apart, but the money gives less: "
        said += f"{cheap.speedup_for_the_price:.2f}x at best ({cheap.layout})."
    else:
        said += f"Apart pays, also for its price: {cheap.speedup_for_the_price:.2f}x ({cheap.layout})."
    return said


def capacity_tables(result: CapacityResult) -> list[Table | str]:
    """The plan, the distances, and what follows from them in words."""
    table = results_table(
        f"Simulated: round trip {1000 * result.round_trip:g} ms, {result.ahead:.0%} of the blocks ahead, a draft's device at "
        f"{result.draft_price:g} of a target's",
        (
            *("requests/target", "layout", "gamma", "tok/s a target", "x plain", "for the price", "ms/token"),
            *("draft busy", "target busy"),
        ),
    )
    for plan in result.plans:
        table.add_row(
            str(plan.requests),
            plan.layout,
            str(plan.gamma),
            f"{plan.tokens_per_second:.1f}",
            f"{plan.speedup:.2f}",
            f"{plan.speedup_for_the_price:.2f}",
            f"{plan.milliseconds_per_token:.1f}",
            f"{plan.draft_busy:.0%}" if plan.drafts_per_target else "",
            f"{plan.target_busy:.0%}",
            style="" if plan.speedup >= 1 else "yellow",
            end_section=plan is result.plans[-1] or plan.layout == f"1 draft for {_most_targets(result)}",
        )
    limits = results_table(
        "How far away a draft of each target's own may be (round trip, ms)",
        ("requests/target", "faster than plain", "faster than on the target's device"),
    )
    for limit in result.break_even:
        limits.add_row(str(limit.requests), _distance(limit.against_plain), _distance(limit.against_together))
    table.caption = "plain, and the draft on the target's device: one process, all requests in step. Drafts apart: requests take turns as they come."
    return [table, limits, *result.verdicts]


def _most_targets(result: CapacityResult) -> int:
    return round(1 / min(plan.drafts_per_target for plan in result.plans if plan.drafts_per_target))


def _distance(milliseconds: float) -> str:
    if not milliseconds:
        return "never"
    return "at any distance" if math.isinf(milliseconds) else f"up to {milliseconds:.1f}"
