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
from megatron_prism.emulate import exit_status, workers
from megatron_prism.emulate.obstacles import Obstacles

CHECK = "--prism-check"
UNEVEN_STAGES = (  # arguments with which stages have unequal numbers of layers
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "hybrid_override_pattern",
    "hybrid_layer_pattern",
    "encoder_num_layers",
)
_REFUSES = (AssertionError, ValueError, RuntimeError, NotImplementedError, UsageError)
_NOTE_REFUSAL = "_prism_note_refusal"  # name in the changed function
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

    def check_data(self, args: argparse.Namespace) -> None:
        """Note a job without data, whose script reads Megatron's own data sets.

        Args:
            args: of Megatron, with stand-ins in place.
        """
        names = ("data_path", "train_data_path", "data_args_path", "per_split_data_args_path")
        has_data = any(getattr(args, name, None) for name in names)
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
            if not isinstance(error, _REFUSES):
                if not len(self.obstacles):
                    raise error
                return  # it follows from what was refused before
            self.obstacles.note(refusal(error, vars(namespace), flags_asked, self.known_options))

        validated: object = namespace
        try:
            validated = _going_on(validate_args, note)(namespace, *args, **kwargs)
        except Exception as error:
            # after a refusal, what follows from it is none
            if not len(self.obstacles):
                note(error)
        else:
            self._check_sizes(namespace)
            self._check_config(namespace, note)
        self.finish()
        return validated

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
        try:
            make_config(args)
        except UsageError as error:  # our refusal in place of Megatron's
            cause = error.__cause__
            note(cause if isinstance(cause, Exception) else error)
        except _REFUSES as error:
            note(error)
        except Exception:  # what the script makes in another way
            return

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


def _reads(script: str, name: str) -> bool:
    """Tell whether a script has a name of Megatron's in its text."""
    try:
        return name in Path(script).read_text(errors="replace")
    except OSError:
        return False


class _Refusals(ast.NodeTransformer):
    """Turn each refusal of a function into a note, after which the function goes on.

    Refusals are assertions, and errors that are raised where nothing catches them.
    """

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:  # noqa: N802 - a name of ast
        return _noting(node, _flags_asked(node.test))

    def visit_If(self, node: ast.If) -> ast.stmt:  # noqa: N802 - a name of ast
        # the condition of an error that is raised says which flags it is about
        if len(node.body) == 1 and isinstance(node.body[0], ast.Raise):
            node.body = [_noting(node.body[0], _flags_asked(node.test))]
            node.orelse = [self.visit(statement) for statement in node.orelse]
            return node
        return self.generic_visit(node)  # type: ignore[return-value]

    def visit_Try(self, node: ast.Try) -> ast.stmt:  # noqa: N802 - a name of ast
        return node  # its own handlers may want the error

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.stmt:  # noqa: N802 - a name of ast
        return node  # a function in the function

    def visit_Lambda(self, node: ast.Lambda) -> ast.expr:  # noqa: N802 - a name of ast
        return node


def _flags_asked(condition: ast.expr) -> str:
    """Return the arguments that a condition reads, by their names with spaces between."""
    names = [
        node.attr
        for node in ast.walk(condition)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    ]
    return " ".join(dict.fromkeys(names))


def _noting(refusal: ast.stmt, flags_asked: str) -> ast.stmt:
    """Wrap a statement so that its error is noted."""
    text = f"try: pass\nexcept Exception as error: {_NOTE_REFUSAL}(error, {flags_asked!r})"
    wrapper = ast.parse(text).body[0]
    assert isinstance(wrapper, ast.Try)
    for node in ast.walk(wrapper):
        ast.copy_location(node, refusal)
    wrapper.body = [refusal]
    return wrapper


def _going_on(
    function: Callable[..., object], note: Callable[[Exception, str], None]
) -> Callable[..., object]:
    """Make a copy of a function that notes what it refuses, and goes on.

    Args:
        function: of Megatron.
        note: gets each error, and the arguments that its condition reads.

    Returns:
        The copy; the function itself where its text is not known.
    """
    if not isinstance(function, FunctionType) or function.__closure__:
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
    ast.fix_missing_locations(tree)
    code = compile(tree, function.__code__.co_filename, "exec")

    # the module's own names, which the copy may also set
    names = function.__globals__
    before = names.get(function.__name__)
    exec(code, names)  # the text of Megatron that is about to run anyway
    copied = names[function.__name__]
    names[function.__name__] = before
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
        flags_asked: names of the arguments that the condition reads.
        known_options: of Megatron's parser; a fix names no others.
    """
    if isinstance(error, UsageError):
        return error
    place = traceback.extract_tb(error.__traceback__)[-1]
    message = str(error) or place.line
    where = f"{Path(place.filename).name}:{place.lineno} of this Megatron"
    words = [*flags_asked.split(), *re.findall(r"[a-z]\w+", str(error).replace("-", "_"))]
    names = []
    for name in dict.fromkeys(words):
        if name in values and _option(name) in known_options:
            names.append(name)
    fix = _fix_of(names[:_MOST_FLAGS], values)
    if fix:
        fix = f"{fix} ({where})"
    else:
        fix = f"correct them: {where}"
    return UsageError(f"Megatron refuses the job's arguments: {message}", fix=fix)


def _option(name: str) -> str:
    """Return the option of an argument."""
    return f"--{name.replace('_', '-')}"


def _fix_of(names: Sequence[str], values: Mapping[str, object]) -> str:
    """Say which flags may be changed, and how; empty without names.

    Args:
        names: of the arguments.
        values: that they have now.
    """
    added = [_option(name) for name in names if values[name] is False]
    left_out = [_option(name) for name in names if values[name] is True]
    changed = [name for name in names if not isinstance(values[name], bool)]
    fixes = []
    if added:
        fixes.append(f"--prism-job-flags '{added[0]}'")
    if left_out:
        fixes.append(f"leave {' or '.join(left_out)} out")
    if changed:
        now = " or ".join(f"{_option(name)} (now {values[name]})" for name in changed)
        fixes.append(f"--prism-job-flags '{_option(changed[0])} VALUE': another {now}")
    return ", or ".join(fixes)
