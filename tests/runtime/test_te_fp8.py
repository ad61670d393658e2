"""FP8 of the virtual Transformer Engine: the bytes that TE's layers keep, recipe by recipe."""

import contextlib

import pytest
import torch

from megatron_prism.core.errors import UnsupportedError
from megatron_prism.runtime.devices import kernels
from megatron_prism.runtime.devices.live_bytes import LiveBytes
from megatron_prism.runtime.te import base, distributed, fp8, moe, parameters_fp8
from megatron_prism.runtime.te.linear import GroupedLinear, LayerNormLinear, Linear
from megatron_prism.runtime.te.row_kernels import RMSNorm

ROWS, WIDE, OUT = 256, 512, 384
RECIPES = {
    "delayed": fp8.DelayedScaling,
    "tensorwise": fp8.Float8CurrentScaling,
    "blockwise": fp8.Float8BlockScaling,
    "mxfp8": fp8.MXFP8BlockScaling,
}
# scales of an input by columns, and of a weight both ways: multiples of 128 need no padding but
# that to 4 square blocks
SCALES = {
    "delayed": (4, 4),
    "tensorwise": (4, 4),
    "blockwise": (4 * ROWS // 128 * WIDE, 4 * (OUT // 128 * 4 + WIDE // 128 * 4)),
    "mxfp8": (ROWS // 32 * WIDE, 2 * OUT * WIDE // 32),
}
STATE = {"delayed": 4 * (1024 + 1) * (3 + 2)}  # amax history and scale of 3 + 2 tensors


@pytest.fixture
def live():
    """Live bytes of a meta run; FP8's state of the process is as new."""
    fp8.FP8GlobalStateManager.reset()
    base.get_workspace(torch.empty(0, device="meta"))
    base.get_workspace(torch.empty(0, device="meta"), grouped=True)
    with LiveBytes("meta") as counter:
        yield counter
    fp8.FP8GlobalStateManager.reset()
    moe.counts["made_up"] = False


def meta(*shape, **kwargs):
    return torch.empty(*shape, device="meta", dtype=torch.bfloat16, **kwargs)


def layer(kind, **kwargs):
    given = {"bias": False, "device": "meta", "params_dtype": torch.bfloat16, **kwargs}
    if kind is GroupedLinear:
        return kind(2, WIDE, OUT, **given)
    if kind is LayerNormLinear:
        given["normalization"] = "RMSNorm"
    return kind(WIDE, OUT, **given)


@pytest.mark.parametrize("name", RECIPES)
def test_a_linear_keeps_its_input_by_columns_and_its_weight_both_ways(name, live):
    module, x = layer(Linear), meta(ROWS, WIDE, requires_grad=True)
    before = live.current()
    with fp8.autocast(fp8_recipe=RECIPES[name]()):
        out = module(x, is_first_microbatch=True)
    inputs, weights = SCALES[name]
    kept = ROWS * WIDE + inputs + 2 * OUT * WIDE + weights + STATE.get(name, 0)
    assert live.current() - before == kept + out.numel() * 2
    out.sum().backward()
    del out
    # the weight in FP8 and delayed scaling's state stay for the next microbatch, the input does not
    stays = 2 * OUT * WIDE + weights + STATE.get(name, 0)
    assert live.current() - before == stays + 2 * (ROWS * WIDE + OUT * WIDE)  # and the gradients


@pytest.mark.parametrize("name", RECIPES)
def test_a_norm_and_linear_keeps_the_norms_output_in_fp8(name, live):
    module, x = layer(LayerNormLinear), meta(ROWS, WIDE, requires_grad=True)
    before = live.current()
    live.reset_peak()
    with fp8.autocast(fp8_recipe=RECIPES[name]()):
        out = module(x, is_first_microbatch=True)
    inputs, weights = SCALES[name]
    kept = ROWS * WIDE + inputs + 4 * ROWS + 2 * OUT * WIDE + weights + STATE.get(name, 0)
    assert live.current() - before == kept + out.numel() * 2
    out.sum().backward()


def test_the_norms_output_in_high_precision_is_there_while_it_is_cast(live):
    peaks = {}
    for name in RECIPES:
        module, x = layer(LayerNormLinear), meta(64 * ROWS, WIDE)
        before = live.current()
        live.reset_peak()
        with torch.no_grad(), fp8.autocast(fp8_recipe=RECIPES[name]()):
            state = module(x[:ROWS])  # what stays is there before
            live.reset_peak()
            norm = module(x)
            peaks[name] = live.peak() - before
        del state, norm
    rows = 64 * ROWS
    assert peaks["delayed"] < rows * (WIDE + 2 * OUT + 16) + 2 * OUT * WIDE + STATE["delayed"]
    assert peaks["blockwise"] > rows * 3 * WIDE


@pytest.mark.parametrize("name", ["tensorwise", "blockwise", "mxfp8"])
def test_the_original_input_is_kept_where_megatron_asks_for_it(name, live):
    module, x = layer(Linear, save_original_input=True), meta(ROWS, WIDE, requires_grad=True)
    before = live.current()
    with fp8.autocast(fp8_recipe=RECIPES[name]()):
        out = module(x, is_first_microbatch=True)
    kept = 2 * OUT * WIDE + SCALES[name][1]
    assert live.current() - before == kept + out.numel() * 2
    out.sum().backward()
    assert x.grad.shape == x.shape


def test_delayed_scaling_cannot_keep_the_original_input(live):
    module = layer(Linear, save_original_input=True)
    with fp8.autocast(), pytest.raises(ValueError, match="save_original_input"):
        module(meta(ROWS, WIDE, requires_grad=True))


def test_a_weight_in_fp8_is_kept_only_where_microbatches_are_numbered(live):
    for first, stays in ((None, 0), (True, 2 * OUT * WIDE + 8 - 4)):
        module, x = layer(Linear), meta(ROWS, WIDE, requires_grad=True)
        before = live.current()
        for _ in range(2):
            with fp8.autocast(fp8_recipe=fp8.Float8CurrentScaling()):
                module(x, is_first_microbatch=first).sum().backward()
            module.weight.grad = x.grad = None
        assert live.current() - before == stays


@pytest.mark.parametrize("name", RECIPES)
def test_experts_keep_their_rows_by_columns(name, live):
    module, x = layer(GroupedLinear), meta(ROWS, WIDE, requires_grad=True)
    before = live.current()
    with fp8.autocast(fp8_recipe=RECIPES[name]()):
        out = module(x, [ROWS // 2, ROWS // 2], is_first_microbatch=True)
    inputs, weights = SCALES[name]
    inputs *= 2 if name in STATE or name == "tensorwise" else 1  # one scale an expert
    kept = ROWS * WIDE + inputs + 2 * (2 * OUT * WIDE + weights + STATE.get(name, 0))
    assert live.current() - before == kept + out.numel() * 2
    out.sum().backward()
    assert module.weight1.grad.shape == module.weight1.shape


@pytest.mark.parametrize("name", ["delayed", "blockwise"])
def test_the_second_pass_of_a_recompute_makes_the_weight_by_columns(name, live, monkeypatch):
    """The first knows of no gradients; from then on both ways stay."""
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state: None)
    module, x = layer(LayerNormLinear), meta(ROWS, WIDE, requires_grad=True)
    with fp8.autocast(fp8_recipe=RECIPES[name]()):
        out = distributed.checkpoint(lambda x: module(x, is_first_microbatch=True), x)
    assert module.fp8_weights["weight"].columns is None
    module_later = module.forward
    module.forward = lambda x, **_: module_later(x, is_first_microbatch=False)
    out.sum().backward()
    assert module.fp8_weights["weight"].columns.shape == (WIDE, OUT)
    assert module.fp8_weights["weight"].rows.shape == (OUT, WIDE)
    if module.fp8_state.history:
        assert not module.fp8_state.stash


def test_products_in_fp8_are_announced_as_such(live, monkeypatch):
    told = []

    class Meter:
        def add(self, name, flops, traffic, tensors):
            told.append((name, flops, str(tensors[0].dtype)))

    monkeypatch.setattr(kernels, "meter", Meter())
    with fp8.autocast(fp8_recipe=fp8.DelayedScaling(fp8_format=fp8.Format.HYBRID)):
        out = layer(Linear)(meta(ROWS, WIDE, requires_grad=True))
    out.sum().backward()
    flops = 2 * ROWS * WIDE * OUT
    found = [(flops, dtype.removeprefix("torch.float8_")) for name, flops, dtype in told
             if name == "gemm"]  # fmt: skip
    assert found == [(flops, "e4m3fn"), (flops, "e5m2"), (flops, "e5m2")]


def test_padding_is_a_copy_unless_every_count_fits(live):
    pad, unpad = moe.Fp8Padding(2, align_size=16), moe.Fp8Unpadding(2, align_size=16)
    x = meta(40, 8, requires_grad=True)
    out, counts = pad(x, [7, 33])
    assert (out.shape, counts) == ((64, 8), [16, 48])
    unpad(out, [7, 33]).sum().backward()
    assert x.grad.shape == x.shape
    same = meta(48, 8)
    assert pad(same, [16, 32]) == (same, [16, 32])
    assert unpad(same, [16, 32]) is same
    moe.counts["made_up"] = True  # shares of tier meta, which no router would give
    out, counts = pad(same, [16, 32])
    assert counts == [32, 32]
    assert unpad(out, [16, 32]).shape == (48, 8)


def test_padding_puts_rows_back():
    x = torch.arange(12.0).view(6, 2)
    out, counts = moe.Fp8Padding(2, align_size=4)(x, [1, 5])
    assert counts == [4, 8]
    assert torch.equal(out[4:9], x[1:])
    assert torch.equal(moe.Fp8Unpadding(2, align_size=4)(out, [1, 5]), x)


def test_dimensions_that_fp8_cannot_multiply_are_named(live):
    with fp8.autocast(), pytest.raises(ValueError, match="divisible by 8"):
        layer(Linear)(meta(6, WIDE))


def test_mxfp8_wants_whole_blocks_of_rows_and_of_columns(live):
    with fp8.autocast(fp8_recipe=fp8.MXFP8BlockScaling()):
        for module, x in (
            (layer(Linear), meta(48, WIDE)),
            (
                Linear(48, OUT, bias=False, device="meta", params_dtype=torch.bfloat16),
                meta(ROWS, 48),
            ),
            (
                GroupedLinear(1, 48, OUT, bias=False, device="meta", params_dtype=torch.bfloat16),
                meta(ROWS, 48),
            ),
        ):
            splits = [[ROWS]] if isinstance(module, GroupedLinear) else []
            with pytest.raises(RuntimeError, match="divisible by 32"):
                module(x, *splits)


@pytest.mark.parametrize(("rows", "out"), [(24, OUT), (ROWS, 24)])
def test_a_backward_that_cublas_would_refuse_is_refused(rows, out, live):
    """Tokens and output features are what FP8's products in backward contract over."""
    module, x = (
        Linear(WIDE, out, bias=False, device="meta", params_dtype=torch.bfloat16),
        meta(rows, WIDE, requires_grad=True),
    )
    with fp8.autocast(fp8_recipe=fp8.Float8CurrentScaling()):
        done = module(x)
    with pytest.raises(RuntimeError, match="24: not divisible by 16"):
        done.sum().backward()


@pytest.mark.parametrize(("rows", "dtype"), [(128, torch.uint8), (96, torch.bfloat16)])
@pytest.mark.parametrize("cast", [False, True])
def test_parts_of_blocks_travel_in_high_precision(rows, dtype, cast, live, monkeypatch):
    """_start_all_gather_fp8_blockwise looks at the part, be it cast already or not."""
    travelled = []

    def gather(to, part, **_):
        assert to.numel() == 2 * part.numel()
        travelled.append((tuple(part.shape), part.dtype))

    monkeypatch.setattr(parameters_fp8, "group_size", lambda group: 2)
    monkeypatch.setattr(parameters_fp8.dist, "all_gather_into_tensor", gather)
    monkeypatch.setattr(parameters_fp8, "_coalesced", lambda *_: contextlib.nullcontext())
    q = fp8.quantizer_of(fp8.Float8BlockScaling(), "input")
    q.set_usage(True, False)
    x = meta(rows, WIDE)
    whole, _ = parameters_fp8.gather_quantized(q(x) if cast else x, None, q)
    assert travelled[-1] == ((rows, WIDE), dtype)
    assert len(travelled) == (2 if dtype == torch.uint8 else 1)  # scales and values
    assert (whole.rows.shape, whole.rows.dtype) == ((2 * rows, WIDE), torch.float8_e4m3fn)
    assert whole.row_scales.shape == (WIDE // 128, 2 * rows)


def test_a_recompute_keeps_a_part_of_its_input_where_ranks_share_it(live, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state: None)
    monkeypatch.setattr(distributed.dist, "get_world_size", lambda group: 4)
    monkeypatch.setattr(distributed.dist, "get_rank", lambda group: 3)
    gathered = []
    monkeypatch.setattr(
        distributed.dist,
        "all_gather_into_tensor",
        lambda to, part, group: gathered.append(part.shape),
    )
    module, leaf = layer(Linear), meta(ROWS, WIDE, requires_grad=True)
    x = leaf * 1
    given = {"distribute_saved_activations": True, "tp_group": "tp"}
    with fp8.autocast(fp8_recipe=fp8.Float8CurrentScaling()):
        out = distributed.checkpoint(lambda x: module(x, is_first_microbatch=True), x, **given)
    assert x.shape == (ROWS * WIDE // 4,)
    out.sum().backward()
    assert gathered == [x.shape]
    assert leaf.grad.shape == leaf.shape


@pytest.mark.parametrize(
    ("use", "named"),
    [
        (lambda: fp8.autocast(fp8_recipe=fp8.NVFP4BlockScaling()), "NVFP4BlockScaling"),
        (lambda: fp8.autocast(fp8_recipe=fp8.CustomRecipe()), "CustomRecipe"),
        (lambda: fp8.autocast(fp8_recipe=fp8.DelayedScaling(fp8_dpa=True)), "attention in FP8"),
        (lambda: fp8.fp8_model_init(recipe=fp8.NVFP4BlockScaling()), "NVFP4BlockScaling"),
    ],
)
def test_what_is_missing_is_named(use, named):
    with pytest.raises(UnsupportedError, match=named) as caught:
        use().__enter__()
    assert caught.value.fix
    assert not fp8.FP8GlobalStateManager.is_fp8_enabled()


@pytest.mark.parametrize("name", RECIPES)
def test_a_parameter_in_fp8_is_its_values_and_takes_no_second_copy(name, live):
    before = live.current()
    with fp8.fp8_model_init(enabled=True, recipe=RECIPES[name]()):
        module = layer(Linear, device=torch.device("meta"))  # "meta" would put this off
        norm = RMSNorm(WIDE, device=torch.device("meta"))
    weight = module.weight
    assert isinstance(weight, parameters_fp8.QuantizedTensor)
    assert not isinstance(norm.weight, parameters_fp8.QuantizedTensor)
    assert (weight.shape, weight.dtype, weight.requires_grad) == ((OUT, WIDE), torch.bfloat16, True)
    assert weight.partition_dim == 0
    assert isinstance(weight, parameters_fp8.MXFP8Tensor) == (name == "mxfp8")
    taken = 2 * OUT * WIDE + SCALES[name][1] + STATE.get(name, 0) + 4 * WIDE
    assert live.current() - before == taken
    x = meta(ROWS, WIDE, requires_grad=True)
    with fp8.autocast(fp8_recipe=RECIPES[name]()):
        out = module(x, is_first_microbatch=True)
    kept = ROWS * WIDE + SCALES[name][0]
    assert live.current() - before == taken + kept + 2 * (x.numel() + out.numel())
    out.sum().backward()
    assert weight.grad.shape == weight.shape
    assert not isinstance(weight.grad, parameters_fp8.QuantizedTensor)


def test_megatrons_buffer_becomes_the_values_of_a_parameter(live, monkeypatch):
    monkeypatch.setattr(parameters_fp8.dist, "all_reduce", lambda *args, **kwargs: None)
    with fp8.fp8_model_init(enabled=True, recipe=fp8.Float8BlockScaling()):
        weight = layer(Linear, device=torch.device("meta")).weight
    buffer = torch.empty(OUT * WIDE, dtype=torch.uint8, device="meta")
    parameters_fp8.replace_raw_data(weight.data, buffer.view(OUT, WIDE))
    assert weight.held.rows.untyped_storage()._cdata == buffer.untyped_storage()._cdata
    master = torch.empty(OUT * WIDE // 2, device="meta")
    weight.held.update_usage(columns=False)
    before = live.current()
    live.reset_peak()
    parameters_fp8.cast_master_weights_to_fp8([weight], [master], [0], None, None, True)
    assert live.peak() - before == 2 * master.numel() + 2 * 4 * weight.held.row_scales.numel()
    assert live.current() == before
    parameters_fp8.post_all_gather_processing([weight])
    assert weight.held.columns.shape == (WIDE, OUT)
    assert weight.float().dtype == torch.float32
    assert weight.detach().view(-1)[:WIDE].shape == (WIDE,)


def test_values_in_fp8_are_refused_and_point_to_shapes():
    module = Linear(16, 16, device="cpu")
    with fp8.autocast(), pytest.raises(UnsupportedError, match="FP8 with values") as caught:
        module(torch.ones(8, 16))
    assert "--prism-tier meta" in caught.value.fix
