"""Two command lines are one job, or it is said in which arguments they differ."""

import argparse
import enum
import functools
from pathlib import Path

import pytest
import torch

from megatron_prism.core.jobs import job_settings
from megatron_prism.emulate.command_line import job_arguments
from megatron_prism.emulate.command_line.job_arguments import text_of


class Backend(enum.Enum):
    flash = 1
    auto = 5


def parser():
    """In the manner of Megatron's."""
    made = argparse.ArgumentParser()
    for option in "seq-length hidden-size train-iters ffn-hidden-size log-interval".split():
        made.add_argument(f"--{option}", type=int)
    for option in "save layers-cfg tensorboard-dir spec".split():
        made.add_argument(f"--{option}")
    made.add_argument("--lr", type=float)
    made.add_argument("--straggler-ctrlr-port", type=int, default=65535)
    made.add_argument("--moe-router-topk", type=int, default=2)
    made.add_argument("--bf16", action="store_true")
    made.add_argument("--disable-bias-linear", action="store_false", dest="add_bias_linear")
    made.add_argument("--overlap", action=argparse.BooleanOptionalAction, default=True)
    made.add_argument("--recompute-modules", nargs="*", default=None)
    made.add_argument("--backend", type=lambda x: Backend[x], default=Backend.auto)
    return made


def settings(line):
    """Of a command line, validated as Megatron does: what is not given follows."""
    known = parser()
    args = known.parse_args(line.split())
    args.ffn_hidden_size = args.ffn_hidden_size or 4 * (args.hidden_size or 1)
    args.params_dtype = torch.bfloat16 if args.bf16 else torch.float32
    args.encoder_seq_length = args.seq_length
    return job_arguments.of_namespace(vars(args), known, line.split())


JOB = "--seq-length 4096 --hidden-size 64 --bf16 --train-iters 12"


@pytest.mark.parametrize(
    "same",
    [
        "--bf16 --train-iters 12 --hidden-size 64 --seq-length 4096",
        "--hidden-size=64 --seq-length=4096 --bf16",
        "--hidden 64 --seq-len 4_096 --bf16",  # as argparse lets people abbreviate
        f"{JOB} --moe-router-topk 2 --overlap --backend auto --ffn-hidden-size 256",  # defaults
        f"{JOB} --train-iters 500 --save /tmp/x --tensorboard-dir=/tmp/y",
        f"{JOB} --straggler-ctrlr-port 1234",
        f"--seq-length 1 {JOB}",  # the last one counts
    ],
)
def test_one_job_however_it_is_typed(same):
    assert job_settings.differences("arguments", settings(JOB), settings(same)) == []
    assert job_settings.short(settings(JOB)) == job_settings.short(settings(same))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (f"{JOB} --seq-length 8192", ["--seq-length 4096 there, 8192 here"]),
        (f"{JOB} --moe-router-topk 4", ["--moe-router-topk 4 here, its default there"]),
        (f"{JOB} --disable-bias-linear", ["--disable-bias-linear here, not there"]),
        (f"{JOB} --no-overlap", ["--no-overlap here, not there"]),
        (f"{JOB} --backend flash", ["--backend flash here, its default there"]),
        (f"{JOB} --recompute-modules core_attn mlp",
         ["--recompute-modules core_attn mlp here, its default there"]),
        (JOB.replace(" --bf16", ""),
         ["--bf16 there, not here", "params_dtype bfloat16 there, float32 here"]),
        (JOB.replace("64", "32"),  # what was given comes first
         ["--hidden-size 64 there, 32 here", "--ffn-hidden-size 256 there, 128 here"]),
        (f"{JOB} --lr 1e-3 --seq-length 1 --backend flash --no-overlap --moe-router 1 --spec a",
         ["--backend flash here, its default there", "--lr 0.001 here, its default there",
          "--moe-router-topk 1 here, its default there", "--no-overlap here, not there",
          "and 2 more"]),
    ],
)  # fmt: skip
def test_what_differs_is_named(other, said):
    assert job_settings.differences("arguments", settings(JOB), settings(other)) == said


def test_values_are_the_same_text_in_every_process(tmp_path):
    class Layout:
        def __init__(self):
            self.stages, self._cache = [["E", "t"], ["t", "L"]], object()

    assert text_of(Backend.flash) == "flash"
    assert text_of(torch.bfloat16) == "bfloat16"
    assert text_of((1, 2.5, None, True)) == "1 2.5 none true"
    assert text_of([[1, 2], [3]]) == "(1 2) (3)"
    assert text_of({"b", "a"}) == "a b"
    assert text_of({"b": 1, "a": "x"}) == "{a=x b=1}"
    assert text_of(torch.nn.functional.silu) == "torch.nn.functional.silu"
    assert text_of(Layout()).endswith("Layout{stages=((E t) (t L))}")
    assert "0x" not in text_of([object(), functools.partial(print)])
    assert text_of("megatron/core") == "megatron/core"


def test_no_place_of_a_machine_is_kept_and_content_counts(tmp_path):
    texts = []
    for place, content in (("a", "x: 1"), ("b", "x: 1"), ("c", "x: 2")):
        (tmp_path / place).mkdir()
        file = tmp_path / place / "layers.yaml"
        file.write_text(content)
        texts.append(settings(f"{JOB} --layers-cfg {file} --spec {tmp_path}/none"))
    assert not any(str(tmp_path) in text or "layers.yaml" in text for text in texts)
    assert job_settings.differences("arguments", texts[0], texts[1]) == []
    (said,) = job_settings.differences("arguments", texts[0], texts[2])
    assert said.startswith("--layers-cfg digest:")
    for secret in (Path("/home/me"), "~/x", "https://me:word@host/x", "../x"):
        assert text_of(secret).startswith("digest:")
