"""Megatron's parsed arguments, less what does not matter, as the identity of a job.

In : the namespace after Megatron has validated it, and its parser's defaults.  Out: the line of
text that slices and recordings keep (``job_settings``).  The same command line in another order, as
``--a=b`` or with defaults spelt out is the same job.  No path of a machine is kept: of a file its
content counts.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import functools
import hashlib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_prism.core.errors import UsageError
from megatron_prism.core.jobs import job_settings
from megatron_prism.core.jobs.recipe import Recipe
from megatron_prism.core.world import MOST_EXPERTS, MOST_LAYERS, MOST_MICROBATCHES

# What does not matter, by name; whatever is not here does.
_NAMES = frozenset(
    " ".join(
        (
            # which process this is, and how processes find each other; the world is compared
            # by itself
            "rank local_rank world_size lazy_mpu_init distributed_timeout_minutes",
            "distributed_timeout_seconds_after_init",
            # how long it trains, how far it is, and a learning rate's lengths, which follow from
            # both
            "train_iters train_samples iteration curr_iteration phase_transition_iterations",
            "lr_decay_iters lr_decay_samples lr_warmup_fraction lr_warmup_iters lr_warmup_samples",
            "lr_wsd_decay_iters lr_wsd_decay_samples consumed_train_samples consumed_valid_samples",
            "consumed_train_bins skipped_train_samples num_floating_point_operations_so_far",
            # what it starts from and leaves behind; these settings take no part in an iteration
            "save save_interval save_retain_interval load ckpt_step finetune pretrained_checkpoint",
            "bert_load ict_load no_load_optim no_load_rng no_save_optim no_save_rng async_save",
            "async_strategy auto_detect_ckpt_format use_persistent_ckpt_worker verify_integrity",
            "use_dist_ckpt use_dist_ckpt_deprecated stream_ckpt_dequant",
            "use_checkpoint_opt_param_scheduler override_opt_param_scheduler",
            "override_ckpt_iteration exit_on_missing_checkpoint exit_interval",
            "exit_duration_in_mins exit_signal exit_signal_handler",
            # where data lie; how many tokens there are is padded_vocab_size
            "data_path train_data_path valid_data_path test_data_path data_args_path",
            "per_split_data_args_path data_cache_path per_dataset_sequences_path block_data_path",
            "embedding_path evidence_data_path titles_data_path object_storage_cache_path",
            "vocab_file merge_file tokenizer_model tokenizer_metadata metadata_path",
            # what it reports of itself, and where.  log_params_norm computes, and timers meet at
            # barriers in iterations that are logged: these two, log_interval and
            # timing_log_level stay
            "log_memory_interval log_memory_to_tensorboard log_timers_to_tensorboard",
            "log_throughput log_progress log_validation_ppl_to_tensorboard logging_level",
            "log_world_size_to_tensorboard log_loss_scale_to_tensorboard log_learning_rate",
            "log_learning_rate_to_tensorboard log_energy log_device_memory_used log_batch_size",
            "log_batch_size_to_tensorboard enable_one_logger no_one_logger memory_snapshot_path",
            "flight_recorder_dump_path moe_routing_trace_path yaml_cfg",
        )
    ).split()
)
_STARTS = (
    "prism_",  # ours: which rank runs, and where
    "_",  # how Megatron came to a value, which is compared itself
    # what the job reports of itself
    "tensorboard_",
    "wandb_",
    "one_logger_",
    "app_tag_",
    # how checkpoints are written
    "ckpt_",
    "dist_ckpt_",
    "async_ckpt_",
    "non_persistent_",
)
_ENDS = (
    # of this machine
    "_port",
    "_dir",
    # nobody's business
    "_api_key",
    "_password",
    "_secret",
    "_access_token",
)
recipe: Recipe | None = None  # that is trained in this process
left_out: dict[str, object] = {}  # what the job asked for and does without here
# of these, what changes time or memory: an option's name -> what is otherwise
without: dict[str, str] = {}
_LARGEST = 1 << 24  # bytes of a file that is read for its content
_DEPTH = 4


def matters(name: str) -> bool:
    """Whether jobs that differ in this argument are two."""
    return not (name in _NAMES or name.startswith(_STARTS) or name.endswith(_ENDS))


def parsed() -> Any:
    """Megatron's arguments of the stock job in this process; None where it has none, as a recipe's
    job and a program with its own training loop.
    """
    return getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)


def check_sizes() -> None:
    """UsageError for a stock job, whose arguments Megatron has parsed, that would not end."""
    if (args := parsed()) is None:
        return
    ranks = args.world_size // (
        args.tensor_model_parallel_size
        * args.pipeline_model_parallel_size
        * args.context_parallel_size
    )
    samples_of_microbatch = args.micro_batch_size * ranks
    for name, largest in (
        ("num_layers", MOST_LAYERS),
        ("num_experts", MOST_EXPERTS),
        ("global_batch_size", MOST_MICROBATCHES * samples_of_microbatch),
    ):
        value = getattr(args, name, None) or 0
        if value > largest:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(
                f"{option} {value} is more than anybody can wait for",
                fix=f"{option} {largest} or less",
            )


def of_running_job() -> str:
    """The settings of the stock job in this process, whose arguments Megatron has validated; of a
    recipe its flags; of a program that does not use Megatron's the words of its command line.
    """
    if recipe is not None:
        return job_settings.as_text(recipe.settings(text_of))
    if (args := parsed()) is None:
        return job_settings.as_text(program_settings())
    return of_namespace({**vars(args), **left_out}, megatron_parser(), sys.argv[1:])


@functools.cache
def megatron_parser() -> argparse.ArgumentParser:
    """Make Megatron's parser, which knows its defaults; once, as that takes a quarter second."""
    from megatron.training.arguments import add_megatron_arguments

    parser: argparse.ArgumentParser = add_megatron_arguments(
        argparse.ArgumentParser(add_help=False)
    )
    return parser


def of_namespace(
    values: Mapping[str, Any], parser: argparse.ArgumentParser, words: Sequence[str]
) -> str:
    """The settings in ``values`` that ``parser`` does not have as defaults; ``words``: the command
    line, which says which of them were given.
    """
    typed = tuple(word.partition("=")[0] for word in words if word.startswith("--"))
    actions: dict[str, list[argparse.Action]] = {}
    for action in parser._actions:
        actions.setdefault(action.dest, []).append(action)
    on_line, set_by_code = dict[str, str](), dict[str, str]()
    for name, value in values.items():
        own_actions = actions.get(name, [])
        if not matters(name):
            continue
        if own_actions and text_of(value) == text_of(parser.get_default(name)):
            continue
        own_option = f"--{name.replace('_', '-')}"  # of the script's own arguments
        option, text = _as_typed(own_option, value, own_actions)
        if _is_typed(own_option, own_actions, typed):
            on_line[option] = text
        elif own_actions:  # a validation's, which people know by its option
            set_by_code[option] = text
        else:  # the script's
            set_by_code[name] = text
    return job_settings.as_text(on_line, set_by_code)


def _is_typed(own_option: str, actions: Iterable[argparse.Action], typed: tuple[str, ...]) -> bool:
    """Whether a command line has an option of ``actions``, or what begins one."""
    options = list[str]()
    for action in actions:
        options += action.option_strings
    return any(option.startswith(typed) for option in options or [own_option])


def _as_typed(takes: str, value: Any, actions: Iterable[argparse.Action]) -> tuple[str, str]:
    """(option, its value) that make ``value``, as on a command line; ``takes``: where no option of
    ``actions`` takes one.
    """
    for action in actions:
        options = [option for option in action.option_strings if option.startswith("--")]
        if options and action.nargs != 0:
            takes = options[0]
        elif options:
            const = action.const
            if isinstance(action, argparse.BooleanOptionalAction):
                const = value if isinstance(value, bool) else None
                options = [o for o in options if o.startswith("--no-") != bool(value)] or options
            if type(const) is type(value) and const == value:
                return options[0], ""
    return takes, text_of(value)


def text_of(value: Any, depth: int = 0) -> str:
    """``value`` as text that is the same in every process, without paths of this machine."""
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, (bool, int, float)):
        return str(value).lower()
    if isinstance(value, (str, Path)):
        return _without_path(str(value))
    if depth >= _DEPTH:
        return type(value).__qualname__
    if isinstance(value, (set, frozenset)):
        value = sorted(value, key=lambda item: text_of(item, depth + 1))
    if isinstance(value, (list, tuple)):
        parts = " ".join(text_of(item, depth + 1) for item in value)
        return f"({parts})" if depth else parts
    if isinstance(value, Mapping):
        pairs = sorted((str(key), text_of(item, depth + 1)) for key, item in value.items())
        return "{" + " ".join(f"{key}={text}" for key, text in pairs) + "}"
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    attributes = getattr(value, "__dict__", None)
    if attributes:
        public = {key: item for key, item in attributes.items() if not key.startswith("_")}
        return f"{type(value).__qualname__}{text_of(public, depth + 1)}"
    text = str(value)  # dtypes, numpy's numbers
    if " at 0x" in text:  # an address of this process
        return type(value).__qualname__
    return text.removeprefix("torch.")


def _without_path(text: str) -> str:
    """``text``, or a digest for what names a place: of its file's content if there is one."""
    content = text.encode()
    file = Path(text)
    names_place = text.startswith(("/", "~", "./", "../")) or "://" in text
    with contextlib.suppress(OSError, ValueError):
        may_be_file = "/" in text or file.suffix
        if may_be_file and file.is_file() and file.stat().st_size <= _LARGEST:
            content = file.read_bytes()
            names_place = True
    if not names_place:
        return text
    return f"digest:{hashlib.sha1(content).hexdigest()[:12]}"


def program_words(words: Iterable[str]) -> dict[str, str]:
    """A command line as settings, for a program whose arguments nobody else parses: ``--a b`` and
    ``--a=b`` are one, and words before any flag count by their place.
    """
    settings: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            settings[name] = value
        elif name:
            settings[name] = f"{settings[name]} {word}".strip()
        else:
            settings[f"argument {len(settings) + 1}"] = word
    return {key: value for key, value in settings.items() if not key.startswith("--prism-")}


def program_settings() -> dict[str, str]:
    """What tells this program from another: the script's name and its words."""
    return {"script": os.path.basename(sys.argv[0]), **program_words(sys.argv[1:])}
