"""The site: `sphinx-build -W docs site` (extra docs). All pages are Markdown.

The page api.md is written here while it is read, out of the sources of the package: docstrings are
Markdown too, and nothing of the package is imported. No page loads anything from elsewhere.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1] / "electra"

project = "electra"
release = re.findall(r'__version__ = "(.+)"', (PACKAGE / "__init__.py").read_text())[0]
extensions = ["myst_parser"]
myst_heading_anchors = 3
suppress_warnings = ["ref.python"]  # two modules have a class of one name
html_theme = "furo"
html_title = f"electra {release}"
html_copy_source = html_show_copyright = False
add_module_names = False
python_use_unqualified_type_names = True


def reference(module: str) -> str:
    """A module's docstring and what in it is public and has one."""
    path = PACKAGE.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(file.read_text(encoding="utf-8"))
    name = f"electra.{module}".rstrip(".")
    head = f"## {name}\n\n```{{py:module}} {name}\n```"
    return "\n\n".join([head, ast.get_docstring(tree) or "", *members(tree)])


def members(parent: ast.Module | ast.ClassDef) -> Iterator[str]:
    """Functions, classes and documented fields as directives, with what is inside of them."""
    for node, after in zip(parent.body, [*parent.body[1:], ast.Pass()], strict=True):
        match node, after:
            case ((ast.FunctionDef() | ast.ClassDef()), _):
                text = ast.get_docstring(node)
                own = node.name
            case ast.AnnAssign(ast.Name(own)), ast.Expr(ast.Constant(str(text))):
                pass
            case _:
                continue
        if own.startswith("_") or not text:
            continue
        inside: list[str] = []
        match node:
            case ast.FunctionDef():
                decorators = {d.id for d in node.decorator_list if isinstance(d, ast.Name)}
                kind = "method" if isinstance(parent, ast.ClassDef) else "function"
                head = f"{own}({ast.unparse(node.args)})"
                if "property" in decorators:
                    kind, head = "property", own
                elif node.returns is not None:
                    head += f" -> {ast.unparse(node.returns)}"
            case ast.ClassDef():
                kind, head = "class", own
                inside = list(members(node))
            case _:
                kind, head = "attribute", f"{own}\n:type: {ast.unparse(node.annotation)}"
        fence = "`" * (3 if kind != "class" else 5)
        body = "\n\n".join([text, *inside])
        yield f"{fence}{{py:{kind}}} {head}\n\n{body}\n{fence}"


def fill_in(_app: Any, page: str, source: list[str]) -> None:
    """The reference; and a menu of the pages that are there."""
    if page == "api":
        named = re.findall(r"^- ([\w.]+)$", source[0], re.M)
        paths = [path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py")]
        there = {".".join(path.parts).removesuffix("__init__").rstrip(".") for path in paths}
        rest = sorted(there - {*named, "", "__main__"})
        parts = [source[0].partition("\n- ")[0], *map(reference, ["", *named, *rest])]
        source[0] = "\n\n".join(parts)
    elif page == "index":
        there = {path.stem for path in Path(__file__).parent.glob("*.md")}
        entry = re.compile(r"^[\w-]+$", re.M)
        source[0] = entry.sub(lambda m: m[0] if m[0] in there else "", source[0])


def setup(app: Any) -> None:
    app.connect("source-read", fill_in)
