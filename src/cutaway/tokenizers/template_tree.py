"""The tree of a chat template: what is refused in it, and where the meter is put in."""

from __future__ import annotations

from typing import Any, cast

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from cutaway.errors import TemplateError
from cutaway.tokenizers.sandbox import Sandbox

__all__ = ["metered", "refuse_unsafe"]

_ATTRIBUTE_FILTERS = "attr map selectattr rejectattr groupby sort sum unique min max dictsort"


def refuse_unsafe(tree: nodes.Template, **place: Any) -> None:
    """TemplateError for loading other files, for private attributes and for Jinja's own insides."""

    def refuse(what: str, node: nodes.Node) -> None:
        raise TemplateError(f"unsafe template: {what} in line {node.lineno}", **place)

    for node in tree.find_all((nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)):
        refuse(f"{type(node).__name__.lower()} of another file", node)
    for name in tree.find_all(nodes.Name):
        if name.name == "self":
            refuse("use of self", name)
    for attribute in tree.find_all(nodes.Getattr):
        if attribute.attr.startswith("__"):
            refuse(f"attribute {attribute.attr}", attribute)
    for item in tree.find_all(nodes.Getitem):
        if isinstance(item.arg, nodes.Const) and str(item.arg.value).startswith("__"):
            refuse(f"attribute {item.arg.value}", item)
    for call in tree.find_all(nodes.Filter):
        if call.name in _ATTRIBUTE_FILTERS.split():
            for value in [*call.args, *(keyword.value for keyword in call.kwargs)]:
                path = str(value.value).split(".") if isinstance(value, nodes.Const) else []
                if any(part.startswith("__") for part in path):
                    refuse(f"attribute {'.'.join(path)}", call)


def metered(tree: nodes.Template, environment: Sandbox) -> nodes.Template:
    """The same template with its turns, joins, slices and containers going through the sandbox."""
    _Metering().visit(tree)
    tree.set_environment(environment)
    return tree


def _own_text(body: list[nodes.Node]) -> int:
    """Characters of plain text that one pass over ``body`` writes; inner loops count their own."""
    count = 0
    stack = list(body)
    while stack:
        node = stack.pop()
        if isinstance(node, nodes.TemplateData):
            count += len(node.data)
        elif not isinstance(node, nodes.For | nodes.Macro):
            stack.extend(node.iter_child_nodes())
    return count


def _via(method: str, node: nodes.Node, *args: nodes.Expr) -> nodes.Call:
    call = nodes.Call(nodes.EnvironmentAttribute(method), list(args), [], None, None)
    return call.set_lineno(node.lineno)  # type: ignore[return-value]


class _Metering(NodeTransformer):
    def _body(self, node: Any) -> Any:
        self.generic_visit(node)
        toll = _via("tick", node, nodes.Const(_own_text(node.body)))
        node.body.insert(0, nodes.ExprStmt(toll).set_lineno(node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = visit_Block = _body  # noqa: N815

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _via("concat_all", node, nodes.List(node.nodes))

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        ends = (node.arg.start, node.arg.stop, node.arg.step)
        return _via("cut", node, node.node, *(nodes.Const(None) if end is None else end for end in ends))

    def _container(self, node: Any) -> Any:
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") != "load" else _via("hold", node, node)

    visit_List = visit_Tuple = visit_Dict = _container  # noqa: N815

    def visit_Assign(self, node: nodes.Assign) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.target, nodes.NSRef):
            node.node = _via("hold", node, cast("nodes.Expr", node.node))
        return node
