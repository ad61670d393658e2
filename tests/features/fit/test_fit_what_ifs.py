"""What ``prism fit`` says of a what-if is what ``prism replay`` and ``prism compare`` say of it."""

import json
import re

import pytest
from helpers.metamorphic import STORED, about, fresh

import megatron_prism as prism
from megatron_prism.cli import main as cli
from megatron_prism.cli import what_ifs
from megatron_prism.memory.job_peaks import needed

CHANGES = ["dp=4", "slow=1:3/2", "moved=b200", "host=1.4", "network=rails", "nccl=NCCL_ALGO=Ring",
           "faster=all_reduce:2", "microbatches=8"]  # fmt: skip


def told(capsys, *words):
    cli.main([*words, "--json"])
    return json.loads(capsys.readouterr().out)


def text_of(capsys, *words):
    status = cli.main([*words])
    return status, " ".join(capsys.readouterr().out.split())


@about("dp", "slow", "moved", "host", "network", "nccl", "faster", "microbatches")
@pytest.mark.parametrize("change", CHANGES)
def test_fit_answers_a_what_if_as_replay_and_compare(change, capsys):
    path = str(STORED / "dense_pp2")
    fits = told(capsys, "fit", path, change, "--machine", "h100")
    replayed = told(capsys, "replay", path, change, "--machine", "h100")
    compared = told(capsys, "compare", path, change, "--machine", "h100")
    assert fits["iteration_ns"] == replayed["iteration_ns"] == compared["iterations"][1]
    assert fits["headline"] == replayed["headline"]
    memory = {row["what"]: row["b"] for row in compared["parts"] if row["of"] == "memory"}
    assert needed(fits["classes"][fits["worst"]]) == memory["device"]
    assert fits["what_if"] == dict(replayed["source"]).get("what-if", fits["what_if"])


def test_the_limit_is_that_of_the_machine_that_the_job_moves_to(capsys):
    path = str(STORED / "dense_pp2")
    sources = []
    for words in ((), ("moved=b200",)):
        sources.append(told(capsys, "fit", path, *words, "--machine", "h100")["limit_source"])
    assert "H100" in sources[0]
    assert "B200" in sources[1]


@pytest.mark.ci
@about("dp")
def test_fit_of_other_replicas_is_that_of_their_fresh_capture():
    what_if = what_ifs.priced(fresh(dp=2), ["dp=4"], "fit", machine="h100")
    of_what_if, of_capture = prism.fit(what_if), prism.fit(fresh(dp=4), machine="h100")
    assert of_what_if.memory.classes.keys() == of_capture.memory.classes.keys()
    for name, figures in of_capture.memory.classes.items():
        expected = of_what_if.memory.classes[name]
        assert expected["peak_allocated"] == figures["peak_allocated"]
        assert expected["by_category"] == figures["by_category"]
    assert of_what_if.iteration_ns == pytest.approx(of_capture.iteration_ns, rel=0.01)
    assert of_capture.what_if is None
    assert "data-parallel size 4 instead of 2" in of_what_if.what_if


@pytest.mark.ci
@about("microbatches")
def test_fit_of_other_microbatches_is_that_of_their_fresh_capture():
    what_if = what_ifs.priced(fresh(microbatches=4), ["microbatches=8"], "fit", machine="h100")
    of_what_if = prism.fit(what_if)
    of_capture = prism.fit(fresh(microbatches=8), machine="h100")
    for name, figures in of_capture.memory.classes.items():
        expected = of_what_if.memory.classes[name]
        assert expected["peak_allocated"] == pytest.approx(figures["peak_allocated"], rel=0.001)
    assert of_what_if.iteration_ns == pytest.approx(of_capture.iteration_ns, rel=0.01)


def test_the_text_says_what_is_not_as_captured_and_the_next_command_keeps_it(capsys):
    path = str(STORED / "dense_pp2")
    status, text = text_of(capsys, "fit", path, "dp=4", "--machine", "h100")
    assert status == 0
    assert "assumed: data-parallel" in text
    assert text.endswith(f"next: prism replay {path} dp=4 --machine h100")


def test_the_first_line_names_machine_and_host(capsys):
    assert cli.main(["fit", str(STORED / "dense_pp2"), "--machine", "h100"]) == 0
    lines = capsys.readouterr().out.splitlines()
    # a line of a terminal's width is folded
    assert re.match(r"fits: .*, on H100, hosts", " ".join([lines[0], lines[1].strip()]))


def test_the_next_command_of_a_what_if_that_does_not_fit_is_understood(capsys):
    path = str(STORED / "dense_pp2")
    words = [path, "dp=4", "--machine", "h100", "--limit", "4MiB", "--device", "none"]
    status, text = text_of(capsys, "fit", *words)
    assert status == 1
    following = text.partition("next: prism ")[2].partition(" && ")[0].split()
    read = cli.read_words(following[0], following[1:])
    assert following[0] == "replay" or "dp=4" in text.partition("next: prism ")[2]
    assert read is not None


def test_a_snapshot_has_no_what_ifs(capsys):
    assert cli.main(["fit", "rank0.pickle", "dp=4"]) == 2
    assert "there is no dp=4 of it" in capsys.readouterr().err


def test_an_unknown_what_if_is_refused(capsys):
    assert cli.main(["fit", str(STORED / "dense_pp2"), "replicas=4"]) == 2
    assert "prism fit does not understand replicas=4" in capsys.readouterr().err
