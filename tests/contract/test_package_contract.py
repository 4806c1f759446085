"""The shape of the package, read from its source: which package may import which, and how large things may grow."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import megabucket

ROOT = Path(megabucket.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))

BASE = {"_version", "errors", "units"}
MAY_IMPORT = {
    "_version": set(),
    "errors": set(),
    "units": {"errors"},
    "config": BASE,
    "trace": BASE,
    "layout": BASE | {"config", "trace"},
    "planning": BASE | {"config", "trace", "layout"},
    "report": BASE | {"config", "trace", "layout", "planning"},
    "comm": BASE | {"config", "trace", "layout"},
    "buffer": BASE | {"config", "trace", "layout", "comm"},
    # weights inside export_weights() and import_weights() alone; files never import each other in a circle
    "ddp": BASE | {"config", "trace", "layout", "comm", "buffer", "weights"},
    "weights": BASE | {"layout", "comm", "buffer", "ddp", "checkpoint"},
    "optim": BASE | {"config", "trace", "layout", "comm", "buffer", "ddp"},
    "fused": BASE | {"buffer", "comm"},
    "checkpoint": BASE | {"config", "layout", "comm", "buffer", "ddp", "optim"},
    "testing": BASE | {"config", "trace", "layout", "planning", "comm"},
    "measure": BASE | {"config", "trace", "layout", "planning", "comm", "buffer", "ddp", "optim", "checkpoint", "testing"},
    "doctor": BASE | {"config", "layout", "comm", "ddp", "optim", "measure"},
    "integrations": BASE | {"config", "layout", "comm", "ddp", "optim", "checkpoint"},
    "cli": BASE
    | {
        "config",
        "trace",
        "layout",
        "planning",
        "comm",
        "buffer",
        "ddp",
        "optim",
        "checkpoint",
        "measure",
        "report",
        "doctor",
    },
    "__init__": {"_version", "checkpoint", "config", "layout", "ddp", "measure", "optim", "weights"},  # lazily
    "__main__": {"cli"},
}
WITHOUT_TORCH = [
    "checkpoint.file_system",
    "checkpoint.catalog",
    "checkpoint.format",
    "config",
    "errors",
    "layout",
    "planning",
    "report",
    "trace",
    "units",
    "cli.main",
    "cli.plan",
    "cli.explain",
    "cli.simulate",
]
ROOT_NAMES = {f"megabucket.{name}" for name in ("__version__", *megabucket.__all__)}  # imported from the package itself


def package_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_modules(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names = [f"{node.module}.{alias.name}" if node.module == "megabucket" else node.module for alias in node.names]
            yield from ((node.lineno, name) for name in names)


def imported_packages(path: Path):
    for line, name in imported_modules(path):
        if name == "megabucket" or name in ROOT_NAMES:
            yield line, "__init__"
        elif name.startswith("megabucket."):
            yield line, name.split(".")[1]


def test_imports_follow_the_flow_of_data():
    wrong = [
        f"{path.relative_to(ROOT.parent)}:{line} imports {imported}"
        for path in MODULES
        for line, imported in imported_packages(path)
        if imported != package_of(path) and imported not in MAY_IMPORT[package_of(path)]
    ]

    assert wrong == []


def test_nothing_in_the_wheel_imports_examples_or_tests():
    files = [path for folder in ("examples", "tests") for path in (ROOT.parent / folder).rglob("*.py")]
    outside = {"examples", "tests", "pytest", *(path.stem for path in files)} - {"__init__", *sys.stdlib_module_names}
    found = [
        f"{path.relative_to(ROOT.parent)}:{line} imports {name}"
        for path in MODULES
        for line, name in imported_modules(path)
        if name.split(".")[0] in outside and package_of(path) != "testing"
    ]

    assert found == []


def test_only_integrations_import_frameworks():
    frameworks = {"accelerate", "lightning", "megatron", "transformers"}
    users = {package_of(path) for path in MODULES for _, name in imported_modules(path) if name.split(".")[0] in frameworks}

    assert users == {"integrations"}


def test_only_same_host_copies_reach_beyond_torch_and_python():
    users = [
        str(path.relative_to(ROOT))
        for path in MODULES
        if any(name.split(".")[0] == "ctypes" for _, name in imported_modules(path))
    ]

    assert users == ["comm/samehost.py"]


def test_nothing_sends_signals_to_processes():
    senders = {"kill", "killpg", "raise_signal", "pidfd_send_signal"}
    found = [
        f"{path.relative_to(ROOT.parent)}:{node.lineno}"
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in {"os", "signal"}
        and node.attr in senders
    ]

    assert found == []


def test_only_comm_and_the_wrapper_types_know_torch_distributed():
    allowed = {"comm", "measure", "doctor", "testing"}  # these set groups up, ask them, or emulate one
    users = [
        str(path.relative_to(ROOT))
        for path in MODULES
        if package_of(path) not in allowed
        and "torch.distributed" in path.read_text()
        and "import torch.distributed" in path.read_text()
    ]

    assert users == ["ddp/distributed_data_parallel.py"]  # names dist.ProcessGroup in its signature and calls nothing


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_a_fresh_interpreter_loads_it_without_torch(module):
    code = f"import sys, megabucket.{module}; assert 'torch' not in sys.modules"

    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_importing_megabucket_loads_nothing_heavy():
    code = "import sys, megabucket; assert not {'torch', 'pydantic', 'numpy', 'yaml', 'typer'} & set(sys.modules)"

    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_every_public_name_exists_and_is_listed():
    assert sorted(megabucket.__all__) == megabucket.__all__
    for name in megabucket.__all__:
        assert getattr(megabucket, name).__module__.startswith("megabucket.")
        assert name in dir(megabucket)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        megabucket.nonsense  # noqa: B018


def test_no_function_is_longer_than_60_lines():
    functions = (
        (path, node)
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )

    too_long = [f"{path.name}:{node.lineno} {node.name}" for path, node in functions if node.end_lineno - node.lineno >= 60]

    assert too_long == []


def test_nothing_probes_attributes_with_hasattr_or_rebinds_globals():
    found = [
        f"{path.name}:{node.lineno}"
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Global) or (isinstance(node, ast.Name) and node.id == "hasattr")
    ]

    assert found == []


def test_nothing_imports_apex():
    assert [path.name for path in MODULES if "import apex" in path.read_text()] == []


def test_git_and_pytest_see_every_test_file():
    """Directories called dist or build are skipped by pytest, and easily ignored by git; a whole suite was once lost so."""
    top = ROOT.parent
    skipped = {"build", "CVS", "dist", "node_modules", "venv"}  # pytest's norecursedirs without patterns
    files = [path.relative_to(top) for path in (top / "tests").rglob("test_*.py")]

    ignored = subprocess.run(["git", "check-ignore", *map(str, files)], cwd=top, capture_output=True, text=True, check=False)

    assert ignored.stdout == ""
    assert [str(path) for path in files if skipped & set(path.parts)] == []
