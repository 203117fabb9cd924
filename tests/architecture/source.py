"""The source tree as the architecture tests see it: modules, imports, sizes."""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ("_pb2.py", "_pb2_grpc.py")


@dataclass(frozen=True)
class Module:
    """One hand-written Python file. `name` is its import name."""

    name: str
    path: Path

    @property
    def tree(self) -> ast.Module:
        return _parse(self.path)

    @property
    def line_count(self) -> int:
        return len(self.path.read_text().splitlines())

    def imports(self) -> frozenset[str]:
        """Returns every imported module's full name, also those imported within functions."""
        return _imports(self)


@cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


@cache
def _imports(module: Module) -> frozenset[str]:
    found: set[str] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module.name}: relative import in line {node.lineno}"
            found.add(node.module or "")
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(found)


@cache
def modules() -> tuple[Module, ...]:
    """Returns the hand-written modules of the SDK and the services."""
    found = []
    for top, package in ((ROOT / "sdk", "loraport"), (ROOT, "services")):
        for path in sorted((top / package).rglob("*.py")):
            if not path.name.endswith(GENERATED) and "__pycache__" not in path.parts:
                parts = path.relative_to(top).with_suffix("").parts
                name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                found.append(Module(name, path))
    return tuple(found)


def within(name: str, prefixes: tuple[str, ...]) -> bool:
    """Says whether a module is one of `prefixes` or lies below one."""
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)
