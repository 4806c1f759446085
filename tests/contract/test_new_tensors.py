"""A tensor that the package makes has the dtype and device that the code says, whatever the caller's defaults are."""

import ast
from pathlib import Path

import megabucket

PACKAGE = Path(megabucket.__file__).parent
FACTORIES = {
    "arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand", "randint",
    "randn", "randperm", "scalar_tensor", "tensor", "zeros",
}  # fmt: skip


def of_torch(tree):
    """The calls of functions of torch that make a tensor in default dtype or device."""
    for node in ast.walk(tree):
        is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FACTORIES
        if is_call and isinstance(node.func.value, ast.Name) and node.func.value.id == "torch":
            yield node


def test_every_new_tensor_names_its_dtype_and_its_device():
    unnamed = []
    num_found = 0
    for path in sorted(PACKAGE.rglob("*.py")):
        for call in of_torch(ast.parse(path.read_text())):
            num_found += 1
            missing = {"dtype", "device"} - {keyword.arg for keyword in call.keywords}
            if missing:
                unnamed.append(f"{path.relative_to(PACKAGE)}:{call.lineno}: torch.{call.func.attr}() without {sorted(missing)}")

    assert not unnamed, "\n".join(unnamed)
    assert num_found > 20
