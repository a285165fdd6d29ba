"""Writes the API reference to docs/api, from the docstrings: `make docs`."""

from __future__ import annotations

import argparse
import importlib.util
import os
from pathlib import Path
import sys
import types
import warnings

os.environ.setdefault("PDOC_ALLOW_EXEC", "1")  # TensorFlow asks what machine this is

import pdoc

ROOT = Path(__file__).resolve().parents[1]
# Packages of other environments, with the modules of theirs that feast_tf imports.
ELSEWHERE = {
    "flwr": ("app", "clientapp", "serverapp", "serverapp.strategy"),
    "openfl": ("federated", "interface", "interface.aggregation_functions",
               "interface.aggregation_functions.core", "utilities"),
}


class _Absent(types.ModuleType):
    """Stands in for a module that is not installed: whatever is asked of it is an empty class."""

    __path__: list = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__module__": self.__name__})


def build(folder: Path) -> None:
    """Writes an HTML page for every module to a folder."""
    for package, modules in ELSEWHERE.items():
        if importlib.util.find_spec(package) is None:
            for name in (package, *(f"{package}.{module}" for module in modules)):
                sys.modules[name] = _Absent(name)
    sys.path.insert(0, str(ROOT))
    pdoc.render.configure(docformat="google", search=True, show_source=True)
    with warnings.catch_warnings():
        # Of what named tuples inherit; their fields are documented all the same.
        warnings.filterwarnings("ignore", message="Error parsing type annotation")
        pdoc.pdoc("feast_tf", output_directory=folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", type=Path, default=ROOT / "docs" / "api")
    build(parser.parse_args().output_dir)
