"""Notebooks without Jupyter: cells run one after the other, the last expression of each is shown.

`python tests/notebook.py FILE…` runs notebooks in the current directory and writes what their cells
gave into them, as they are committed. What a cell prints is cut to its first and last lines.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

_KEPT = 5  # lines at each end of what a cell prints


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def run(notebook: dict[str, Any], name: str) -> list[list[dict[str, Any]]]:
    """The outputs of each code cell, in the format of notebooks."""
    names: dict[str, Any] = {"__name__": "__main__"}
    found: list[list[dict[str, Any]]] = []
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        tree = ast.parse(source(cell))
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        place, told = f"{name}, cell {len(found) + 1}", io.StringIO()
        with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
            exec(compile(tree, place, "exec"), names)
            value = None
            if last is not None:
                value = eval(compile(ast.Expression(last.value), place, "eval"), names)
        found.append(_outputs(told.getvalue(), value, len(found) + 1))
    return found


def _outputs(told: str, value: Any, count: int) -> list[dict[str, Any]]:
    lines = told.splitlines(keepends=True)
    if len(lines) > 2 * _KEPT + 1:
        between = f"… {len(lines) - 2 * _KEPT} lines …\n"
        lines = [*lines[:_KEPT], between, *lines[-_KEPT:]]
    outputs: list[dict[str, Any]] = []
    if lines:
        outputs.append({"output_type": "stream", "name": "stdout", "text": lines})
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = value._repr_html_().splitlines(keepends=True)
        result = {"output_type": "execute_result", "data": data, "metadata": {}}
        outputs.append({**result, "execution_count": count})
    return outputs


def shape(outputs: list[list[dict[str, Any]]]) -> list[list[Any]]:
    """What kinds of output each cell has."""
    return [[(o["output_type"], *sorted(o.get("data", ()))) for o in cell] for cell in outputs]


def main() -> None:
    for path in map(Path, sys.argv[1:]):
        notebook = json.loads(path.read_text("utf-8"))
        cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        for i, (cell, outputs) in enumerate(zip(cells, run(notebook, path.name), strict=True)):
            cell |= {"outputs": outputs, "execution_count": i + 1}
        path.write_text(json.dumps(notebook, ensure_ascii=False, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
