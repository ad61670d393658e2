"""What stands in for files that are not here, and flags that a Megatron does not know."""

import argparse
import sys
from types import SimpleNamespace

import pytest

from megatron_prism.core.errors import UsageError
from megatron_prism.emulate.preflight import stand_ins, unknown_flags

NONE = dict.fromkeys((
    "tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "data_path", "vocab_size",
    "train_data_path", "data_args_path", "load", "pretrained_checkpoint",
))  # fmt: skip


@pytest.fixture
def put(tmp_path, monkeypatch):
    """(the job's arguments afterwards, what was said) of some arguments."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr(stand_ins, "megatron_release", lambda: "0.19.2")
    (tmp_path / "here.idx").touch()
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "config.json").write_text('{"vocab_size": 5000}')

    def put(*, loads_own_layout=False, **given):
        args = argparse.Namespace(**{**NONE, "mock_data": False, **given})
        return args, stand_ins.put(args, loads_own_layout=loads_own_layout).text

    return put


@pytest.mark.parametrize(
    ("given", "entries"),
    [
        ({"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": "no"}, 32000),
        ({"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "no.json"}, 50257),
        ({"tokenizer_type": "GPT2BPETokenizer"}, 50257),
        ({"tokenizer_type": None, "vocab_file": "no.json", "merge_file": "no.txt"}, 50257),
        ({"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "Qwen/Qwen3-8B"}, 151936),
        ({"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "/x/Meta-Llama-3-8B"},
         128256),
        ({"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": "here/no.model"}, 5000),
        ({"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": "no", "vocab_size": 7}, 7),
        ({"tokenizer_type": "NullTokenizer", "tokenizer_model": "no", "vocab_size": 7}, 7),
    ],
)  # fmt: skip
def test_a_tokenizer_that_is_not_here_is_one_of_its_vocabulary(put, given, entries):
    args, said = put(**given)
    assert (args.tokenizer_type, args.vocab_size) == ("NullTokenizer", entries)
    assert (args.tokenizer_model, args.vocab_file) == (None, None)
    assert (f"{entries:,} tokens" in said) == (given["tokenizer_type"] != "NullTokenizer")


def test_the_null_tokenizer_of_0_16_adds_a_token(put, monkeypatch):
    monkeypatch.setattr(stand_ins, "megatron_release", lambda: "0.16.1")
    assert put(tokenizer_type="Llama2Tokenizer", tokenizer_model="no")[0].vocab_size == 31999


@pytest.mark.parametrize(
    ("given", "mock"),
    [
        ({"data_path": ["0.3", "no/text_document"]}, True),
        ({"train_data_path": ["no"]}, True),
        ({"data_args_path": "no.txt"}, True),
        ({"data_path": ["no"], "mock_data": True}, True),
        ({"data_path": ["0.5", "here", "s3://bucket/text"]}, False),
        ({}, False),
    ],
)
def test_data_that_are_not_here_are_mock_data(put, given, mock):
    args, said = put(**given)
    assert args.mock_data == mock
    if mock:
        assert (args.data_path, args.train_data_path, args.data_args_path) == (None,) * 3
    assert ("mock data" in said) == (mock and "mock_data" not in given)


def test_an_interval_that_megatron_divides_by_is_its_former_default(put):
    args, said = put(eval_interval=None)
    assert (args.eval_interval, "--eval-interval 1000" in said) == (1000, True)
    assert put(eval_interval=7)[0].eval_interval == 7


@pytest.mark.parametrize(("ckpt_format", "kept"), [("torch_dist", "no/where"), ("torch", None)])
def test_a_checkpoint_of_the_jobs_own_layout_stands_in_where_it_is_asked_for(
    put, ckpt_format, kept
):
    given = {"load": "no/where", "ckpt_format": ckpt_format}
    args, said = put(loads_own_layout=True, **given)
    assert args.load == kept
    assert ("a checkpoint of the job's own layout" in said) == (kept is not None)
    assert ("new parameters for --load" in said) == (kept is None)
    assert put(**given)[0].load is None


def test_a_checkpoint_that_is_not_here_is_none(put):
    args, said = put(load="no/where", pretrained_checkpoint="here")
    assert (args.load, args.pretrained_checkpoint) == (None, "here")
    assert "--load" in said
    with pytest.raises(UsageError, match="--use-checkpoint-args"):
        put(load="no/where", use_checkpoint_args=True)
    with pytest.raises(UsageError, match="--prism-iteration"):
        put(load="no/where", prism_iteration="7")


def stand_ins_of(put, **given):
    """All that is known of the stand-ins of these arguments."""
    args = argparse.Namespace(**{**NONE, "mock_data": False, **given})
    return args, stand_ins.put(args)


@pytest.mark.parametrize(
    ("flags", "reads"),
    [
        ({"load": "no"}, True),
        ({"load": "no", "finetune": True}, False),
        ({"load": "no", "no_load_optim": True}, False),
        ({"pretrained_checkpoint": "no"}, False),
        ({"data_path": ["no"]}, False),
    ],
)
def test_reading_a_checkpoint_takes_memory_that_no_iteration_has(put, flags, reads):
    _, replaced = stand_ins_of(put, **flags)
    assert replaced.without_checkpoint == reads
    assert ("reading the checkpoint takes more" in replaced.text) == reads
    assert "of an iteration are the same" in replaced.text


@pytest.mark.parametrize(
    ("flags", "is_guessed"),
    [
        ({"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": "no"}, True),
        ({"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "Qwen/Qwen3-8B"}, True),
        ({"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": "no", "vocab_size": 7}, False),
        ({"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": "here/no.model"}, False),
    ],
)
def test_a_vocabulary_that_a_name_tells_is_a_guess(put, flags, is_guessed):
    _, replaced = stand_ins_of(put, **flags)
    assert bool(replaced.vocabulary) == is_guessed
    assert ("are the same" in replaced.text) != is_guessed
    assert ("those of that many tokens" in replaced.text) == is_guessed


def test_no_checkpoint_is_written_in_the_background(put):
    args, replaced = stand_ins_of(put, async_save=True, use_persistent_ckpt_worker=True)
    assert (args.async_save, args.use_persistent_ckpt_worker) == (False, False)
    assert "--async-save" in replaced.text


def test_what_a_tenth_more_of_a_guess_would_take_is_said_once():
    torch = pytest.importorskip("torch")
    said = []
    model = torch.nn.Module()
    model.output_layer = torch.nn.Linear(8, 1000, bias=False, dtype=torch.bfloat16)
    model.output_layer.weight.main_grad = torch.zeros(1)
    model.post_process = True
    args = SimpleNamespace(
        padded_vocab_size=2000, tensor_model_parallel_size=2, data_parallel_size=4,
        context_parallel_size=1, use_distributed_optimizer=True, micro_batch_size=1,
        seq_length=100, optimizer="adam", exp_avg_dtype=torch.bfloat16,
        exp_avg_sq_dtype=torch.float32, use_precision_aware_optimizer=False,
    )  # fmt: skip
    optimizer = SimpleNamespace(param_groups=[{"params": [torch.zeros(1 << 20)]}])
    replaced = stand_ins.StandIns("", "2,000 tokens, that of x", without_checkpoint=True)
    remarks = stand_ins.Remarks(replaced, lambda: args, said.append)
    for number in (1, 2):
        remarks.iteration_started(number, 2, [model], optimizer)
    reading, vocabulary = said
    assert "states may exist twice: 6 MiB" in reading
    # a tenth of 8,000 parameters of 2 + 4 + 12 / 4 bytes; of 100 x 1,000 logits of 6 bytes
    assert "takes 7.031 KiB more of parameters" in vocabulary
    assert "58.59 KiB of a microbatch's logits" in vocabulary
    del model.output_layer, model.post_process
    remarks.iteration_started(1, 2, [model], None)
    assert len(said) == 2  # a stage in between has no part of the vocabulary


def test_what_nobody_knows_is_asked_for_and_strict_names_all(put):
    hub = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "someone/some-8B"}
    with pytest.raises(UsageError, match="someone/some-8B") as caught:
        put(**hub)
    assert caught.value.fix == "--prism-job-flags '--vocab-size N'"
    # a variable of the script is empty
    with pytest.raises(UsageError, match="Tokenizer has no name and no file, and nothing says"):
        put(**{**hub, "tokenizer_model": stand_ins.NO_FILE})
    with pytest.raises(UsageError) as caught:
        put(**hub, data_path=["no"], load="gone", prism_strict=True)
    for word in ("--tokenizer-model someone/some-8B", "--data-path no", "--load gone"):
        assert word in caught.value.message


def parsed(words, monkeypatch):
    """By a parser as Megatron's, which knows two options."""
    monkeypatch.setattr(sys, "argv", ["x.py", *words.split()])

    def parse_args(provider=None, ignore_unknown_args=False):
        parser = argparse.ArgumentParser(allow_abbrev=False)
        parser.add_argument("--num-layers", type=int, default=0)
        parser.add_argument("--prism-ignore-unknown", action="store_true")
        return parser.parse_known_args()[0] if ignore_unknown_args else parser.parse_args()

    return unknown_flags.parse(parse_args, None)


@pytest.mark.parametrize(
    ("words", "says", "fix"),
    [
        (
            "--fp8-hybrid",
            "--fp8-hybrid was in Megatron until 23.06, replaced by --fp8-format",
            "un",
        ),
        ("--trigger-path x y", "--trigger-path is in no release", "--prism-ignore-unknown"),
        ("--num_layers 4", "--num_layers has dashes", "--num-layers"),
        ("--num-layer 4", "did you mean --num-layers", "--prism-ignore-unknown"),
        ("--num-layers four", "invalid int value", "--prism-job-flags '--num-layers VALUE'"),
        ("stray", "belong to no option: stray", "correct"),
    ],
)
def test_unknown_flags_are_named_in_a_line(words, says, fix, monkeypatch, capsys):
    with pytest.raises(UsageError) as caught:
        parsed(words, monkeypatch)
    assert says in caught.value.message
    assert fix in caught.value.fix
    assert capsys.readouterr() == ("", "")


def test_a_fork_s_flags_are_left_out_where_that_is_asked_for(monkeypatch):
    words = "--trigger-path x --num-layers 4 --prism-ignore-unknown"
    assert parsed(words, monkeypatch).num_layers == 4


@pytest.mark.parametrize("words", ["", "tp must divide heads"])
def test_what_megatron_asserts_about_arguments_is_a_line(words):
    from megatron_prism.emulate.patches import startup

    def validate_args(args):
        raise AssertionError(words)

    with pytest.raises(UsageError, match=words or "raise AssertionError") as caught:
        startup._refusals(None, validate_args, {})
    assert "test_stand_ins.py:" in caught.value.fix
