"""BUILD says what may import what; these tests compare it with the imports in the sources."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
from pathlib import Path
import shutil
import subprocess
import sys
from typing import Iterator, Mapping, Optional

import pytest

ROOT = Path(__file__).resolve().parents[1]

# A target may depend on those before it only, so there can be no cycle either.
ORDER = (
    "feast_tf",
    "versions",
    "seeding",
    "files",
    "report_html",
    "space",
    "population",
    "routing",
    "rounds",
    "datasets",
    "planning",
    "supernet",
    "training",
    "serving",
    "keras_slices",
    "trainer",
    "flower",
    "openfl",
    "aggregation",
    "algorithms",
    "runtime",
    "simulation",
    "configs",
    "tff_programs",
    "search_cache",
    "plan",
    "worker",
    "run",
    "evaluate",
    "export",
)
FEDERATED = {"aggregation", "algorithms", "runtime", "simulation", "worker", "run", "evaluate",
             "export"}
TENSORFLOW = FEDERATED | {
    "supernet", "training", "serving", "keras_slices", "trainer", "flower", "openfl"}
NUMPY_ONLY = set(ORDER) - TENSORFLOW


@dataclasses.dataclass(frozen=True)
class Target:
    """One rule of BUILD; `deps` are names without the colon."""

    rule: str
    name: str
    srcs: tuple[str, ...]
    deps: tuple[str, ...]


def _glob(patterns: list[str]) -> list[str]:
    found = {path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()}
    return sorted(str(path.relative_to(ROOT)) for path in found)


def _targets() -> dict[str, Target]:
    """Runs BUILD, whose language is a subset of Python, with rules that note their arguments."""
    targets = {}

    def rule(kind: str):
        def note(name, srcs, deps=(), **_):
            assert name not in targets, f"BUILD names {name} twice"
            targets[name] = Target(
                kind, name, tuple(srcs), tuple(label.lstrip(":") for label in deps)
            )

        return note

    rules = {kind: rule(kind) for kind in ("py_library", "py_binary", "py_test")}
    exec((ROOT / "BUILD").read_text(), {"glob": _glob, "package": lambda **_: None, **rules})
    return targets


TARGETS = _targets()
CODE = {name: target for name, target in TARGETS.items() if target.rule != "py_test"}


def _imports(path: str) -> Iterator[str]:
    """Dotted names that a source file imports anywhere, also inside functions."""
    for node in ast.walk(ast.parse((ROOT / path).read_text(), path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} has a relative import; name the package"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _module(path: str) -> str:
    return path[: -len(".py")].replace("/", ".").removesuffix(".__init__")


OWNERS = {_module(path): target.name for target in CODE.values() for path in target.srcs}


def _owner(name: str, owners: Mapping[str, str]) -> Optional[str]:
    """The target that holds a dotted name: the longest prefix of it that is a module."""
    while name:
        if name in owners:
            return owners[name]
        name = name.rpartition(".")[0]
    return None


def _imported_targets(target: Target) -> set[str]:
    owners = {_owner(name, OWNERS) for path in target.srcs for name in _imports(path)}
    return owners - {None, target.name}


def _closure(names: set[str]) -> set[str]:
    return names.union(*(_closure(set(CODE[name].deps)) for name in names))


def test_every_source_is_in_one_target():
    sources = _glob(["feast_tf/**/*.py", "tff_programs/**/*.py", "configs/**/*.py"])
    assert sorted(path for target in CODE.values() for path in target.srcs) == sources


def test_targets_are_those_of_the_architecture():
    assert tuple(CODE) == ORDER
    assert [name for name, target in CODE.items() if not target.srcs] == []


@pytest.mark.parametrize("name", ORDER)
def test_deps_are_the_imports(name):
    imported = _imported_targets(CODE[name])
    paste = "".join(f'        ":{dep}",\n' for dep in sorted(imported))
    assert list(CODE[name].deps) == sorted(imported), (
        f'the sources of "{name}" import what BUILD should list as\n    deps = [\n{paste}    ],'
    )


@pytest.mark.parametrize("name", ORDER)
def test_imports_go_leftwards_only(name):
    allowed = set(ORDER[: ORDER.index(name)])
    wrong = sorted(
        f"{path} imports {imported}"
        for path in CODE[name].srcs
        for imported in _imports(path)
        if _owner(imported, OWNERS) not in allowed | {None, name}
    )
    assert wrong == []


@pytest.mark.parametrize(
    "forbidden, names",
    [
        pytest.param(("tensorflow", "keras", "jax"), NUMPY_ONLY, id="numpy_only"),
        pytest.param(("tensorflow_federated",), set(ORDER) - FEDERATED, id="without_federated"),
    ],
)
def test_heavy_packages_are_imported_only_where_allowed(forbidden, names):
    wrong = sorted(
        f"{path} imports {imported}"
        for name in names
        for path in CODE[name].srcs
        for imported in _imports(path)
        if imported.split(".")[0] in forbidden
    )
    assert wrong == []
    assert _closure(names) == names, "a dependency brings the package in"


def test_packages_load_without_what_they_must_not_need():
    numpy_only = [module for module, owner in OWNERS.items() if owner in NUMPY_ONLY]
    elsewhere = {name for name in ("flower", "openfl") if not importlib.util.find_spec(
        {"flower": "flwr"}.get(name, name))}
    without_federated = [module for module, owner in OWNERS.items()
                         if owner not in FEDERATED | elsewhere]
    script = f"""
import importlib, sys
sys.modules["tensorflow_federated"] = None  # An import of it raises ImportError.
for module in {numpy_only}:
    importlib.import_module(module)
assert "tensorflow" not in sys.modules, "a NumPy-only package loads TensorFlow"
for module in {without_federated}:
    importlib.import_module(module)
"""
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_every_test_file_is_a_test_target():
    tests = {target.srcs[0]: target for target in TARGETS.values() if target.rule == "py_test"}
    assert sorted(tests) == _glob(["tests/**/*_test.py"])
    for path, target in tests.items():
        assert _imported_targets(target) <= _closure(set(target.deps)), path


def test_bazel_reads_the_same_targets(tmp_path):
    bazel = shutil.which("bazel")
    if bazel is None:
        pytest.skip("bazel is not on the PATH")
    if " " in str(ROOT):
        pytest.skip("bazel refuses folders with blanks in their names")
    # --batch leaves no server behind.
    query = subprocess.run(
        [bazel, "--batch", f"--output_user_root={tmp_path}", "query", "//..."],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        timeout=60,
        check=True,
        text=True,
    )
    assert sorted(query.stdout.split()) == sorted(f"//:{name}" for name in TARGETS)
