"""The console script with fake services in the place of the draft, the target and the orchestrator.

FAKE_STACK, a JSON object, names the arguments of each: {"draft": ["--mode", "exits"]}.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from unittest import mock

from tandem.cli import demo, main, up
from tandem.cli.plan import StackPlan, plan_stack
from tandem.cli.settings import StackSettings


def fake_plan(settings: StackSettings) -> StackPlan:
    """The real plan with other commands. Models aren't needed, so any folder will do for one."""
    arguments = json.loads(os.environ.get("FAKE_STACK", "{}"))
    plan = plan_stack(settings)
    services = tuple(
        spec
        if spec.name == "redis"
        else dataclasses.replace(
            spec,
            command=(sys.executable, "-m", "tests.cli.fake_service", str(spec.listen), *arguments.get(spec.name, [])),
        )
        for spec in plan.services
    )
    return dataclasses.replace(plan, services=services)


if __name__ == "__main__":
    with mock.patch.object(up, "plan_stack", fake_plan), mock.patch.object(demo, "plan_stack", fake_plan):
        sys.exit(main.main())
