"""What stops a job is one list: obstacles, Megatron's refusals, files without a value."""

import argparse
import ast
import json
import os
import pickle
import subprocess
import sys
import types

import pytest
from helpers.needs import TRAINING
from helpers.stock_jobs import TINY
from rich.console import Console

from megatron_prism.core.errors import UsageError
from megatron_prism.emulate.command_line.path_map import PathMap
from megatron_prism.emulate.jobs import script_job
from megatron_prism.emulate.preflight import first_look, stand_ins, unknown_flags
from megatron_prism.emulate.preflight.obstacles import Obstacles, ObstaclesError


def test_several_obstacles_are_one_error_and_one_is_itself():
    obstacles = Obstacles()
    obstacles.add("a", "--fix-a")
    with pytest.raises(UsageError) as caught:
        obstacles.raise_all()
    assert (caught.value.message, caught.value.fix) == ("a", "--fix-a")
    obstacles.add("a", "another")
    with obstacles.noting():
        raise UsageError("b")
    with pytest.raises(ObstaclesError) as caught:
        obstacles.raise_all()
    assert str(caught.value).splitlines() == [
        "2 things stop this job",
        "  1. a",
        "     fix: --fix-a",
        "  2. b",
    ]
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.obstacles == caught.value.obstacles
    merged = Obstacles()
    merged.note(again)
    assert len(merged) == 2


def validate_args(args, defaults):
    """Refuse arguments in the ways of Megatron's function."""
    assert args.hidden_size % args.heads == 0
    if args.bf16:
        assert not args.fp16, "bf16 with fp16"
    assert args.save_interval > 0  # a TypeError, after a refusal
    if args.layers < defaults["least"]:
        raise ValueError("too few layers")
    if args.layers > 100:
        raise ValueError("too many")
    args.ratio = args.layers / args.zero
    return args


REFUSED = {"hidden_size": 250, "heads": 4, "bf16": True, "fp16": True, "layers": 1, "zero": 0}


def test_all_that_megatron_refuses_is_said_and_what_follows_is_not():
    look = first_look.FirstLook()
    look.known_options = {"--hidden-size", "--heads", "--fp16", "--layers"}
    args = argparse.Namespace(**REFUSED, save_interval=None)
    with pytest.raises(ObstaclesError) as caught:
        look.validate(validate_args, args, {"least": 2})
    messages = [obstacle.message.partition(": ")[2] for obstacle in caught.value.obstacles]
    assert messages == [
        "assert args.hidden_size % args.heads == 0",
        "bf16 with fp16",
        "too few layers",
    ]
    fixes = [obstacle.fix for obstacle in caught.value.obstacles]
    assert fixes[0].startswith(
        "--prism-job-flags '--hidden-size VALUE': another --hidden-size (now 2"
    )
    assert fixes[1].startswith("leave --fp16 out")
    line = validate_args.__code__.co_firstlineno + 2
    assert f"test_first_look.py:{line} " in fixes[0]


def check_environment(args):
    """Refuse variables in the ways of Megatron's function (arguments.py:1437, :1858 @0.19.0)."""
    if args.offloads:
        assert os.getenv("PRISM_TEST_OFFLOADS", "0") == "1", "set it"
        assert os.environ.get("PRISM_TEST_QUEUES") != "1", "not one"
        if os.environ["PRISM_TEST_GRAPHS"] != "yes":
            raise ValueError("no graphs")


def test_a_refusal_of_a_variable_says_which_value_it_wants(monkeypatch):
    for name, value in (("OFFLOADS", "0"), ("QUEUES", "1"), ("GRAPHS", "no")):
        monkeypatch.setenv(f"PRISM_TEST_{name}", value)
    with pytest.raises(ObstaclesError) as caught:
        first_look.FirstLook().validate(check_environment, argparse.Namespace(offloads=True))
    fixes = [obstacle.fix.partition(" (")[0] for obstacle in caught.value.obstacles]
    assert fixes == [
        "export PRISM_TEST_OFFLOADS=1",
        "take PRISM_TEST_QUEUES=1 out of the environment, or of the script",
        "export PRISM_TEST_GRAPHS=yes",
    ]


@pytest.mark.parametrize(
    ("condition", "holds", "wanted"),
    [
        ("not (os.getenv('X') == '1')", True, "X!=1"),
        ("not os.environ.get('X') == '1'", True, "X!=1"),
        ("a and not (os.environ['X'] != '1')", False, "X!=1"),
        ("not (not os.getenv('X') == '1')", True, "X=1"),
        ("a or os.getenv('X') == '1'", True, "X=1"),
        ("int(not os.getenv('X') == '1')", True, ""),
    ],
)
def test_a_negated_condition_wants_the_opposite_value(condition, holds, wanted):
    expression = ast.parse(condition, mode="eval").body
    assert first_look._variables_asked(expression, holds=holds) == wanted


def test_a_job_that_megatron_takes_is_validated_as_ever():
    args = argparse.Namespace(
        hidden_size=256, heads=4, bf16=True, fp16=False, layers=4, zero=2, save_interval=1
    )
    assert first_look.FirstLook().validate(validate_args, args, {"least": 2}) is args
    assert args.ratio == 2
    assert validate_args.__globals__["validate_args"] is validate_args


def test_an_error_of_another_kind_is_that_error():
    args = argparse.Namespace(
        hidden_size=256, heads=4, bf16=True, fp16=False, layers=4, zero=0, save_interval=1
    )
    with pytest.raises(ZeroDivisionError):
        first_look.FirstLook().validate(validate_args, args, {"least": 2})


@pytest.mark.parametrize(
    ("sizes", "fix"),
    [
        ({"global_batch_size": 9}, "--prism-job-flags '--global-batch-size 8'"),
        ({"num_layers": 5}, "--prism-job-flags '--num-layers 6', or "),
        ({"num_layers": 5, "decoder_last_pipeline_num_layers": 1}, None),
        ({"global_batch_size": 9, "decrease_batch_size_if_needed": True}, None),
        ({}, None),
    ],
)
def test_sizes_that_do_not_divide_are_noted(sizes, fix):
    look = first_look.FirstLook()
    args = {"global_batch_size": 8, "micro_batch_size": 2, "data_parallel_size": 2,
            "num_layers": 4, "pipeline_model_parallel_size": 2, **sizes}  # fmt: skip
    look._check_sizes(argparse.Namespace(**args))
    assert [obstacle.fix[: len(fix or "")] for obstacle in look.obstacles] == ([fix] if fix else [])


@pytest.mark.parametrize(
    ("args", "text", "stops"),
    [
        ({}, "get_blend_and_blend_per_split", True),
        ({}, "its own data", False),
        ({"mock_data": True}, "get_blend_and_blend_per_split", False),
        ({"data_path": ["x"]}, "get_blend_and_blend_per_split", False),
        ({"dataloader_type": "external"}, "get_blend_and_blend_per_split", False),
    ],
)
def test_a_job_without_data_is_noted_where_its_script_has_none(
    args, text, stops, tmp_path, monkeypatch
):
    (tmp_path / "x.py").write_text(text)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "x.py")])
    look = first_look.FirstLook()
    look.check_data(argparse.Namespace(**{"mock_data": False, **args}))
    assert len(look.obstacles) == stops


def test_the_parser_s_refusals_are_noted_and_files_without_a_value_are_none(monkeypatch):
    words = "--foo 1 --num-layers four --vocab-file --save --lr --mock"
    monkeypatch.setattr(sys, "argv", ["x.py", *words.split()])

    def parse_args(provider=None, ignore_unknown_args=False):
        parser = argparse.ArgumentParser(allow_abbrev=False)
        parser.add_argument("--num-layers", type=int, default=0)
        for option in ("--vocab-file", "--save", "--lr"):
            parser.add_argument(option)
        parser.add_argument("--mock", action="store_true")
        return parser.parse_known_args()[0] if ignore_unknown_args else parser.parse_args()

    look = first_look.FirstLook()
    args = unknown_flags.parse_all(parse_args, None, look=look)
    assert (args.vocab_file, args.save, args.mock) == (stand_ins.NO_FILE, None, True)
    assert look.options_without_value == ["--vocab-file", "--save"]
    messages = " ".join(obstacle.message for obstacle in look.obstacles)
    for text in ("--foo is in no release", "invalid int value: 'four'", "--lr: expected one"):
        assert text in messages


@pytest.mark.parametrize("words", [[], [""]])
def test_data_that_a_command_did_not_find_are_mock_data(words):
    none = dict.fromkeys(("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "load"))
    args = argparse.Namespace(**none, mock_data=False, data_path=words, eval_interval=1)
    replaced = stand_ins.put(args)
    assert args.mock_data
    assert args.data_path is None
    assert "mock data for --data-path" in replaced.text


def test_obstacles_of_stand_ins_are_collected():
    none = dict.fromkeys(("vocab_file", "merge_file", "vocab_size"))
    args = argparse.Namespace(
        **none, mock_data=True, tokenizer_type="HuggingFaceTokenizer", tokenizer_model="a/b",
        load="/no/where", use_checkpoint_args=True, eval_interval=1,
    )  # fmt: skip
    obstacles = Obstacles()
    stand_ins.put(args, obstacles)
    assert len(obstacles) == 2
    assert not args.use_checkpoint_args


def test_paths_are_mapped_as_a_whole():
    paths = PathMap.parse(["/data=/mine", "/data/text=here"])
    text = "--a=/data/x /data2 /my/data /data/text/y '/data' /data.old"
    assert paths.in_text(text) == "--a=/mine/x /data2 /my/data here/y '/mine' /data.old"


def test_a_look_is_of_one_job():
    look = first_look.begin()
    assert first_look.end() is look
    assert first_look.end() is None


@TRAINING
@pytest.mark.slow
def test_a_script_s_obstacles_are_one_list_before_any_rank_trains(tmp_path):
    """Of the script, of its world, of Megatron's parser, of its validation and of its sizes."""
    (tmp_path / "train.sh").write_text(
        "set -e\n"
        f"torchrun --nnodes $NNODES --nproc-per-node 8 /their/{TINY.name} --num-layers 4 "
        "--hidden-size 66 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 32 "
        "--micro-batch-size 1 --global-batch-size 8 --tensor-model-parallel-size 2 "
        "--train-iters 4 --lr 1e-4 --fork-flag "
        "--mock-data --tokenizer-type NullTokenizer --vocab-size 500 --bf16 --save $SAVE\n"
    )
    words = ["--check", "--json", "--map", f"/their={TINY.parent}", "bash", "train.sh"]
    run = subprocess.run(
        [sys.executable, "-m", "megatron_prism", "capture", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={name: text for name, text in os.environ.items() if name not in ("NNODES", "SAVE")},
    )
    assert run.returncode == 1, run.stderr
    check = json.loads(run.stdout)
    assert check["stops"]
    fixes = [obstacle["fix"] for obstacle in check["obstacles"]]
    parts = ["NNODES=N before prism", "--prism-ignore-unknown"]
    parts += ["--hidden-size VALUE", "--max-position-embeddings VALUE"]
    for fix, part in zip(fixes, parts, strict=True):
        assert part in fix
    assert check["stand_ins"][0] == "no value: --save"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.sh"]


@pytest.mark.parametrize(
    ("pairs", "text", "there"),
    [
        # what stands below its old path is replaced once, however often it is read
        (["/data=/data/alice"], "/data/x /data", "/data/alice/x /data/alice"),
        # nor is what stands for one path replaced as another
        (["/a/b=/a/c", "/a=/z"], "/a/b/1 /a/2", "/a/c/1 /z/2"),
    ],
)
def test_what_stands_for_a_path_is_not_replaced_again(pairs, text, there):
    paths = PathMap.parse(pairs)
    assert paths.in_text(text) == there
    assert paths.in_text(there) == there


def test_what_an_earlier_parse_refused_stays_in_the_list():
    """Megatron's restart in a process parses the line before the script does."""
    first = first_look.begin()
    first.obstacles.add("--global-batch-size cannot be 1,024", "1024")
    again = first_look.begin()
    assert [obstacle.fix for obstacle in again.obstacles] == ["1024"]
    assert first_look.end() is first
    assert first_look.begin() is not first
    first_look.end()


def check_is_there(args, name):
    if getattr(args, name) is None:
        raise AssertionError(f"{name} argument is None")


def validate_job(args, defaults):
    """Ask for values, and refuse in the other ways of Megatron's function."""
    assert args.micro_batch_size is not None
    assert args.micro_batch_size > 0
    if args.old_flag:
        print("--old-flag is no longer valid")
        sys.exit()
    for name in ("num_layers", "hidden_size"):
        check_is_there(args, name)
    # what follows from a placeholder is no refusal
    assert args.hidden_size % 64 == 0, "hidden_size is no multiple of 64"
    if args.fp16:
        assert not args.bf16
    assert args.transformer_heads % 2 == 0, "odd"
    args.encoder_seq_length = args.seq_length
    assert args.encoder_seq_length is not None
    return args


def test_all_that_a_job_lacks_is_said():
    look = first_look.FirstLook()
    names = ("micro-batch-size", "num-layers", "hidden-size", "old-flag", "fp16", "bf16", "heads")
    look.known_options = {f"--{name}" for name in (*names, "seq-length", "encoder-seq-length")}
    lacking = dict.fromkeys(("micro_batch_size", "num_layers", "hidden_size", "seq_length"))
    args = argparse.Namespace(
        **lacking, old_flag=True, fp16=True, bf16=True, heads=3, transformer_heads=3
    )
    with pytest.raises(ObstaclesError) as caught:
        look.validate(validate_job, args, {})
    fixes = [obstacle.fix.partition(" (test_")[0] for obstacle in caught.value.obstacles]
    assert fixes == [
        "--prism-job-flags '--micro-batch-size VALUE'",
        "leave --old-flag out",
        "--prism-job-flags '--num-layers VALUE'",
        "--prism-job-flags '--hidden-size VALUE'",
        "leave --bf16 or --fp16 out",
        "--prism-job-flags '--heads VALUE': another --heads (now 3)",
        "--prism-job-flags '--seq-length VALUE'",
    ]
    messages = [obstacle.message.partition(": ")[2] for obstacle in caught.value.obstacles]
    assert messages[:2] == ["--micro-batch-size is missing", "--old-flag is no longer valid"]


class Settings:
    """A configuration with two faults, which checks itself as Megatron's do."""

    def __post_init__(self):
        super().__init__()
        if self.heads % 2:
            raise ValueError("heads are odd")
        assert self.layers % 2 == 0, "layers are odd"


def test_all_that_a_configuration_refuses_is_said():
    errors = []
    settings = Settings()
    settings.heads, settings.layers = 3, 5
    going_on = first_look.going_on(
        Settings.__post_init__, lambda error, asked: errors.append((str(error), asked))
    )
    going_on(settings)
    assert errors == [("heads are odd", "heads self"), ("layers are odd", "layers self")]


def test_a_copy_of_the_batch_is_refused_once():
    def validate(args):
        assert args.eval_global_batch_size % 8 == 0, "eval_global_batch_size is no multiple"

    look = first_look.FirstLook()
    look.known_options = {"--eval-global-batch-size"}
    sizes = {"micro_batch_size": 2, "data_parallel_size": 4, "num_layers": 2}
    args = argparse.Namespace(global_batch_size=250, eval_global_batch_size=250, **sizes)
    with pytest.raises(UsageError) as caught:
        look.validate(validate, args)
    assert caught.value.fix == "--prism-job-flags '--global-batch-size 248'"


def test_each_unknown_flag_has_its_own_fix(monkeypatch):
    words = ["--schedule", "0:16", "2:320", "4:624"]
    monkeypatch.setattr(sys, "argv", ["x.py", *words])
    error = unknown_flags.unknown(["--num_layers", "4", "--mine"], {"--num-layers"})
    assert [obstacle.fix.split()[0] for obstacle in error.obstacles] == [
        "--num-layers",
        "--prism-ignore-unknown",
    ]
    error = unknown_flags.unknown(words[2:], {"--schedule"})
    assert error.message == "words that belong to no option: 2:320 4:624, behind --schedule"
    assert error.fix == "quotes around the value of --schedule"


@pytest.mark.ci
@pytest.mark.megatron
@TRAINING
def test_what_else_stops_a_job_is_said_where_its_checkout_is_missing(tmp_path):
    """By the Megatron that is installed, which says so."""
    (tmp_path / "train.sh").write_text(
        "torchrun --nproc-per-node 8 /their/Megatron-LM/pretrain_gpt.py --num-layers 2 "
        "--hidden-size 250 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
        "--micro-batch-size 1 --global-batch-size 12 --train-iters 4 --lr 1e-4 --fork-flag "
        "--mock-data --tokenizer-type NoTokenizer --bf16\n"
    )
    words = ["--check", "--json", "bash", "train.sh"]
    run = subprocess.run(
        [sys.executable, "-m", "megatron_prism", "capture", *words],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 1, run.stderr
    messages = [obstacle["message"] for obstacle in json.loads(run.stdout)["obstacles"]]
    assert messages[0] == "there is no script /their/Megatron-LM/pretrain_gpt.py"
    assert all("installed here: " in message for message in messages[1:])
    for part in ("--tokenizer-type: invalid choice", "--fork-flag", "--global-batch-size 12"):
        assert part in "".join(messages)


def test_options_of_a_part_of_megatron_are_none_of_no_release(tmp_path, monkeypatch):
    (tmp_path / "post_training").mkdir()
    options = "group.add_argument('--distills', action='store_true')"
    (tmp_path / "post_training" / "arguments.py").write_text(options)
    megatron = types.ModuleType("megatron")
    megatron.__path__ = [str(tmp_path)]
    monkeypatch.setitem(sys.modules, "megatron", megatron)
    error = unknown_flags.unknown(["--distills", "--distil"], {"--num-layers"})
    of_part, of_nobody = error.obstacles
    assert "megatron.post_training" in of_part.message
    assert of_part.fix.startswith("pip install nvidia-modelopt, or --prism-ignore-unknown")
    assert "no release" in of_nobody.message


@pytest.mark.parametrize(
    ("words", "lacks"),
    [("--lr 1", True), ("--data-path a", False), ("--mock-data", False), ("--sft", False)],
)
def test_a_job_without_data_is_looked_at_before_its_ranks_start(
    words, lacks, tmp_path, monkeypatch
):
    script = tmp_path / "pretrain_gpt.py"
    script.write_text("from megatron.training.utils import get_blend_and_blend_per_split")
    looked = []

    class LookedError(Exception):
        pass

    def check(*args):
        looked.append(args[0])
        raise LookedError

    def capture(*args, **kwargs):
        raise LookedError

    monkeypatch.setattr(script_job, "check_command_line", check)
    monkeypatch.setattr(script_job, "capture", capture)
    argv = ["--prism-world-size", "8", "--prism-tier", "meta", *words.split()]
    with pytest.raises(LookedError):
        script_job.capture_command_line(str(script), argv, tmp_path / "out", Console())
    assert looked == [str(script)] * lacks
