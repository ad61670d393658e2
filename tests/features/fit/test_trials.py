"""Changes of a job that are captured: ladders by hand, and a real job's line with no GPU."""

import dataclasses
import io
import json
import shlex

import pytest
from rich.console import Console

from megatron_prism.cli import main as cli
from megatron_prism.core.errors import PrismError, UsageError
from megatron_prism.core.jobs import job_settings
from megatron_prism.core.programs.program import Builder, Programs, save
from megatron_prism.core.world import World
from megatron_prism.features.fit import trials as trials_module
from megatron_prism.features.fit.candidates import LineChange, ladders
from megatron_prism.features.fit.fit import TriedChange, fit
from megatron_prism.features.fit.trials import (
    CapturedLine,
    Trials,
    _change_of,
    _reason,
    with_trials,
)

MIB = 1 << 20
ADAM = {"use_distributed_optimizer": "True", "num_layers": "8"}


def job(act_mib, settings=(), world=None):
    """Programs whose one class allocates 20 MiB of parameters and activations."""
    made = Builder()
    made.memory(0, 20 * MIB, "param:all")
    made.add("compute", phase="forward", microbatch=0)
    made.memory(1, act_mib * MIB, "first @a.py:1")
    made.add("compute", phase="backward", microbatch=0)
    made.memory(1, -act_mib * MIB)
    made.add("compute", phase="optimizer")
    source = {"tier": "meta"}
    if settings:
        given = {f"--{name.replace('_', '-')}": value for name, value in settings.items()}
        source["arguments"] = job_settings.as_text(given)
    world = World(1) if world is None else world
    return Programs(world, (made.build(0),), [0] * world.size, source=source)


def weigh(programs, limit=100 * MIB):
    return fit(programs, limit=limit, device=None, with_changes=False)


class Line:
    """A job of which a function says what it allocates with a change; None: it refuses it."""

    is_recipe = False
    console = Console(file=io.StringIO())

    def __init__(self, activations):
        self.activations = activations
        self.captured = []

    def capture(self, change):
        self.captured.append(change)
        act_mib = self.activations(change.options)
        if act_mib is None:
            raise PrismError("Traceback:\n[rank0]: AssertionError: needs more\nand so on")
        return job(act_mib)


def fractions(options):
    """180 MiB of activations, of which an offloaded optimizer of all takes 120."""
    return 180 - round(120 * float(options["optimizer-offload-fraction"]))


def offloading(settings=ADAM):
    return next(ladder for ladder in ladders(settings, World(2)) if "optimizer on" in ladder.name)


def test_the_smallest_fraction_that_fits():
    line = Line(fractions)
    best = Trials(weigh(job(180)), line, weigh).first_that_fits(offloading())
    # 20 + 180 - 120 x 0.85 is within 100 MiB, and with 0.8 it is not
    assert best.words.endswith("--optimizer-offload-fraction 0.85")
    assert best.num_bytes == (20 + 180 - 102) * MIB
    assert best.fits
    assert best.captured
    assert best.slower_ns == 0
    # bisected, and each is captured once
    assert len(line.captured) <= 6


def test_where_the_last_step_is_not_enough_no_other_is_tried():
    line = Line(lambda options: 180)
    best = Trials(weigh(job(180)), line, weigh).first_that_fits(offloading())
    assert not best.fits
    assert len(line.captured) == 1


def test_a_change_that_the_job_refuses_is_none_and_says_why():
    trials = Trials(weigh(job(180)), Line(lambda options: None), weigh)
    assert trials.first_that_fits(offloading()) is None
    (why,) = trials.refused.values()
    assert why == "[rank0]: AssertionError: needs more"


def test_pairs_are_tried_where_no_change_alone_is_enough():
    def activations(options):
        freed = 50 if "optimizer-offload-fraction" in options else 0
        return 180 - freed - (60 if options.get("recompute-num-layers") == "8" else 0)

    before = fit(job(180, ADAM), limit=100 * MIB, device=None)
    answer = with_trials(before, Line(activations), weigh)
    best = answer.changes[0]
    assert best.fits
    assert "--recompute-num-layers 8" in best.words
    assert "--optimizer-offload-fraction" in best.words
    assert best.num_bytes == 90 * MIB
    # alone they are listed behind it
    assert {change.fits for change in answer.changes[1:]} == {False}


def test_what_frees_nothing_is_not_listed():
    before = fit(job(180, ADAM), limit=100 * MIB, device=None)
    answer = with_trials(before, Line(lambda options: 180), weigh)
    assert not any(change.captured for change in answer.changes)


def test_an_estimate_gives_way_to_the_figure_of_its_capture():
    before = fit(job(180, ADAM), limit=100 * MIB, device=None)
    words = "--recompute-granularity selective --recompute-modules mlp"
    estimate = TriedChange(words, 90 * MIB, True, 5)
    before = dataclasses.replace(before, changes=(estimate,))
    line = Line(lambda options: 70 if "recompute-modules" in options else None)
    answer = with_trials(before, line, weigh)
    (change,) = [change for change in answer.changes if change.words == words]
    assert change.captured
    assert change.num_bytes == 90 * MIB
    assert len(answer.refused) == len(line.captured) - 1
    text = answer.to_text()
    assert "what frees memory, captured with the change" in text
    assert "not captured: --" in text
    assert "tried on the slices" not in text


def test_estimates_are_marked():
    answer = fit(job(180, ADAM), limit=100 * MIB, device=None)
    assert not any(change["captured"] for change in answer.to_json()["changes"])
    assert "--try captures the job with further changes" in answer.to_text()


def test_a_job_that_fits_is_not_captured_again():
    line = Line(fractions)
    before = fit(job(30), limit=100 * MIB, device=None)
    assert with_trials(before, line, weigh) is before
    assert line.captured == []


def steps_of(settings, world=None):
    """Name of a ladder -> the options of its steps."""
    found = ladders(settings, World(4) if world is None else world)
    return {ladder.name: [dict(step.options) for step in ladder.steps] for ladder in found}


def test_what_a_job_has_already_is_no_step():
    assert len(steps_of(ADAM)["optimizer on the host"]) == 20
    half = ADAM | {"optimizer_cpu_offload": "True", "optimizer_offload_fraction": "0.5"}
    steps = steps_of(half)
    assert [step["optimizer-offload-fraction"] for step in steps["optimizer on the host"]][0] == (
        "0.55"
    )
    assert "precision-aware optimizer" not in steps
    assert "optimizer on the host" not in steps_of(half | {"optimizer_offload_fraction": "1.0"})
    block = {"recompute_granularity": "full", "recompute_method": "block"}
    layers = steps_of(ADAM | block | {"recompute_num_layers": "6"})["layers again"]
    assert [step["recompute-num-layers"] for step in layers] == ["7", "8"]
    assert "layers again" not in steps_of(ADAM | {"recompute_granularity": "full"})


def test_what_megatron_refuses_for_certain_is_no_step():
    steps = steps_of({"num_layers": "8", "transformer_impl": "local"})
    assert set(steps) == {"layers again"}
    assert "optimizer on the host" not in steps_of(ADAM | {"optimizer": "sgd"})


def test_layers_are_those_of_a_chunk():
    world = World(4, pp=2, vpp=2)
    assert len(steps_of(ADAM, world)["layers again"]) == 2
    stages = [name for name in steps_of(ADAM, world) if "virtual" in name]
    assert stages == ["1 virtual stage", "4 virtual stages"]
    by_layers = ADAM | {"num_layers_per_virtual_pipeline_stage": "2"}
    (options,) = steps_of(by_layers, world)["1 virtual stage"]
    assert options == {"num-layers-per-virtual-pipeline-stage": "4"}
    (options,) = steps_of(ADAM, world)["1 virtual stage"]
    assert options == {"num-virtual-stages-per-pipeline-rank": "1"}
    by_hand = ADAM | {"pipeline_model_parallel_layout": "Et*8L"}
    assert not any("virtual" in name for name in steps_of(by_hand, world))


@pytest.mark.parametrize(
    ("text", "is_recipe"),
    [
        ("--recompute-granularity selective --recompute-modules core_attn mlp", False),
        ("--no-create-attention-mask-in-dataloader --recompute-granularity full", False),
        ("recompute_granularity=selective 'recompute_modules=core_attn mlp'", True),
    ],
)
def test_words_are_read_back(text, is_recipe):
    assert _change_of(text).text(is_recipe) == text


def test_a_variable_stands_before_the_options():
    change = LineChange({"offload-modules": "a b", "bf16": ""}, {"NAME": "1"})
    assert change.text(False) == "NAME=1 --offload-modules a b --bf16"
    assert change.text(True) == "NAME=1 'offload_modules=a b' bf16=true"


def test_the_line_that_says_why():
    assert _reason("a\nValueError: first\nfile b\nx.y.ZError: second\nlast") == "x.y.ZError: second"
    assert _reason("only this") == "only this"
    assert _reason("") == "without a word"


def test_a_line_has_folders_of_its_own(tmp_path, monkeypatch):
    folders = []
    monkeypatch.setattr(trials_module, "open_programs", folders.append)
    monkeypatch.setattr(CapturedLine, "_capture_script", lambda *given: None)
    change = LineChange({"bf16": ""})
    for words in (("torchrun", "a.py"), ("torchrun", "b.py"), ("torchrun", "a.py")):
        CapturedLine(words, False, tmp_path, Line.console).capture(change)
    assert folders[0] == folders[2] != folders[1]


def test_an_error_of_the_figures_is_no_refusal():
    def no_memory(programs):
        raise UsageError("these programs recorded no memory")

    trials = Trials(weigh(job(180)), Line(fractions), no_memory)
    with pytest.raises(UsageError, match="recorded no memory"):
        trials.first_that_fits(offloading())
    assert not trials.refused


# -- free N GiB -----------------------------------------------------------------------------------
def test_memory_to_free_takes_the_place_of_a_limit():
    answer = fit(job(180, ADAM), free=50 * MIB, device=None)
    assert answer.limit == 150 * MIB
    assert answer.to_json()["free"] == 50 * MIB
    text = answer.to_text()
    assert text.startswith("no change that was tried frees 50 MiB")
    assert "runs out" not in text
    # nothing runs out where no limit is known
    told = answer.to_json()
    assert (told["fits"], told["frees_enough"], told["overruns"]) == (None, False, {})
    assert [row["fits"] for row in answer.to_rows()] == [None]
    assert "  fits" not in text
    assert "too much" not in text
    page = answer.to_html()
    assert "no change that was tried frees 50 MiB" in page
    assert "does not fit" not in page
    freed = with_trials(answer, Line(lambda options: 120), lambda p: weigh(p, answer.limit))
    assert freed.frees_enough
    assert "free 50 MiB" in freed.to_text().partition("\n")[0]
    # 200 MiB are needed as it is
    frees = freed.limit + freed.free - freed.changes[0].num_bytes
    assert frees >= 50 * MIB
    assert f": frees {frees // MIB} MiB; " in freed.to_text()
    little = dataclasses.replace(freed.changes[0], num_bytes=170 * MIB, fits=False)
    text = dataclasses.replace(answer, changes=(little,)).to_text()
    assert "170 MiB: frees 30 MiB, 20 MiB less than asked for" in " ".join(text.split())
    assert freed.to_json()["frees_enough"]


def test_the_next_command_keeps_what_is_to_be_freed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    programs = job(180, ADAM)
    source = {**programs.source, "recipe": "tiny-gpt_1cpu"}
    save(dataclasses.replace(programs, source=source), tmp_path / "job.prism")
    cli.main(["fit", "job.prism", "--free", "50MiB", "--device", "none"])
    following = capsys.readouterr().out.partition("next: prism ")[2]
    assert f"--limit {150 * MIB}B" in following


def test_what_cannot_be_freed_is_refused():
    with pytest.raises(UsageError, match="cannot be freed"):
        fit(job(180), free=200 * MIB, device=None)
    with pytest.raises(UsageError, match="beside it"):
        fit(job(180), free=2 * MIB, limit=100 * MIB, device=None)
    # before anything is priced
    with pytest.raises(UsageError, match="beside it"):
        fit(job(180), free=2 * MIB, limit=100 * MIB, device=None, machine="no-such-machine")


# -- a real job -----------------------------------------------------------------------------------
@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.megatron
def test_a_figure_is_that_of_a_fresh_capture(tmp_path, monkeypatch, capsys):
    """Bytes of every change that was tried, against prism capture and prism fit of its words."""
    pytest.importorskip("megatron.core")
    from megatron_prism.cli.main import main

    monkeypatch.chdir(tmp_path)
    sizes = ["prism.tier=meta", "bf16=true", "world_size=2", "pp=2", "num_layers=4"]
    sizes += ["hidden_size=256", "seq_length=512", "use_distributed_optimizer=true"]
    sizes += ["global_batch_size=8", "transformer_impl=transformer_engine"]
    line = ["tiny-gpt_1cpu", *sizes]

    def prism(*words):
        main(list(words))
        return capsys.readouterr().out

    prism("capture", *line, "-o", "before")
    ask = ["--device", "none", "--json"]
    answer = json.loads(prism("fit", "before", "--free", "8MiB", "--try", *ask))
    captured = [change for change in answer["changes"] if change["captured"]]
    kinds = " ".join(change["words"] for change in captured)
    assert "optimizer_offload_fraction" in kinds
    assert "recompute_num_layers" in kinds
    for number, change in enumerate(captured):
        words = [word for word in shlex.split(change["words"]) if not word.startswith("NVTE")]
        if len(words) < len(shlex.split(change["words"])):
            monkeypatch.setenv("NVTE_CPU_OFFLOAD_V1", "1")
        prism("capture", *line, *words, "-o", f"again{number}")
        again = json.loads(prism("fit", f"again{number}", "--limit", "80GB", *ask))
        assert again["limit"] + again["over"] == change["num_bytes"], change["words"]
