"""``prism mcp``: driven by the SDK's own client, from dumps to a verdict and from a launch line to
what the job needs."""

import asyncio
import json
import sys
from pathlib import Path

import pytest
from helpers.needs import TRAINING
from helpers.pretrain import JOB, SCRIPT
from helpers.programs import healthy

import megatron_prism as prism
from megatron_prism.cli import main as cli
from megatron_prism.core.world import World
from megatron_prism.features.agents import server as mcp_server
from megatron_prism.features.hang.fault_plan import parse

mcp = pytest.importorskip("mcp")
pytest.importorskip("mcp.server.mcpserver")  # of its second release
GOLDEN = str(Path(__file__).parents[2] / "golden" / "slices" / "dense_pp2")


def asked(*questions, run=False, connection=None):
    """What the server answers to (tool, arguments), one after the other; "" asks for its tools."""

    async def drive():
        async with mcp.Client(connection or mcp_server.server(run, cli.parser, cli.ask)) as client:
            return [
                await client.call_tool(tool, given) if tool else (await client.list_tools()).tools
                for tool, given in questions
            ]

    return asyncio.run(drive())


def answers(*questions, **how):
    found = asked(*questions, **how)
    assert not any(one.is_error for one in found), found
    assert all(one.structured_content["next"] and one.structured_content["provenance"]
               for one in found)  # fmt: skip
    return [one.structured_content for one in found]


def test_what_runs_or_writes_is_there_on_request_alone():
    (safe,), (every,) = asked(("", {})), asked(("", {}), run=True)
    assert {one.name for one in every} - {one.name for one in safe} == {"capture", "sweep"}
    assert all(one.annotations.read_only_hint for one in safe)
    assert not any(one.annotations.read_only_hint for one in every if one not in safe)


def test_schemas_are_the_arguments_of_the_commands():
    (tools,) = asked(("", {}), run=True)
    schemas = {one.name: one.input_schema for one in tools}
    for name in ("replay", "hang", "sweep"):
        actions = {one.dest: one for one in cli.parser(name)._actions}
        for argument, schema in schemas[name]["properties"].items():
            assert schema["description"], (name, argument)
            assert argument == "line" or schema.get("default") == actions[argument].default
    assert schemas["replay"]["required"] == ["programs"]
    assert not {"json", "csv", "html", "force", "out"} & set(schemas["hang"]["properties"])
    assert {"out", "line"} < set(schemas["sweep"]["properties"])


def test_from_dumps_to_the_verdict(tmp_path):
    world = healthy(World(64, tp=4, pp=4))
    prism.diagnose_faults(world, [parse("drop@rank=5,group=tp,nth=2")], out=tmp_path / "dumps")
    (found,) = answers(("hang", {"dumps": str(tmp_path / "dumps")}))
    assert [one["rank"] for one in found["figures"]["culprits"]] == [5]
    assert found["text"].startswith("HANG at ")


def test_questions_about_slices_and_errors_to_act_on():
    replay, slower, calls, fit, same = answers(
        ("replay", {"programs": GOLDEN, "machine": "h100"}),
        ("replay", {"programs": GOLDEN, "settings": ["slow=0:3"], "iterations": 2}),
        ("calls", {"programs": GOLDEN, "selector": "0F all_reduce group=tp", "rank": 1}),
        ("fit", {"programs": GOLDEN, "limit": 10 << 20, "machine": "h200"}),
        ("compare", {"paths": [GOLDEN, GOLDEN]}),
    )
    assert fit["figures"]["fits"] is False
    assert {one["difference"] for one in same["figures"]["parts"] if isinstance(one, dict)} == {0}
    assert replay["figures"]["iteration_ns"] > 0
    assert "rank 0 computes 3 times as long" in slower["text"]
    found = calls["figures"]["calls"]
    assert {(one["op"], one["microbatch"]) for one in found} == {("all_reduce", 0)}
    assert [one["nth"] for one in found] == list(range(1, len(found) + 1))
    assert "rank=1" in calls["next"]
    bad, unknown = asked(("replay", {"programs": "/nowhere"}), ("replay", {}))
    assert bad.is_error
    assert "fix: " in bad.content[0].text
    assert unknown.is_error


@pytest.mark.slow
def test_the_command_speaks_the_protocol():
    words = mcp.StdioServerParameters(command=sys.executable, args=["-m", "megatron_prism", "mcp"])
    tools, replay = asked(("", {}), ("replay", {"programs": GOLDEN}), connection=words)
    assert "hang" in {one.name for one in tools}
    assert replay.structured_content == json.loads(replay.content[0].text)


@pytest.mark.slow
@pytest.mark.megatron
@TRAINING
def test_from_a_launch_line_to_what_the_job_needs(tmp_path):
    small = "--num-layers 2 --global-batch-size 4 --pipeline-model-parallel-size 1"
    line = ["torchrun", "--nnodes", "2", "--nproc-per-node", "2", str(SCRIPT), *JOB, small]
    given = {"line": " ".join(line), "out": str(tmp_path / "slices")}
    fits = {"programs": given["out"], "limit": "80GB"}
    captured, found = answers(("capture", given), ("fit", fits), run=True)
    assert given["out"] in captured["next"]
    assert found["figures"]["fits"] is True
    assert found["text"].startswith("fits: the limit is ")
