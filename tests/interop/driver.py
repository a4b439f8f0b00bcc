"""Saves and loads checkpoints with unmodified megatron-core, in a process of its own.

  driver.py save DIR MODEL FORMAT DP [BUCKET]     three steps, a save, the truth beside it (truth.pt), layout.json
  driver.py load DIR TRUTH MODEL DP [BUCKET]      loads DIR and compares all state with the truth, bit for bit

MODEL: toy, gpt_tp2, swiglu_tp2, gpt_pp2 (tied embeddings), moe_ep2. FORMAT: dp_reshardable, fully_reshardable, legacy.
Exit code 0: all done, and all equal.
"""

from __future__ import annotations

import datetime
import os
import sys
import tempfile
import traceback
import warnings
import zlib
from argparse import Namespace
from pathlib import Path
from typing import Any

import cpu_megatron  # beside this file
import torch
import torch.distributed as dist

SIZES = {"toy": (1, 1, 1), "gpt_tp2": (2, 1, 1), "swiglu_tp2": (2, 1, 1), "gpt_pp2": (1, 2, 1), "moe_ep2": (1, 1, 2)}
"""Tensor, pipeline and expert parallel sizes."""
FIELDS = ("param", "exp_avg", "exp_avg_sq")
ITERATION = 3


class Run:
    """One rank's model and optimizer."""

    def __init__(self, kind: str, bucket: int | None, seed: int) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module

        self.tp, self.pp, self.ep = SIZES[kind]
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=self.tp,
            pipeline_model_parallel_size=self.pp,
            expert_model_parallel_size=self.ep,
            create_gloo_process_groups=True,
        )
        self.state = parallel_state
        torch.manual_seed(seed)
        config, self.model = (
            _toy() if kind == "toy" else _gpt(self.tp, self.pp, self.ep, gated=kind.startswith("swiglu"))
        )
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=True,
            overlap_grad_reduce=bucket is not None,
            bucket_size=bucket,
        )
        first = self.state.get_pipeline_model_parallel_rank() == 0
        wrapped = Float16Module(config, self.model)
        self.ddp = DistributedDataParallel(config, ddp, wrapped, disable_bucketing=not first)
        options = OptimizerConfig(
            optimizer="adam",
            lr=0.01,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
            weight_decay=0.1,
        )
        self.optimizer = get_megatron_optimizer(options, [self.ddp])

    def place(self, param: Any) -> str:
        """The model-parallel rank that holds a param; experts are spread over expert-parallel ranks too."""
        state = self.state
        tp, pp = state.get_tensor_model_parallel_rank(), state.get_pipeline_model_parallel_rank()
        expert = not getattr(param, "allreduce", True)
        return f"tp{tp}_pp{pp}" + (f"_ep{state.get_expert_model_parallel_rank()}" if expert else "")

    def train(self, steps: int) -> None:
        """Made-up gradients: alike on ranks that hold copies of a param."""
        for step in range(steps):
            self.ddp.zero_grad_buffer()
            self.optimizer.zero_grad()
            for name, param in self.model.named_parameters():
                own = self.place(param).replace(f"_pp{self.stage}", "") if self._cut(param) else ""
                shared = name.replace("output_layer.weight", "embedding.word_embeddings.weight")
                seed = zlib.crc32(f"{shared} {own} {step}".encode())
                param.main_grad.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(seed)))
            self.ddp.finish_grad_sync()
            self.optimizer.step()

    @property
    def stage(self) -> int:
        return int(self.state.get_pipeline_model_parallel_rank())

    def _cut(self, param: Any) -> bool:
        return getattr(param, "tensor_model_parallel", False) or not getattr(param, "allreduce", True)

    def truth(self) -> dict[str, torch.Tensor]:
        """All state of this model-parallel rank, and its weights, by ``<place>/<param>/<field>``."""
        names = {param: name for name, param in self.model.named_parameters()}
        mine = [
            (self.place(param), names[param], span, param.numel(), tensors)
            for own in self.optimizer.chained_optimizers
            for param, span, tensors in _fragments(own)
        ]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        found: dict[str, torch.Tensor] = {}
        for place, name, (start, end), numel, tensors in (row for rows in everyone for row in rows):
            for field, tensor in zip(FIELDS, tensors, strict=True):
                key = f"{place}/{name}/{field}"
                found.setdefault(key, torch.full((numel,), float("nan")))[start:end] = tensor
        weights: list[Any] = [None] * dist.get_world_size()
        own = {f"{self.place(p)}/{name}/weight": p.detach().clone() for p, name in names.items()}
        dist.all_gather_object(weights, own)
        for row in weights:
            found.update(row or {})
        return found


def _fragments(own: Any) -> Any:
    for buffer in own.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                for param, spans in bucket["param_map"].items():
                    group, order = own.model_param_group_index_map[param]
                    main = own.optimizer.param_groups[group]["params"][order]
                    state = own.optimizer.state[main]
                    tensors = [t.detach().clone() for t in (main, state["exp_avg"], state["exp_avg_sq"])]
                    yield param, (spans["param"].start, spans["param"].end), tensors


def _toy() -> tuple[Any, Any]:
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=24,
        num_attention_heads=2,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_cpu_initialization=True,
    )

    class Toy(MegatronModule):
        def __init__(self) -> None:
            super().__init__(config)
            self.embedding = torch.nn.Embedding(131, 24)
            self.norm = torch.nn.LayerNorm(24)
            self.fc1 = torch.nn.Linear(24, 96)
            self.fc2 = torch.nn.Linear(96, 24)
            self.head = torch.nn.Linear(24, 131, bias=False)

    return config, Toy()


def _gpt(tp: int, pp: int, ep: int, *, gated: bool) -> tuple[Any, Any]:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    experts = {"num_moe_experts": 4, "moe_router_load_balancing_type": "none", "moe_ffn_hidden_size": 16}
    config = TransformerConfig(
        num_layers=2,
        hidden_size=24,
        num_attention_heads=2,
        ffn_hidden_size=32,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        add_bias_linear=ep == 1,
        **({"gated_linear_unit": True, "activation_func": torch.nn.functional.silu} if gated else {}),
        **(experts if ep > 1 else {}),
    )
    spec = get_gpt_layer_local_spec(num_experts=4 if ep > 1 else None, moe_grouped_gemm=False)
    model = GPTModel(
        config,
        spec,
        132,
        16,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=pp > 1,
    )
    return config, model


# --------------------------------------------------------------------------------------------------- save and load


def save(run: Run, root: Path, format: str) -> None:
    from megatron.core import dist_checkpointing

    folder = root / f"iter_{ITERATION:07d}"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    common = {"args": _args(run), "checkpoint_version": 3.0, "iteration": ITERATION}
    if format == "legacy":
        _save_legacy(run, folder, common)
    else:
        metadata = {
            "distrib_optim_sharding_type": format,
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
        }
        state = {**common, **_sharded(run, metadata, loading=False)}
        dist_checkpointing.save(state, str(folder), content_metadata=metadata)
    if dist.get_rank() == 0:
        (root / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))


def _args(run: Run) -> Namespace:
    return Namespace(
        tensor_model_parallel_size=run.tp,
        pipeline_model_parallel_size=run.pp,
        expert_model_parallel_size=run.ep,
        num_layers=getattr(run.model.config, "num_layers", None),
        data_parallel_size=run.state.get_data_parallel_world_size(),
    )


def _sharded(run: Run, metadata: dict[str, Any], *, loading: bool) -> dict[str, Any]:
    group = run.state.get_data_parallel_group(with_context_parallel=True)
    options = dict(metadata, dp_cp_group=group)
    state = {"model": run.model.sharded_state_dict(metadata=options)}
    state["optimizer"] = run.optimizer.sharded_state_dict(state, is_loading=loading, metadata=options)
    return state


def _legacy_folder(run: Run, folder: Path) -> Path:
    tp, pp = run.state.get_tensor_model_parallel_rank(), run.state.get_pipeline_model_parallel_rank()
    name = f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if run.pp > 1 else "")
    name += f"_{run.state.get_expert_model_parallel_rank():03d}" if run.ep > 1 else ""
    return folder / name


def _save_legacy(run: Run, folder: Path, common: dict[str, Any]) -> None:
    own = _legacy_folder(run, folder)
    own.mkdir(parents=True, exist_ok=True)
    first = run.state.get_data_parallel_rank() == 0 or run.state.get_expert_data_parallel_rank() == 0
    state = {**common, "model": run.model.state_dict_for_save_checkpoint(), "optimizer": run.optimizer.state_dict()}
    run.optimizer.save_parameter_state(str(own / "distrib_optim.pt"))
    if first:
        torch.save(state, own / "model_optim_rng.pt")


def load(run: Run, root: Path) -> None:
    from megatron.core import dist_checkpointing

    folder = root / f"iter_{ITERATION:07d}"
    assert (root / "latest_checkpointed_iteration.txt").read_text() == str(ITERATION)
    if any(folder.glob("mp_rank_*")):
        own = _legacy_folder(run, folder)
        state = torch.load(own / "model_optim_rng.pt", weights_only=False)
        run.model.load_state_dict(state["model"])
        run.optimizer.load_state_dict(state["optimizer"])
        run.optimizer.load_parameter_state(str(own / "distrib_optim.pt"))
    else:
        metadata = dist_checkpointing.load_content_metadata(str(folder))
        state = dist_checkpointing.load(_sharded(run, metadata, loading=True), str(folder))
        run.model.load_state_dict(state["model"])
        run.optimizer.load_state_dict(state["optimizer"])
    assert state["iteration"] == ITERATION


def compare(run: Run, truth: dict[str, torch.Tensor]) -> None:
    found = run.truth()
    assert found.keys() == truth.keys(), sorted(found.keys() ^ truth.keys())[:5]
    differ = [key for key in truth if not torch.equal(found[key], truth[key])]
    steps = {int(group["step"]) for group in run.optimizer.param_groups if group["params"]}
    assert not differ, f"{len(differ)} of {len(truth)} differ: {differ[:5]}"
    assert steps <= {ITERATION}, steps
    if dist.get_rank() == 0:
        print(f"{len(truth)} tensors are equal")


def work(rank: int, world: int, meeting: str, arguments: list[str]) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=datetime.timedelta(seconds=60)
    )
    verb, root, third, fourth = arguments[0], Path(arguments[1]), arguments[2], arguments[3]
    bucket = int(arguments[5]) if len(arguments) > 5 else None
    if verb == "save":
        run = Run(third, bucket, seed=1)
        run.train(ITERATION)
        save(run, root, fourth)
        _describe(run, root)
        truth = run.truth()
        if rank == 0:
            torch.save(truth, root / "truth.pt")
    else:
        run = Run(fourth, bucket, seed=2)
        load(run, root)
        compare(run, torch.load(third))
    dist.barrier()


def _describe(run: Run, root: Path) -> None:
    """The layout file, by the three lines that a training script would have."""
    from zero1ckpt.foreign.megatron.layout_file import describe_optimizer, write_layout

    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, describe_optimizer(run.optimizer, run.ddp))
    if dist.get_rank() == 0:
        write_layout(root / "layout.json", rows)


def main(arguments: list[str]) -> int:
    """Runs as many processes as the model needs. Set OMP_NUM_THREADS=1 and TORCHDYNAMO_DISABLE=1."""
    warnings.filterwarnings("ignore")
    cpu_megatron.install()
    torch.set_num_threads(1)
    cpu_megatron.use_fused_adam()
    kind = arguments[2] if arguments[0] == "save" else arguments[3]
    tp, pp, _ = SIZES[kind]
    world = tp * pp * int(arguments[4])
    meeting = tempfile.mktemp()
    children = [_fork(rank, world, meeting, arguments) for rank in range(world)]
    failed = [os.waitpid(child, 0)[1] for child in children]
    return int(any(failed))


def _fork(rank: int, world: int, meeting: str, arguments: list[str]) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work(rank, world, meeting, arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    from multiprocessing import util

    util._exit_function()  # ends the writer's manager process, which would keep pipes open
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
