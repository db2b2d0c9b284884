"""The modules as they would be without taps: their source with every ``tap`` taken out, as a package ``bare``."""

from __future__ import annotations

import ast
from pathlib import Path

import cutaway.modules

TAPS = ("tap", "inner")  # what taps are called in modules/


class Untapped(ast.NodeTransformer):
    """Takes taps to be None, and folds what then is known; parameters and arguments go."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(None) if node.id in TAPS and isinstance(node.ctx, ast.Load) else node

    def visit_arguments(self, node: ast.arguments) -> ast.AST:
        kept = [
            (arg, i - len(node.args) + len(node.defaults)) for i, arg in enumerate(node.args) if arg.arg not in TAPS
        ]
        node.defaults = [node.defaults[at] for _, at in kept if at >= 0]
        node.args = [arg for arg, _ in kept]
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        node.args = [arg for arg in node.args if not (isinstance(arg, ast.Name) and arg.id in TAPS)]
        node.keywords = [word for word in node.keywords if word.arg not in TAPS]
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        self.generic_visit(node)
        is_tap = isinstance(node.targets[0], ast.Name) and node.targets[0].id in TAPS
        return None if is_tap else node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.left, ast.Constant) and node.left.value is None:
            return ast.Constant(isinstance(node.ops[0], ast.Is))
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        """Known values at the front decide, or go."""
        self.generic_visit(node)
        ends = isinstance(node.op, ast.Or)
        values = []
        for value in node.values:
            if isinstance(value, ast.Constant) and isinstance(value.value, bool):
                if value.value is ends:
                    values.append(value)
                    break
            else:
                values.append(value)
        if not values:
            return ast.Constant(not ends)
        return values[0] if len(values) == 1 else ast.BoolOp(node.op, values)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.test, ast.Constant):
            return node.body if node.test.value else node.orelse
        return node

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt] | None:
        self.generic_visit(node)
        if isinstance(node.test, ast.Constant):
            return node.body if node.test.value else (node.orelse or None)
        node.body = node.body or [ast.Pass()]
        return node


def bare_source(path: Path) -> str:
    """A module's source without taps, of the package ``bare``."""
    tree = Untapped().visit(ast.parse(path.read_text()))
    return ast.unparse(ast.fix_missing_locations(tree)).replace("cutaway.modules", "bare")


def write(folder: Path) -> None:
    """Put the package into a folder; all but what hands layers on."""
    (folder / "bare").mkdir()
    for path in Path(cutaway.modules.__file__).parent.glob("*.py"):
        if path.stem not in ("__init__", "stack", "embedding"):
            source = bare_source(path)
            left = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name) and node.id in TAPS]
            assert not left, f"{path.stem} still has taps"
            (folder / "bare" / path.name).write_text(source)
