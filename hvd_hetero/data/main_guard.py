"""Does a script start Horovod when a loader worker imports it? Pure: looks at the source only.

Workers started by forkserver or spawn import the main script again. Without a ``__main__`` guard
it runs ``hvd.init()`` there, under its parent's rank, and the job crashes or hangs inside MPI.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence


def starts_horovod_on_import(source: str) -> bool:
    """Return True when importing ``source`` would call ``init()`` of ``horovod.torch``.

    Sees calls at the top level, and in functions of the script that the top level calls. Source
    that cannot be parsed counts as harmless.
    """
    try:
        module = ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    names = set(_horovod_names(module))
    functions = {
        node.name: node.body
        for node in module.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    seen: set[str] = set()

    def starts(body: Sequence[ast.stmt]) -> bool:
        for call in _calls(body):
            function = call.func
            if (
                isinstance(function, ast.Attribute)
                and function.attr == "init"
                and ast.unparse(function.value) in names
            ):
                return True
            if isinstance(function, ast.Name) and function.id in functions.keys() - seen:
                seen.add(function.id)
                if starts(functions[function.id]):
                    return True
        return False

    return starts(module.body)


def _horovod_names(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "horovod":
                    yield alias.asname or alias.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "horovod":
            for alias in node.names:
                yield alias.asname or alias.name


def _calls(body: Sequence[ast.stmt]) -> Iterator[ast.Call]:
    """Calls that run when the statements run in an imported module."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test):
            continue
        yield from (node for node in ast.walk(statement) if isinstance(node, ast.Call))
