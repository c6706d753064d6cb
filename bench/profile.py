"""What the overhead is made of: the profile of an orchestrator as shares of its event loop's CPU time."""

from __future__ import annotations

import pstats
from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.table import Table

from .services import REPOSITORY

TOP = 30


def profile_tables(file: Path) -> list[Table]:
    """The project's own functions with all that they call, the modules, and the functions with the most time of their
    own."""
    stats: Any = pstats.Stats(str(file))
    own: dict[tuple[str, int, str], float] = {key: value[2] for key, value in stats.stats.items()}
    calls: dict[tuple[str, int, str], int] = {key: value[1] for key, value in stats.stats.items()}
    total = sum(own.values())
    by_module: dict[str, float] = defaultdict(float)
    for (path, _, name), seconds in own.items():
        by_module[_module(path, name)] += seconds
    modules = _table("module", by_module, total)
    functions = Table(title="functions, by their own time", title_justify="left")
    for column in ("function", "calls", "ms", "share"):
        functions.add_column(column, justify="left" if column == "function" else "right")
    for key in sorted(own, key=lambda each: -own[each])[:TOP]:
        name = f"{_module(key[0], key[2])}:{key[1]} {key[2]}"
        functions.add_row(name[:100], str(calls[key]), f"{1000 * own[key]:.1f}", f"{100 * own[key] / total:.1f} %")
    return [_stages(stats, total), modules, functions]


def _stages(stats: Any, total: float) -> Table:
    """What the parts of a round take, one inside another; a function that waits doesn't count while it waits."""
    table = Table(title="functions of the project, with what they call", title_justify="left")
    for column in ("function", "calls", "us per call", "share"):
        table.add_column(column, justify="left" if column == "function" else "right")
    ours = {key: value for key, value in stats.stats.items() if _is_ours(key[0])}
    for (path, line, name), value in sorted(ours.items(), key=lambda item: -item[1][3])[:TOP]:
        calls, cumulative = value[1], value[3]
        row = (str(calls), f"{1e6 * cumulative / calls:.1f}", f"{100 * cumulative / total:.1f} %")
        table.add_row(f"{_module(path, name)}:{line} {name}", *row)
    return table


def _table(title: str, shares: dict[str, float], total: float) -> Table:
    table = Table(title=f"{title}, by own time", title_justify="left")
    table.add_column(title)
    table.add_column("share", justify="right")
    for name, seconds in sorted(shares.items(), key=lambda pair: -pair[1])[:TOP]:
        table.add_row(name, f"{100 * seconds / total:.1f} %")
    return table


def _module(path: str, name: str) -> str:
    if path == "~":
        return name.partition(" of ")[2].strip(">'") or name
    file = Path(path)
    if _is_ours(path):
        return str(file.relative_to(REPOSITORY))
    return "/".join(file.parts[-2:])


def _is_ours(path: str) -> bool:
    file = Path(path)
    return file.is_relative_to(REPOSITORY) and not any(part.startswith(".") for part in file.parts)
