"""_core.pyi and the native module have the same public names."""

import ast
from pathlib import Path

import kvpush
from kvpush import _core

STUB = Path(__file__).resolve().parents[2] / "python" / "kvpush" / "_core.pyi"


def declared():
    """Public names of the stub: module names, and class name to its members."""
    names, classes = set(), {}
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign):
            names.add(ast.unparse(node.target))
        elif isinstance(node, ast.ClassDef):
            names.add(node.name)
            members = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            members |= {ast.unparse(item.target) for item in node.body if isinstance(item, ast.AnnAssign)}
            classes[node.name] = public(members)
    return names, classes


def public(names):
    return {name for name in names if not name.startswith("_")}


def test_module_names():
    names, _ = declared()
    assert public(names) == public(vars(_core))
    assert _core.__version__ == kvpush.__version__


def test_class_members():
    _, classes = declared()
    assert {name: public(vars(getattr(_core, name))) for name in classes} == classes


def test_every_class_and_method_has_a_docstring():
    bare = []
    for name in declared()[1]:
        cls = getattr(kvpush, name, None) or getattr(_core, name)  # tools of the benchmarks stay there
        methods = [
            f"{name}.{m}"
            for m in public(vars(cls))
            if callable(getattr(cls, m)) and not getattr(cls, m).__doc__
        ]
        bare += methods if cls.__doc__ else [name, *methods]
    assert bare == []
