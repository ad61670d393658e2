"""Figures of how much a reader must hold in the head, of one file of Python.

Nodes of the syntax tree a statement measure nesting; line breaks do not change them.
"""

import ast
import io
import tokenize
from collections import Counter

# names of variables that say nothing of the value
EMPTY_NAMES = frozenset(
    "one ones two other others found what made mine theirs known given said told odd it those "
    "these thing things there here all_ each least most more less rest alike aside ours who whom "
    "whose whole kept way ways at_ of_ what_ got had".split()
)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
BRANCHES = (
    ast.If,
    ast.For,
    ast.While,
    ast.ExceptHandler,
    ast.IfExp,
    ast.comprehension,
    ast.Assert,
    ast.BoolOp,
)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
MOST_BRANCHES = 20
_BLANK = (
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


def figures(path):
    """Count what a file has.

    Returns:
        A Counter: nodes, statements, code_lines, comment_lines, names, empty_names,
        comprehensions, complex_comprehensions, conditional_expressions, skipped_formats and
        branchy_functions.
    """
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    code_lines, comment_lines = _lines(source, nodes)
    names = _bound_names(nodes)
    comprehensions = [node for node in nodes if isinstance(node, COMPREHENSIONS)]
    functions = [node for node in nodes if isinstance(node, FUNCTIONS)]
    return Counter(
        nodes=len(nodes),
        statements=sum(isinstance(node, ast.stmt) for node in nodes),
        code_lines=code_lines,
        comment_lines=comment_lines,
        names=len(names),
        empty_names=sum(name in EMPTY_NAMES for name in names),
        comprehensions=len(comprehensions),
        complex_comprehensions=sum(map(_is_complex, comprehensions)),
        conditional_expressions=sum(isinstance(node, ast.IfExp) for node in nodes),
        skipped_formats=source.count("fmt: skip"),
        branchy_functions=sum(branches(node) > MOST_BRANCHES for node in functions),
    )


def nodes_a_statement(counts):
    """Nodes of the syntax tree a statement."""
    return counts["nodes"] / max(1, counts["statements"])


def branches(function):
    """Ways through a function: one, and one more for each branch in it."""
    return 1 + sum(isinstance(node, BRANCHES) for node in ast.walk(function))


def _lines(source, nodes):
    """How many lines hold code, and how many hold a comment alone; docstrings are neither."""
    docstring_lines = set()
    for node in nodes:
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)) and node.body:
            first = node.body[0]
            is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            if is_text and isinstance(first.value.value, str):
                docstring_lines.update(range(first.lineno, first.end_lineno + 1))
    code_lines, comment_lines = set(), set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comment_lines.add(token.start[0])
        elif token.type not in _BLANK:
            code_lines.update(range(token.start[0], token.end[0] + 1))
    code_lines -= docstring_lines
    return len(code_lines), len(comment_lines - code_lines)


def _bound_names(nodes):
    """Names that are assigned, and parameters."""
    names = []
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.Lambda)):
            names += [argument.arg for argument in node.args.args if argument.arg != "self"]
    return names


def _is_complex(comprehension):
    """Whether it has two ``for`` or two ``if``, or another expression of several ways inside."""
    generators = comprehension.generators
    if len(generators) > 1 or len(generators[0].ifs) > 1:
        return True
    inner = (*COMPREHENSIONS, ast.NamedExpr, ast.IfExp)
    return any(
        isinstance(node, inner) for node in ast.walk(comprehension) if node is not comprehension
    )
