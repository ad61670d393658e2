"""A first look at a stock job's arguments: all that stops it, before a model is built.

Megatron's own parser and ``validate_args`` run in the job's process, as they always do.  What they
refuse is noted, and they go on as far as they can, so that one error names all.  With
``--prism-check`` the process ends there, and tells what it has found to the process that started
it.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import FunctionType

from megatron_prism.core.errors import UsageError
from megatron_prism.core.jobs.megatron_flags import TRAINING_DATA, UNEVEN_STAGES
from megatron_prism.emulate.preflight.obstacles import Obstacles
from megatron_prism.emulate.processes import workers
from megatron_prism.emulate.rank import exit_status

CHECK = "--prism-check"
_REFUSES = (AssertionError, ValueError, RuntimeError, NotImplementedError, UsageError)
_NOTE_REFUSAL = "_prism_note_refusal"  # name in the changed function
_MAKER = "_prism_make"  # name of what makes the changed function
_MOST_FLAGS = 4  # that a fix names
_MAKES_CONFIG = "core_transformer_config_from_args"  # of Megatron: the model's configuration
_MODULES_OF_CONFIG = ("megatron.training.arguments", "megatron.training.argument_utils")
_READS_BLENDS = "get_blend_and_blend_per_split"  # of Megatron: a script that uses it has no data


class FirstLook:
    """What is known of a job's arguments while Megatron reads them.

    Attributes:
        obstacles: what stops the job.
        known_options: of Megatron's parser.
        options_without_value: options of files whose value is empty.
        stand_ins: lines about what stands in for files that are not here.
    """

    def __init__(self) -> None:
        self.obstacles = Obstacles()
        self.known_options: Collection[str] = ()
        self.options_without_value: list[str] = []
        self.stand_ins: list[str] = []
        self._placeholders: set[str] = set()  # arguments that the job lacks and has to have

    def check_data(self, args: argparse.Namespace) -> None:
        """Note a job without data, whose script reads Megatron's own data sets.

        Args:
            args: of Megatron, with stand-ins in place.
        """
        has_data = any(getattr(args, name, None) for name in TRAINING_DATA)
        if has_data or getattr(args, "mock_data", True) or getattr(args, "sft", False):
            return
        if getattr(args, "dataloader_type", None) == "external" or not _reads(
            sys.argv[0], _READS_BLENDS
        ):
            return
        self.obstacles.add(
            "the job has neither --data-path nor --mock-data", "--prism-job-flags '--mock-data'"
        )

    def validate(
        self,
        validate_args: Callable[..., object],
        namespace: argparse.Namespace,
        *args: object,
        **kwargs: object,
    ) -> object:
        """Run Megatron's ``validate_args`` to its end, and raise all that stops the job.

        Args:
            validate_args: the function.
            namespace: its first argument, the job's.
            *args: of the function, too.
            **kwargs: of the function.

        Raises:
            UsageError: something stops the job.
        """

        def note(error: Exception, flags_asked: str = "") -> None:
            self._note(error, flags_asked, namespace)

        validated: object = namespace
        try:
            validated = going_on(validate_args, note)(namespace, *args, **kwargs)
        except Exception as error:
            # after a refusal, what follows from it is none
            if not len(self.obstacles):
                note(error)
            self._check_sizes(namespace)
        else:
            self._check_sizes(namespace)
            self._check_config(namespace, note)
        self.finish()
        return validated

    def _note(self, error: Exception, flags_asked: str, args: argparse.Namespace) -> None:
        """Note an error of Megatron's validation, unless it follows from another one.

        Args:
            error: Megatron's.
            flags_asked: names of the arguments that the condition reads.
            args: of Megatron; one that the job lacks gets a value, so that the rest is read.

        Raises:
            Exception: ``error``, which refuses nothing and comes first.
        """
        if not isinstance(error, _REFUSES):
            if not len(self.obstacles):
                raise error
            return  # it follows from what was refused before
        names = _names_asked(error, flags_asked, vars(args), self.known_options)
        if self._placeholders & set(names) or _repeats_batch(args, names):
            return
        self.obstacles.note(refusal(error, vars(args), flags_asked, self.known_options))
        for name in names:
            if getattr(args, name) is None:
                self._placeholders.add(name)
                setattr(args, name, 1)

    def _check_sizes(self, args: argparse.Namespace) -> None:
        """Note sizes that do not divide, which Megatron says when it builds the model, or later."""
        # the global batch is whole microbatches of all replicas
        batch_size = getattr(args, "global_batch_size", None)
        micro_batch_size = getattr(args, "micro_batch_size", None)
        replicas = getattr(args, "data_parallel_size", None)
        decreases = getattr(args, "decrease_batch_size_if_needed", False)
        if batch_size and micro_batch_size and replicas and not decreases:
            samples = micro_batch_size * replicas
            if batch_size % samples:
                fitting = max(1, batch_size // samples) * samples
                self.obstacles.add(
                    f"--global-batch-size {batch_size} is no multiple of {samples} = "
                    f"--micro-batch-size {micro_batch_size} x dp {replicas}",
                    f"--prism-job-flags '--global-batch-size {fitting}'",
                )

        # stages have equal numbers of layers, unless a flag says which have others
        layers = getattr(args, "num_layers", None)
        stages = getattr(args, "pipeline_model_parallel_size", 1)
        uneven = any(getattr(args, name, None) for name in UNEVEN_STAGES)
        # Megatron says it itself where stages have chunks
        is_said = any("layers" in obstacle.message for obstacle in self.obstacles)
        if layers and layers % stages and not uneven and not is_said:
            fitting = -(-layers // stages) * stages
            self.obstacles.add(
                f"--num-layers {layers} is no multiple of --pipeline-model-parallel-size {stages}",
                f"--prism-job-flags '--num-layers {fitting}', or "
                "--decoder-last-pipeline-num-layers N",
            )

    def _check_config(self, args: argparse.Namespace, note: Callable[[Exception], None]) -> None:
        """Note what the model's configuration refuses, as the model would when it is built."""
        make_config = None
        for name in _MODULES_OF_CONFIG:
            make_config = getattr(sys.modules.get(name), _MAKES_CONFIG, make_config)
        if make_config is None or not _reads(sys.argv[0], _MAKES_CONFIG):
            return
        global notes_of_config
        notes_of_config = note
        try:
            make_config(args)
        except UsageError as error:  # our refusal in place of Megatron's
            cause = error.__cause__
            note(cause if isinstance(cause, Exception) else error)
        except _REFUSES as error:
            note(error)
        except Exception:  # what the script makes in another way
            return
        finally:
            notes_of_config = None

    def finish(self) -> None:
        """Raise what stops the job; a process that only looks tells it and ends.

        Raises:
            UsageError: something stops the job.
        """
        emit = workers.emitter()
        if CHECK not in sys.argv or emit is None:
            self.obstacles.raise_all()
            return
        obstacles = [[obstacle.message, obstacle.fix] for obstacle in self.obstacles]
        emit("result", result={"obstacles": obstacles, "stand_ins": self.stand_ins})
        sys.stdout.flush()
        exit_status.leave(0)


notes_of_config: Callable[..., None] | None = None  # get what configurations refuse
current: FirstLook | None = None  # of the job whose arguments are read in this process


def begin() -> FirstLook:
    """Start the look at the arguments of a job in this process, or go on with one that has begun.

    A script may parse more than once before it validates (Megatron's restart in a process does):
    what the first parse refused and left out is in the list of the last.
    """
    global current
    if current is None:
        current = FirstLook()
    return current


def end() -> FirstLook | None:
    """Return the look that has begun, which nobody gets again."""
    global current
    look, current = current, None
    return look


def may_lack_data(script: str, argv: Sequence[str]) -> bool:
    """Tell whether no word of a job names data, though its script reads Megatron's own data sets.

    Megatron's reading of the arguments decides whether it does lack data (``check_data``).

    Args:
        script: of the job.
        argv: its arguments.
    """
    names = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in argv}
    if names & {*TRAINING_DATA, "mock_data", "sft", "dataloader_type"}:
        return False
    return _reads(script, _READS_BLENDS)


def _reads(script: str, name: str) -> bool:
    """Tell whether a script has a name of Megatron's in its text."""
    try:
        return name in Path(script).read_text(errors="replace")
    except OSError:
        return False


class _Refusals(ast.NodeTransformer):
    """Turn each refusal of a function into a note, after which the function goes on.

    Refusals are assertions, errors that are raised where nothing catches them, what functions
    refuse that are called for that alone, and ends of the process.
    """

    def __init__(self) -> None:
        self._conditions: list[ast.expr] = []  # of the branches around a statement

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:  # noqa: N802 - a name of ast
        asked = f"{_flags_asked(node.test)} {_variables_asked(node.test, holds=True)}"
        # if args.fp16: assert not args.bf16
        # if args.kv_channels is None: assert ...: what is not given needs no value for that
        if node.msg is None and self._conditions and not _asks_for_none(self._conditions[-1]):
            asked = f"{asked} {_flags_asked(self._conditions[-1])}"
        return _noting(node, asked.strip())

    def visit_Raise(self, node: ast.Raise) -> ast.stmt:  # noqa: N802 - a name of ast
        return _noting(node, "")

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:  # noqa: N802 - a name of ast
        # _check_arg_is_not_none(args, name), arguments.py:1277 @0.19.0
        if isinstance(node.value, ast.Call):
            return _noting(node, "")
        return node

    def visit_If(self, node: ast.If) -> ast.stmt:  # noqa: N802 - a name of ast
        # the condition of an error that is raised says which flags it is about
        refusal = _refusal_of(node.body)
        if refusal is not None:
            asked = f"{_flags_asked(node.test)} {_variables_asked(node.test, holds=False)}"
            node.body = [_noting(refusal, asked.strip())]
        else:
            self._conditions.append(node.test)
            node.body = [self.visit(statement) for statement in node.body]
            self._conditions.pop()
        node.orelse = [self.visit(statement) for statement in node.orelse]
        return node

    def visit_Try(self, node: ast.Try) -> ast.stmt:  # noqa: N802 - a name of ast
        return node  # its own handlers may want the error

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.stmt:  # noqa: N802 - a name of ast
        return node  # a function in the function

    def visit_Lambda(self, node: ast.Lambda) -> ast.expr:  # noqa: N802 - a name of ast
        return node


def _refusal_of(body: Sequence[ast.stmt]) -> ast.stmt | None:
    """Return the refusal that a branch consists of, None where it does something else.

    A branch that prints why and calls ``exit()`` refuses, too (arguments.py:586 @0.19.0).
    """
    last = body[-1]
    if len(body) == 1 and isinstance(last, ast.Raise):
        return last
    if not (isinstance(last, ast.Expr) and isinstance(last.value, ast.Call)):
        return None
    if ast.unparse(last.value.func) not in ("exit", "quit", "sys.exit"):
        return None
    printed: list[str] = []
    for part in ast.walk(ast.Module(list(body), [])):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            printed.append(part.value)
    message = " ".join(printed) or "Megatron ends here"
    refusal = ast.parse(f"raise ValueError({message!r})").body[0]
    for part in ast.walk(refusal):
        ast.copy_location(part, last)
    return refusal


def _asks_for_none(condition: ast.expr) -> bool:
    """Tell whether a condition is that something is None."""
    if not isinstance(condition, ast.Compare) or not isinstance(condition.ops[0], ast.Is):
        return False
    compared = condition.comparators[0]
    return isinstance(compared, ast.Constant) and compared.value is None


def _flags_asked(condition: ast.expr) -> str:
    """Return the arguments that a condition reads, by their names with spaces between."""
    names = []
    for node in ast.walk(condition):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names.append(node.attr)
        elif isinstance(node, ast.Name):
            names.append(node.id)
    return " ".join(dict.fromkeys(names))


def _variables_asked(condition: ast.expr, *, holds: bool) -> str:
    """Return what a condition wants of environment variables.

    Args:
        condition: of a refusal.
        holds: whether it has to hold; else it must not.

    Returns:
        ``NAME=VALUE`` for a value that is wanted and ``NAME!=VALUE`` for one that is not, with
        spaces between.
    """
    # not (…) wants the opposite
    if isinstance(condition, ast.UnaryOp) and isinstance(condition.op, ast.Not):
        return _variables_asked(condition.operand, holds=not holds)
    if isinstance(condition, ast.BoolOp):
        parts = [_variables_asked(value, holds=holds) for value in condition.values]
        return " ".join(part for part in parts if part)

    wanted = []
    for node in ast.walk(condition):
        # what stands within other operators may mean anything
        if isinstance(node, ast.UnaryOp):
            return ""
        if not isinstance(node, ast.Compare) or len(node.ops) != 1:
            continue
        name = _variable_read(node.left)
        value = node.comparators[0]
        if not name or not isinstance(value, ast.Constant) or not isinstance(value.value, str):
            continue
        # the answer has spaces between
        if " " in value.value:
            continue
        is_equal = isinstance(node.ops[0], ast.Eq)
        if is_equal or isinstance(node.ops[0], ast.NotEq):
            sign = "=" if is_equal == holds else "!="
            wanted.append(f"{name}{sign}{value.value}")
    return " ".join(wanted)


def _variable_read(expression: ast.expr) -> str:
    """Return the environment variable that an expression reads; empty where it reads none."""
    # os.environ["NAME"]
    if isinstance(expression, ast.Subscript):
        is_read = ast.unparse(expression.value) == "os.environ"
        names: Sequence[ast.expr] = [expression.slice]
    # os.getenv("NAME", "0"), os.environ.get("NAME")
    elif isinstance(expression, ast.Call):
        is_read = ast.unparse(expression.func) in ("os.getenv", "os.environ.get")
        names = expression.args
    else:
        return ""
    if is_read and names and isinstance(names[0], ast.Constant):
        return str(names[0].value)
    return ""


def _noting(refusal: ast.stmt, flags_asked: str) -> ast.stmt:
    """Wrap a statement so that its error is noted."""
    text = f"try: pass\nexcept Exception as error: {_NOTE_REFUSAL}(error, {flags_asked!r})"
    wrapper = ast.parse(text).body[0]
    assert isinstance(wrapper, ast.Try)
    for node in ast.walk(wrapper):
        ast.copy_location(node, refusal)
    wrapper.body = [refusal]
    return wrapper


def going_on(
    function: Callable[..., object], note: Callable[[Exception, str], None]
) -> Callable[..., object]:
    """Make a copy of a function that notes what it refuses, and goes on.

    Args:
        function: of Megatron.
        note: gets each error, and the arguments that its condition reads.

    Returns:
        The copy; the function itself where its text is not known.
    """
    if not isinstance(function, FunctionType):
        return function
    # a method that calls super() has its class beside its own names
    beside = inspect.getclosurevars(function).nonlocals if function.__closure__ else {}
    if set(function.__code__.co_freevars) - {"__class__"}:
        return function
    try:
        lines, first_line = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError):
        return function
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        return function
    definition.decorator_list = []
    definition.body = [_Refusals().visit(statement) for statement in definition.body]
    # errors name the lines of the file
    ast.increment_lineno(tree, first_line - 1)
    maker = ast.parse(f"def {_MAKER}(__class__):\n    return {definition.name}").body[0]
    assert isinstance(maker, ast.FunctionDef)
    maker.body.insert(0, definition)
    tree.body = [maker]
    ast.fix_missing_locations(tree)
    code = compile(tree, function.__code__.co_filename, "exec")

    # the module's own names, which the copy may also set
    names = function.__globals__
    exec(code, names)  # the text of Megatron that is about to run anyway
    copied = names.pop(_MAKER)(beside.get("__class__"))
    names[_NOTE_REFUSAL] = note
    assert callable(copied)
    return copied


def refusal(
    error: Exception,
    values: Mapping[str, object],
    flags_asked: str = "",
    known_options: Collection[str] = (),
) -> UsageError:
    """Make the error of what Megatron refuses.

    Args:
        error: Megatron's.
        values: of Megatron's arguments.
        flags_asked: names of the arguments that the condition reads, and what it wants of
            environment variables.
        known_options: of Megatron's parser; a fix names no others.
    """
    if isinstance(error, UsageError):
        return error
    place = traceback.extract_tb(error.__traceback__)[-1]
    message = str(error) or place.line
    where = f"{Path(place.filename).name}:{place.lineno} of this Megatron"
    names = _names_asked(error, flags_asked, values, known_options)
    fixes = [_fix_of_variable(word) for word in flags_asked.split() if "=" in word]
    fixes.append(_fix_of(names[:_MOST_FLAGS], values))
    fix = ", or ".join(filter(None, fixes))
    # assert args.micro_batch_size is not None
    if names and values[names[0]] is None and message and message.endswith(" is not None"):
        message = f"{_option(names[0])} is missing"
    if fix:
        fix = f"{fix} ({where})"
    else:
        fix = f"correct them: {where}"
    return UsageError(f"Megatron refuses the job's arguments: {message}", fix=fix)


def _names_asked(
    error: Exception,
    flags_asked: str,
    values: Mapping[str, object],
    known_options: Collection[str],
) -> list[str]:
    """Return the names of the arguments that a refusal is about.

    Args:
        error: of Megatron, which may name them.
        flags_asked: names that the condition reads.
        values: of Megatron's arguments.
        known_options: of Megatron's parser.
    """
    names = []
    for word in [*flags_asked.split(), *re.findall(r"[a-z]\w+", str(error).replace("-", "_"))]:
        # transformer_pipeline_model_parallel_size and encoder_seq_length are computed from the
        # options without their first words
        short = word.partition("_")[2]
        is_short = values.get(word) is None and values.get(short, "") is None
        for name in (short, word) if is_short else (word, short):
            if name in values and _option(name) in known_options:
                names.append(name)
                break
    return list(dict.fromkeys(names))


def _repeats_batch(args: argparse.Namespace, names: Sequence[str]) -> bool:
    """Tell whether a refusal is about a batch that is a copy of the global batch.

    ``_check_sizes`` says what is wrong with that one.
    """
    name = "eval_global_batch_size"
    return name in names and getattr(args, name, None) == getattr(args, "global_batch_size", None)


def _option(name: str) -> str:
    """Return the option of an argument."""
    return f"--{name.replace('_', '-')}"


def _fix_of_variable(wanted: str) -> str:
    """Say how an environment variable gets another value.

    Args:
        wanted: as of ``_variables_asked``.
    """
    name, _, value = wanted.partition("=")
    if name.endswith("!"):
        return f"take {name[:-1]}={value} out of the environment, or of the script"
    return f"export {name}={value}"


def _fix_of(names: Sequence[str], values: Mapping[str, object]) -> str:
    """Say which flags may be changed, and how; empty without names.

    Args:
        names: of the arguments.
        values: that they have now.
    """
    added = [_option(name) for name in names if values[name] is False]
    left_out = [_option(name) for name in names if values[name] is True]
    missing = [name for name in names if values[name] is None]
    changed = [name for name in names if not isinstance(values[name], bool | None)]
    fixes = []
    if added:
        fixes.append(f"--prism-job-flags '{added[0]}'")
    if left_out:
        fixes.append(f"leave {' or '.join(left_out)} out")
    if missing:
        fixes.append(f"--prism-job-flags '{_option(missing[0])} VALUE'")
    elif changed:
        now = " or ".join(f"{_option(name)} (now {values[name]})" for name in changed)
        fixes.append(f"--prism-job-flags '{_option(changed[0])} VALUE': another {now}")
    return ", or ".join(fixes)
