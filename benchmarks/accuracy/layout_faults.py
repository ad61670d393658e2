"""Planted faults of a layout, and what ``prism verify`` says of them.

``python -m benchmarks.accuracy.layout_faults CHECKOUT [--only NAME ...] [--bisect]``

CHECKOUT is Megatron-LM's core_v0.16.1 or core_v0.19.0.  In a copy of it one fault after the other
is planted that the release can have, or a fix of its history undone, and a job that has the part in
question is verified; with ``--healthy`` the same jobs without a fault, which have to be the same.
Prints named (the parameter, call or value that the fault is at comes first), noticed or missed.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_prism.core.errors import PrismError
from megatron_prism.core.world import World
from megatron_prism.features.verify.verdict import Line, Verdict, verify

JOB = """
--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --bf16 --lr 1e-4
--max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 256 --train-iters 30000
--mock-data --tokenizer-type NullTokenizer --vocab-size 32000 --transformer-impl local
--position-embedding-type rope --no-rope-fusion --no-persist-layer-norm --swiglu
""".split()  # noqa: SIM905
TP, SP = "--tensor-model-parallel-size 4", "--tensor-model-parallel-size 4 --sequence-parallel"
PP = "--pipeline-model-parallel-size 4"
# local layers have no context parallelism (core/transformer/dot_product_attention.py)
CP = "--context-parallel-size 4 --transformer-impl transformer_engine"
MOE = ("--num-experts 64 --moe-router-topk 4 --moe-token-dispatcher-type alltoall "
       "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-1 "
       "--disable-bias-linear")  # fmt: skip
EP, OVERLAP = "--expert-model-parallel-size 8", "--use-distributed-optimizer --overlap-grad-reduce"
DDP = "megatron/core/distributed/distributed_data_parallel.py"
BUCKETS = "megatron/core/distributed/param_and_grad_buffer.py"
FINALIZE = "megatron/core/distributed/finalize_model_grads.py"
SCHEDULES = "megatron/core/pipeline_parallel/schedules.py"
ROUTER = "megatron/core/transformer/moe/router.py"
EXTENSIONS = "megatron/core/extensions/transformer_engine.py"
TE = "--transformer-impl transformer_engine --moe-grouped-gemm"
OPTIMIZER = "megatron/core/optimizer/optimizer.py"
DSA = (
    "--multi-latent-attention --q-lora-rank 192 --kv-lora-rank 64 --qk-head-dim 16 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 16 --experimental-attention-variant dsa "
    "--dsa-indexer-n-heads 64 --dsa-indexer-head-dim 128 --dsa-indexer-topk 2048 "
    "--dsa-indexer-loss-coeff 1.0 --disable-bias-linear --transformer-impl transformer_engine"
)
MTP = "megatron/core/transformer/multi_token_prediction.py"


@dataclass(frozen=True)
class Fault:
    """``old`` becomes ``new`` in ``file``; ``named``: what the first difference has to say.

    fixed : the commit or pull request of Megatron-LM that this undoes, if it is one
    """

    name: str
    flags: str
    world: World
    file: str
    old: str
    new: str
    named: str
    also: tuple[str, str] = ("\0", "")  # another old and new of the same file
    fixed: str = ""


FAULTS = (
    Fault("norms' gradients are not summed over tp", SP, World(4, tp=4), FINALIZE,
          '(config.sequence_parallel and getattr(param, "sequence_parallel", False)) or (', "(",
          r"norm.*not reduced|not reduced.*tp"),
    Fault("query norms' gradients are not summed over tp", f"{TP} --qk-layernorm", World(4, tp=4),
          FINALIZE, 'config.qk_layernorm and ("q_layernorm"', 'False and ("q_layernorm"',
          r"[qk]_layernorm"),
    Fault("tied embeddings' gradients are not summed", PP, World(4, pp=4), FINALIZE,
          "    _allreduce_word_embedding_grads(model, config, embd_group, pp_group)", "    pass",
          r"embedding"),
    Fault("experts' gradients are divided by edp", f"{MOE} {EP}", World(32, ep=8), DDP,
          "expert_gradient_scaling_factor = 1.0 / data_parallel_world_size",
          "expert_gradient_scaling_factor = 1.0 / self.expt_dp_group.size()", r"experts",
          ("assert gradient_scaling_factor == target_gradient_scaling_factor", "pass")),
    Fault("gradients are divided by dp without cp", CP, World(8, cp=4), DDP,
          "self.dp_cp_group.size()",
          "(self.dp_cp_group.size() // config.context_parallel_size)", r"2 x",
          fixed="3bdcbbbe5d"),
    Fault("auxiliary losses are not scaled by cp", f"{MOE} {CP}", World(4, cp=4), SCHEDULES,
          "loss_scale * cp_group_size / num_microbatches", "loss_scale / num_microbatches",
          r"router", fixed="#2237"),
    Fault("auxiliary losses are not divided by microbatches", MOE, World(8), SCHEDULES,
          "loss_scale * cp_group_size / num_microbatches", "loss_scale * cp_group_size",
          r"router|layernorm"),
    Fault("the router's gradient is not summed over tp", f"{MOE} {SP}", World(4, tp=4), ROUTER,
          "setattr(self.weight, 'sequence_parallel', self.config.sequence_parallel)", "pass",
          r"router"),
    Fault("buckets are reduced before their last gradient", OVERLAP, World(8), DDP,
          """                    param.main_grad.add_(param.grad.data)
                param.grad = None

                if self.ddp_config.overlap_grad_reduce:
                    self.param_to_bucket_group[param].register_grad_ready(
                        param, self.force_all_reduce
                    )
""", """                    late = param.grad.data
                param.grad = None
                if self.ddp_config.overlap_grad_reduce:
                    self.param_to_bucket_group[param].register_grad_ready(param)
                param.main_grad.add_(late)
""", r"gradient of iteration 2"),
    Fault("losses are not divided by microbatches", "", World(8), SCHEDULES,
          "                    output_tensor /= num_microbatches\n", "", r"x: .*dp"),
    Fault("the norm counts copies over tp", SP, World(4, tp=4), OPTIMIZER,
          "if grad_not_none and is_not_shared and is_not_tp_duplicate:",
          "if grad_not_none and is_not_shared:", r"^gradient norm"),
    Fault("the norm counts tied embeddings twice", PP, World(4, pp=4), OPTIMIZER,
          "if grad_not_none and is_not_shared and is_not_tp_duplicate:",
          "if grad_not_none and is_not_tp_duplicate:", r"^gradient norm"),
    Fault("tokens are not counted over dp", "--calculate-per-token-loss", World(8), FINALIZE,
          "        torch.distributed.all_reduce(num_tokens, group=dp_cp_group)\n", "", r"x: .*dp"),
    Fault("experts' biases are not counted over dp",
          f"{MOE} --moe-router-enable-expert-bias --moe-router-score-function sigmoid",
          World(8), "megatron/core/transformer/moe/moe_utils.py",
          """        torch.distributed.all_reduce(
            tokens_per_expert,
            # TODO(Hepteract): delete the usage of the global parallel_state.
            group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True),
        )
""", "", r"expert_bias"),
    Fault("parameters are not gathered", "--use-distributed-optimizer", World(8), BUCKETS,
          "        async_op = self.ddp_config.overlap_param_gather and not force_sync\n",
          "        return\n", r"loss of iteration 2"),
    Fault("gradients of inputs are not summed over tp", TP, World(4, tp=4),
          "megatron/core/tensor_parallel/layers.py",
          "handle = torch.distributed.all_reduce(grad_input, group",
          "handle = torch.distributed.all_reduce(grad_input.clone(), group", r"gradient.*norm"),
    Fault("the softmax over the vocabulary is one rank's", TP, World(4, tp=4),
          "megatron/core/tensor_parallel/cross_entropy.py", """        torch.distributed.all_reduce(
            sum_exp_logits,
            op=torch.distributed.ReduceOp.SUM,
            group=get_tensor_model_parallel_group(),
        )
""", "", r"^loss"),
    Fault("ranks take the wrong half of a sequence", CP, World(4, cp=4), "megatron/core/utils.py",
          "fill_(2 * cp_size - cp_rank - 1)", "fill_(cp_size + cp_rank)", r"^loss"),
    Fault("losses are multiplied by cp", CP, World(4, cp=4), SCHEDULES,
          "                output_tensor, num_tokens, loss_reduced = outputs\n",
          "                output_tensor, num_tokens, loss_reduced = outputs\n"
          "                output_tensor = output_tensor * cp_group_size\n", r"2 x: cp",
          fixed="5946e24b37"),
    Fault("averaged gradients of experts are divided by ep",
          f"{MOE} {SP} --expert-tensor-parallel-size 1 --expert-model-parallel-size 4 "
          "--use-distributed-optimizer --ddp-average-in-collective",
          World(16, tp=4, ep=4, etp=1), DDP,
          "expert_gradient_scaling_factor = self.expt_dp_group.size() / self.dp_cp_group.size()",
          "expert_gradient_scaling_factor = 1.0 / config.expert_model_parallel_size", r"experts",
          ("""                            gradient_scaling_factor / data_parallel_group.size()
                            == target_gradient_scaling_factor
""", "True"), fixed="4f8974a400"),
    Fault("router z losses are not divided by tp", f"{MOE} {SP} --moe-z-loss-coeff 1e-1",
          World(4, tp=4), ROUTER, "self.config.moe_z_loss_coeff / self.tp_cp_group.size()",
          "self.config.moe_z_loss_coeff", r"router", fixed="cac8d1a3f0"),
    Fault("auxiliary losses of tokens lack tp (0.16.1 as released)",
          f"{MOE} {SP} --calculate-per-token-loss", World(4, tp=4), ROUTER,
          "aux_loss * num_tokens)", "aux_loss * num_tokens)", r"router", fixed="#5047"),
    Fault("auxiliary losses of tokens lack tp", f"{MOE} {SP} --calculate-per-token-loss",
          World(4, tp=4), ROUTER, "aux_loss * num_local_tokens * self.tp_cp_group.size()",
          "aux_loss * num_local_tokens", r"router", fixed="#5047"),
    Fault("experts without ep are reduced over dp in place of edp",
          f"{MOE} {SP} {TE} --expert-tensor-parallel-size 1", World(8, tp=4, etp=1), EXTENSIONS,
          "        param.allreduce = not use_expert_pgs\n", "        param.allreduce = True\n",
          r"experts", fixed="#5916"),
    Fault("shards of experts are not counted in the norm", f"{MOE} {SP} {TE} {EP}",
          World(32, tp=4, ep=8), EXTENSIONS,
          "            param.tensor_model_parallel = is_partitioned\n", "            pass\n",
          r"^gradient norm", fixed="#5916"),
    Fault("the gradient of MTP's projection is summed over tp", f"{SP} --mtp-num-layers 1",
          World(4, tp=4), MTP, "hidden_states = gather_from_tensor_model_parallel_region(",
          "hidden_states = all_gather_last_dim_from_tensor_parallel_region(", r"mtp|embedding",
          ("    gather_from_tensor_model_parallel_region,\n",
           "    gather_from_tensor_model_parallel_region,\n"
           "    all_gather_last_dim_from_tensor_parallel_region,\n"), fixed="06e9f28b30"),
    Fault("tokens of local experts are in the wrong order", f"{MOE} {SP} {TE} {EP}",
          World(32, tp=4, ep=8), "megatron/core/transformer/moe/token_dispatcher.py",
          """num_global_tokens_per_local_expert.view(
                -1, self.num_local_experts
            )
""", "num_global_tokens_per_local_expert\n", r"experts", fixed="54d4b3ddbb"),
    Fault("the indexer's loss is not divided by microbatches", DSA, World(8), SCHEDULES,
          "loss_scale * cp_size_for_scaling / num_microbatches", "loss_scale * cp_size_for_scaling",
          r"indexer", fixed="#4070"),
)  # fmt: skip


def main() -> int:
    """Print a line a fault; returns 1 where one is missed or a job without a fault is not same."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names")
    parser.add_argument("--healthy", action="store_true", help="the same jobs without a fault")
    parser.add_argument("--bisect", action="store_true", help="name the flag, too")
    args = parser.parse_args()
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / "checkout"
        copy.mkdir()
        shutil.copytree(args.checkout / "megatron", copy / "megatron")
        for file in args.checkout.glob("*.py"):
            shutil.copy(file, copy)
        jobs = [fault for fault in FAULTS if any(word in fault.name for word in args.only)]
        jobs = [fault for fault in jobs if fault.old in (copy / fault.file).read_text()]
        if args.healthy:
            alike = {(f.flags, f.world): f for f in jobs if f.old != f.new}
            jobs = [replace(f, name=f.flags, file="", named="") for f in alike.values()]
        for number, fault in enumerate(jobs):
            start = time.perf_counter()
            found = planted(fault, copy, Path(place) / str(number), args.bisect)
            said = score(fault, found)
            counts[said] = counts.get(said, 0) + 1
            flag = f", gone without {', '.join(found.culprits)}" if found.culprits else ""
            took = time.perf_counter() - start
            fixed = f" [{fault.fixed}]" if fault.fixed else ""
            print(f"{said:<8} {fault.name}{fixed}: {first(found)}{flag} ({took:.0f} s)", flush=True)
    print(", ".join(f"{n} {said}" for said, n in sorted(counts.items())))
    return int(bool({"missed", "alarm"} & counts.keys()))


def planted(fault: Fault, checkout: Path, folder: Path, bisect: bool) -> Verdict:
    """The verdict on a job with ``fault``, which is taken back."""
    world = fault.world
    words = (str(checkout / "pretrain_gpt.py"), *JOB, *fault.flags.split())
    line = Line(words, world, True, sys.executable)
    file = checkout / (fault.file or "pretrain_gpt.py")
    before = file.read_text()
    try:
        if fault.file:
            file.write_text(before.replace(fault.old, fault.new).replace(*fault.also))
        return verify(line, None, folder, lambda text: None, bisect=bisect)
    except PrismError as error:
        return Verdict(words, world, world, why=str(error))
    finally:
        file.write_text(before)


def first(found: Verdict) -> str:
    """The first difference in a line."""
    one = found.difference
    if one is None:
        return found.why or "same"
    notes = "; ".join(one.notes)
    return f"{one.what} of iteration {one.iteration}, {one.where} ({one.place}): {notes}"


def score(fault: Fault, found: Verdict) -> str:
    """named, noticed or missed; of a job without a fault healthy or alarm."""
    if not (fault.file or fault.named):
        return {True: "healthy", False: "alarm", None: "undecided"}[found.same]
    if found.same is not False:
        return "missed" if found.same else "undecided"
    return "named" if re.search(fault.named, first(found)) else "noticed"


if __name__ == "__main__":
    sys.exit(main())
