"""Recipes: what a file says is what the job gets; what cannot work is refused with arithmetic."""

import dataclasses
import runpy
from pathlib import Path

import pytest

from megatron_prism.core import recipe as recipes
from megatron_prism.core.errors import PrismError, RecipeError, WorldError

MAIN = "llama3-70b_1024gpu_tp8pp4vp5_h200"
SHIPPED = recipes.shipped()


def load(*overrides, name=MAIN):
    return recipes.load(name, overrides)


def refused(*overrides, name=MAIN):
    with pytest.raises(PrismError) as error:
        load(*overrides, name=name)
    assert error.value.exit_code == 2
    assert error.value.fix
    return str(error.value)


# -- the shipped ones ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_recipe_loads_and_is_named_for_what_it_is(name):
    recipe = load(name=name)
    assert recipe.name == name
    parts = name.split("_")
    if parts[1].endswith("gpu"):
        assert recipe.parallel.world_size == int(parts[1].removesuffix("gpu"))
        for key in ("tp", "pp", "cp", "ep"):
            size = getattr(recipe.parallel, key)
            assert (f"{key}{size}" in parts[2]) == (size > 1)
        assert recipe.hardware.name.lower() == parts[3]
    assert recipes.summary(SHIPPED[name])


@pytest.mark.parametrize("name", SHIPPED)
def test_every_layer_is_on_some_stage(name):
    recipe = load(name=name)
    stages = [recipe.layers_of(stage) for stage in recipe.world.stages]
    assert sum(map(sum, stages)) == recipe.model.num_layers
    assert {len(chunks) for chunks in stages} == {recipe.world.chunks}


def test_the_readme_has_a_row_for_each():
    readme = (next(iter(SHIPPED.values())).parent / "README.md").read_text()
    rows = [line.split("`")[1] for line in readme.splitlines() if line.startswith("| `")]
    assert sorted(rows) == sorted(SHIPPED)


def test_the_main_job_in_numbers():
    recipe = load()
    assert (recipe.world.dp, recipe.num_microbatches) == (32, 8)
    assert recipe.layers_of(3) == (4, 4, 4, 4, 4)
    assert recipe.padded_vocab_size == 129_024
    assert recipe.derived()["microbatches"] == "8 = 256 / (micro batch 1 x dp 32)"
    assert recipe.derived()["layers per chunk"] == "4 = 80 / (pp 4 x vpp 5)"


def test_embedding_and_loss_take_the_place_of_layers():
    recipe = load(name="llama3-405b_8192gpu_tp8pp16vp8_h200")
    assert recipe.layers_of(0) == (0, 1, 1, 1, 1, 1, 1, 1)
    assert recipe.layers_of(15) == (1, 1, 1, 1, 1, 1, 1, 0)
    assert "first stage 0+1" in recipe.derived()["layers per chunk"]


def test_the_tiny_text_is_what_its_script_writes():
    recipe = load(name="tiny-gpt_1cpu")
    file = Path(recipe.train.data)
    script = file.with_name("make_text.py")
    if script.exists():
        assert file.read_text(encoding="utf-8") == runpy.run_path(str(script))["text"]()
    assert 20_000 < file.stat().st_size < 60_000


# -- reading ---------------------------------------------------------------------------------------


def test_plain_dataclasses_come_out():
    recipe = load("model.extra.window_size=[128,0]", "model.extra.moe_x={a: 1}")
    assert dataclasses.asdict(recipe)["model"]["extra"] == {
        "window_size": [128, 0],
        "moe_x": {"a": 1},
    }
    assert type(recipe.model.extra) is dict
    assert type(recipe.model.extra["window_size"]) is list


def test_overrides_win_in_order_and_keep_selectors_as_text():
    recipe = load("train.lr=1e-3", "train.lr=2e-3", "prism.ranks=pp=3,tp=0;5", "parallel.vpp=null")
    assert recipe.train.lr == 2e-3
    assert recipe.prism.ranks == "pp=3,tp=0;5"
    assert recipe.parallel.vpp is None
    assert load("prism.ranks=0,517").prism.ranks == "0,517"
    assert load("prism.ranks=5").prism.ranks == "5"


def test_a_recipe_is_found_by_path_or_name(tmp_path):
    assert recipes.find(MAIN) == recipes.find(f"{MAIN}.yaml") == SHIPPED[MAIN]
    assert recipes.find(f"recipes/{MAIN}.yaml").resolve() == SHIPPED[MAIN].resolve()
    file = tmp_path / "mine.yaml"
    file.write_text(SHIPPED[MAIN].read_text())
    assert recipes.load(file).name == "mine"
    with pytest.raises(RecipeError, match="did you mean llama3-70b_1024gpu"):
        recipes.find("llama3-70b")
    with pytest.raises(RecipeError, match="prism recipes"):
        recipes.find(tmp_path / "zzz.yaml")


def test_data_is_looked_up_beside_the_recipe(tmp_path):
    (tmp_path / "words.txt").write_text("words")
    file = tmp_path / "mine.yaml"
    file.write_text(
        SHIPPED["tiny-gpt_1cpu"].read_text().replace("data/lighthouse.txt", "words.txt")
    )
    assert recipes.load(file).train.data == str(tmp_path / "words.txt")
    with pytest.raises(RecipeError, match=r"no file gone\.txt"):
        recipes.load(file, ["train.data=gone.txt"])


def test_the_prism_section_alone(tmp_path):
    file = tmp_path / "flags.yaml"
    file.write_text("prism: {ranks: 5, tier: meta}\nparallel: {world_size: 64}\n")
    assert recipes.load_prism_section(file) == {"ranks": "5", "tier": "meta", "world_size": 64}
    file.write_text("parallel: {tp: 2}\n")
    assert recipes.load_prism_section(file) == {}
    file.write_text("prism: {rank: 5}\n")
    with pytest.raises(RecipeError, match=r"did you mean prism\.ranks"):
        recipes.load_prism_section(file)


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.lr", "an override is key=value"),
        ("--train.lr=1", "an override has no dashes"),
        ("--train.lr=1", "fix: write train.lr=1"),
        ("train lr=1", "an override is key=value"),
        ("=3", "an override is key=value"),
        ("parallel.tp=012", "fix: write 12"),
        ("prism.ranks=1:30", "base 60"),
        ("train.iterations=1e3", "fix: write train.iterations=1000"),
        ("train.iterations=1.5", "train.iterations is a whole number"),
        ("train.iterations=many", "could not be converted to Integer"),
        ("train.bf16=perhaps", "train.bf16"),
        ("train.lr=[", "quote the value"),
        ("model=3", "is a section, not a value"),
        ("model.num_layers=null", "model.num_layers"),
        ("tp=4", "did you mean parallel.tp?"),
        ("model.tp=4", "did you mean parallel.tp?"),
        ("parallel.tpp=4", "did you mean parallel.tp"),
        ("trian.lr=4", "did you mean train?"),
        ("parallel.tensor_model_parallel_size=4", "did you mean parallel.tp?"),
        ("model.num_moe_experts=4", "fix: did you mean model.num_experts?"),
        ("model.window_size=4", "model.extra.window_size"),
        ("nonsense.q=4", "the sections are model, parallel"),
        ("model.extra=[1]", "incompatible container types"),
        ("model.num_layers=${oops}", "model.num_layers"),
        ("parallel.tensor_parallel=7", "did you mean parallel.tp?"),
        ("parallel.expert_tensor_parallel=7", "did you mean parallel.etp?"),
        ("parallel.pipeline_stages=7", "did you mean parallel.pp?"),
    ],
)
def test_a_slip_in_an_override_says_what_to_type(override, says):
    assert says in refused(override)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model: [1, 2", "is no YAML"),
        ("- 1\n- 2\n", "it has no sections"),
        ("5", "it has no sections"),
        ("just words", "a recipe has no just words"),
        ("model: {num_layers: 2}\n", "model.hidden_size is missing"),
        ("", "is missing"),
        ("parallel:\n  world_size: 1\n  tp: 010  # eight?\n", "line 3: YAML reads 010"),
        ("model: {}\nmodel: {}\n", "is no YAML"),
        ("[" * 100_000, "nested too deeply"),  # the parser in C ends the process
        ("- " * 10_000, "nested too deeply"),
        ("model: {num_layers: " + "9" * 5000 + "}", "4300 digits"),
        ("#" * (1 << 20) + "#", "more than 262,144 bytes"),
    ],
)
def test_a_bad_file_is_explained(tmp_path, text, says):
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    assert says in refused(name=file)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["parallel.tp=3"], "tp 3 x cp 1 x pp 4 = 12 does not divide 1,024 ranks"),
        (["parallel.world_size=100"], "does not divide 100 ranks"),
        (["train.global_batch_size=250"], "250 is not divisible by micro_batch_size 1 x dp 32"),
        (["train.global_batch_size=250"], "fix: use train.global_batch_size=256"),
        (["train.global_batch_size=192"], "rounds of pp 4, but there are 6 = 192"),
        (["model.num_layers=81"], "81 layers do not split over pp 4 x vpp 5 = 20 chunks"),
        (["model.num_layers=81"], "model.num_layers=80 or 100, or change"),
        (["parallel.account_for_loss_in_pipeline_split=true"], "+ 1 for embedding and loss = 81"),
        (["parallel.num_layers_in_first_pipeline_stage=15"], "leave 65 for 3 stages"),
        (["parallel.num_layers_in_first_pipeline_stage=17"], "17 layers do not split over vpp 5"),
        (
            ["parallel.num_layers_in_first_pipeline_stage=20",
             "parallel.account_for_loss_in_pipeline_split=true"],
            "both ways",
        ),
        (["model.num_attention_heads=60"], "hidden_size 8192 is not divisible by 60 heads"),
        (["model.num_query_groups=7"], "7 query groups evenly"),
        (["model.num_attention_heads=4", "model.num_query_groups=4"], "not divisible by tp 8"),
        (["model.num_query_groups=12", "model.num_attention_heads=96", "model.kv_channels=128"],
         "neither divides the other"),
        (["model.ffn_hidden_size=28675"], "model.ffn_hidden_size 28675 is not divisible by tp 8"),
        (["model.seq_length=8190"], "seq_length 8190 is not divisible by 8"),
        (["model.max_position_embeddings=4096"], "max_position_embeddings 4096 < seq_length 8192"),
        (["model.normalization=BatchNorm"], "use LayerNorm or RMSNorm"),
        (["prism.tier=tpu"], "use auto or cuda or cpu or meta"),
        (["train.iterations=0"], "train.iterations is 0"),
        (["model.vocab_size=99999999999999999999"], "use at most 2147483647"),
        (["model.init_method_std=-1"], "model.init_method_std is -1.0"),
        (["train.lr=-1"], "train.lr is -1.0"),
        (["train.clip_grad=.nan"], "train.clip_grad is nan"),
        (["model.norm_epsilon=.inf"], "model.norm_epsilon is inf"),
        (["model.hidden_dropout=1.5"], "use a number from 0 to 1"),
        (["train.seed=99999999999999999999"], "use a number from 1 to 2147483647"),
        (["model.extra.num_layers=3"], "fix: model.num_layers=3"),
        (["model.extra.mtp_num_layers=1"], "model.mtp_num_layers=1"),
        (["model.extra.cuda_graph_impl=local"], "fix: run the job's own script: prism run"),
        (
            ["model.multi_latent_attention=true", "model.position_embedding_type=none"],
            "model.position_embedding_type=rope",
        ),
        (["model.kv_lora_rank=0"], "use at least 1"),
        (["model.extra.tensor_model_parallel_size=2"], "fix: parallel.tp=2"),
        (["parallel.pp=99999999999999999999"], "does not divide 1,024 ranks"),
        (["parallel.ep=2"], "ep 2 needs experts"),
        (["train.use_distributed_optimizer=false"], "overlap_param_gather needs"),
        (["train.recompute_granularity=full"], "needs a method"),
        (["train.recompute_method=block"], "granularity full only"),
        (["parallel.pipeline_model_parallel_layout='Et*40|t*40L'"], "has 2 chunks, but pp 4"),
        (["parallel.pipeline_model_parallel_layout='Ex|t'"], "x is no layer"),
        (["parallel.vpp=null", "parallel.pipeline_model_parallel_layout='E|t*4|t|L'"], "5 layers"),
        (["model.hybrid_override_pattern=M*-"], "has 3 layers, the model 80"),
        (["model.num_layers=20", "model.hybrid_override_pattern=" + "M*-E" * 5], "interleaving"),
    ],
)  # fmt: skip
def test_fields_that_contradict_each_other_show_the_arithmetic(overrides, says):
    assert says in refused(*overrides)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["parallel.sequence_parallel=true"], "but tp is 1"),
        (["model.num_experts=12"], "12 experts are not divisible by ep 8"),
        (["model.moe_router_topk=9"], "moe_router_topk 9 of 8 experts"),
        (["parallel.tp=2", "parallel.etp=1"], "only with sequence parallelism"),
    ],
)
def test_experts(overrides, says):
    assert says in refused(*overrides, name="mixtral-8x7b_256gpu_pp4vp8ep8_h200")


def test_uneven_stages_and_layouts():
    recipe = load("model.num_layers=75", "parallel.num_layers_in_first_pipeline_stage=15")
    assert [sum(recipe.layers_of(s)) for s in range(4)] == [15, 20, 20, 20]
    layout = "parallel.pipeline_model_parallel_layout='E|(tt|)*17,t*3|L'"
    recipe = load("model.num_layers=37", layout)
    assert recipe.layers_of(0) == (0, 2, 2, 2, 2)
    assert recipe.layers_of(3) == (2, 2, 2, 2, 0)
    assert recipe.layers_of(2) == (2, 2, 2, 2, 3)


def test_sizes_that_are_proposed_are_those_that_the_rest_of_the_recipe_takes():
    with pytest.raises(WorldError) as refused:  # 64 heads: not tp 5 or 10, which divide 1,000
        load("parallel.world_size=1000")
    words = refused.value.fix.replace("keep 1,000 ranks with ", "").split(" or ")
    assert words
    for word in words:
        load(word.strip(", "))


def test_building_a_recipe_in_python_checks_it_too():
    with pytest.raises(WorldError, match="does not divide 3 ranks") as refused:
        recipes.Recipe(
            recipes.Model(2, 64, 4, 128, 256),
            recipes.Parallel(world_size=3, tp=2),
        )
    assert refused.value.fix == "parallel.world_size=2"  # 4 heads, and a batch of 1
