"""The scripts of models/, which is not a package."""

from __future__ import annotations

import importlib.util
from types import ModuleType

from tests.support.services import MODELS


def load_script(name: str) -> ModuleType:
    """The script models/<name>.py as a module."""
    spec = importlib.util.spec_from_file_location(name, MODELS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
