"""Recipes: what a file says is what the job gets; what cannot work is refused with arithmetic."""

import pytest

from megatron_prism.core.errors import PrismError, RecipeError
from megatron_prism.core.jobs import recipe as recipes

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
        assert recipe.world.size == int(parts[1].removesuffix("gpu"))
        for key in ("tp", "pp", "cp", "ep"):
            size = getattr(recipe.world, key)
            assert (f"{key}{size}" in parts[2]) == (size > 1)
        assert recipe.hardware.name.lower() == parts[3]
    assert recipes.summary(SHIPPED[name])


def test_the_main_job_in_numbers():
    recipe = load()
    assert (recipe.world.dp, recipe.num_microbatches) == (32, 8)
    assert recipe.padded_vocab_size == 129_024
    assert recipe.derived()["microbatches"] == "8 = 256 / (micro batch 1 x dp 32)"


# -- reading ---------------------------------------------------------------------------------------


def test_flags_are_megatrons_fields_and_have_their_types():
    recipe = load("window_size=[128,0]", "moe_layer_freq=2", "recompute_modules=mlp, core_attn",
                  "lr=1e-3", "--clip-grad=2", "train_iters=1e3")  # fmt: skip
    assert recipe.flags["window_size"] == (128, 0)
    assert recipe.flags["recompute_modules"] == ["mlp", "core_attn"]
    assert (recipe.moe_layer_freq, recipe.lr, recipe.clip_grad) == (2, 1e-3, 2.0)
    assert recipe.train_iters == 1000
    assert recipe.expert_model_parallel_size == 1  # not given: Megatron's default
    with pytest.raises(AttributeError):
        recipe.no_such_flag  # noqa: B018


def test_short_names_and_fields_are_the_flags_that_they_become():
    recipe = load("tp=4", "pipeline-model-parallel-size=8", "vpp=null", "num_moe_experts=8", "ep=2",
                  "dp=16")  # fmt: skip
    assert (recipe.tensor_model_parallel_size, recipe.num_experts) == (4, 8)
    assert (recipe.world.size, recipe.world.dp, recipe.world.pp) == (512, 16, 8)
    assert recipe.changed(tp="8", global_batch_size=512).world.dp == 8


def test_a_recipe_is_a_command_line_of_megatron():
    words = " ".join(load("fp8=hybrid", "recompute_modules=mlp core_attn").megatron_words())
    assert "--num-layers 80 " in words
    assert "--tensor-model-parallel-size 8 " in words
    assert "--num-virtual-stages-per-pipeline-rank 5 " in words
    assert "--fp8-format hybrid --recompute-modules mlp core_attn" in words
    assert {"--bf16", "--group-query-attention", "--disable-bias-linear", "--mock-data"} <= {
        *words.split()
    }
    assert "--is-hybrid-model" not in words


def test_overrides_win_in_order_and_keep_selectors_as_text():
    recipe = load("lr=1e-3", "lr=2e-3", "prism.ranks=pp=3,tp=0;5", "vpp=null")
    assert recipe.lr == 2e-3
    assert recipe.prism.ranks == "pp=3,tp=0;5"
    assert recipe.world.vpp is None
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
    assert recipes.load(file).data_path == str(tmp_path / "words.txt")
    with pytest.raises(RecipeError, match=r"no file gone\.txt"):
        recipes.load(file, ["data_path=gone.txt"])


def test_the_prism_section_alone(tmp_path):
    file = tmp_path / "flags.yaml"
    file.write_text("prism: {ranks: 5, tier: meta, world_size: 64}\ntp: 2\n")
    assert recipes.load_prism_section(file) == {"ranks": "5", "tier": "meta", "world_size": 64}
    file.write_text("tp: 2\n")
    assert recipes.load_prism_section(file) == {}
    file.write_text("prism: {rank: 5}\n")
    with pytest.raises(RecipeError, match=r"did you mean prism\.ranks"):
        recipes.load_prism_section(file)


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("lr", "an override is flag=value"),
        ("=3", "an override is flag=value"),
        ("hidden_size=010", "hidden_size=010: expected `int`"),
        ("train_iters=1.5", "expected `int`"),
        ("bf16=perhaps", "bf16=perhaps: expected `bool`"),
        ("lr=[", "quote the value"),
        ("tpp=4", "did you mean"),
        ("num_layer=4", "did you mean num_layers"),
        ("num_layers=null", "expected `int`"),
        ("num_layers=${oops}", "expected `int`"),
        ("cuda_graph_impl=local", "fix: for more than a plain GPT, run the job's own script"),
        ("params_dtype=bf16", "a recipe has no flag params_dtype"),
        ("prism.rank=4", "did you mean prism.ranks"),
        ("prism=4", "a recipe has no flag prism"),
        ("hardware.gpus_per_node=4", "prism.gpus_per_node"),
        ("normalization=BatchNorm", "use LayerNorm or RMSNorm"),
        ("prism.tier=tpu", "use auto or cuda or cpu or meta"),
        ("tp=3", "tp 3 x cp 1 x pp 4 = 12 does not divide 1,024 ranks"),
        ("world_size=100", "fix: world_size=96 or world_size=128"),
        ("pp=99999999999999999999", "pipeline_model_parallel_size is 99999999999999999999"),
        ("global_batch_size=250", "250 is not divisible by micro_batch_size 1 x dp 32"),
        ("global_batch_size=250", "fix: use global_batch_size=256"),
        ("global_batch_size=192", "rounds of pp 4, but there are 6 = 192"),
        ("train_iters=0", "train_iters is 0"),
        ("vocab_size=99999999999999999999", "to 2147483647"),
        ("lr=-1", "lr is -1.0"),
        ("clip_grad=nan", "clip_grad is nan"),
        ("seed=0", "use a number from 1"),
    ],
)
def test_a_slip_in_an_override_says_what_to_type(override, says):
    assert says in refused(override)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tp: [1, 2", "is no YAML"),
        ("- 1\n- 2\n", "it has no flags"),
        ("5", "it has no flags"),
        ("", "it has no flags"),
        ("num_layers: 2\n", "hidden_size is missing"),
        ("tp: 1\ntp: 2\n", "tp is there twice"),
        ("[" * 100_000, "nested too deeply"),  # the parser in C ends the process
        ("- " * 10_000, "nested too deeply"),
        ("#" * (1 << 20) + "#", "more than 262,144 bytes"),
    ],
)
def test_a_bad_file_is_explained(tmp_path, text, says):
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    assert says in refused(name=file)


ODD = ["use_tp_pp_dp_mapping=true", "tp=2", "pp=2", "world_size=8", "num_experts=2", "ep=2",
       "etp=1", "moe_layer_freq=[1, 0]", "pipeline_model_parallel_layout='Et|tL'", "fp8=hybrid",
       "prism.gpus_per_node=4", "lr=1e-05", "recompute_modules=mlp core_attn"]  # fmt: skip


@pytest.mark.parametrize(("name", "more"), [*((name, []) for name in recipes.shipped()),
                                            ("tiny-gpt_1cpu", ODD)])  # fmt: skip
def test_the_words_of_its_script_are_the_recipe(name, more):
    made = recipes.load(name, more)
    again = recipes.Recipe.of_words(made.words())
    assert (again.name, again.world) == (made.name, made.world)
    assert again.settings(repr) == made.settings(repr)
    from megatron_prism.emulate.command_line import options

    given = options.from_command_line(
        ["--prism-emulate", "--prism-world-size", str(made.world.size), *made.words()], {}
    )
    assert made.world.same_places(given.world)
