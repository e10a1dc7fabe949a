"""Pipeline parallelism: each rank of a ``pp`` mesh holds some layers, and micro-batches flow through them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from xffl.checks import integer, one_of
from xffl.distributed.agreement.consistency import check_consistent
from xffl.distributed.parameters import SCHEDULES
from xffl.distributed.values.sharding import reshard
from xffl.errors import ConfigError, StateError
from xffl.planning.stages import layers_of_stages

__all__ = ["PipelineModel", "Skip", "split_model"]


Loss = Callable[[Any, torch.Tensor], torch.Tensor]
Tensors = tuple[torch.Tensor, ...]
Named = dict[str, Any]
Sizes = list[tuple[list[int], torch.dtype]]


class PipelineModel(nn.Module):
    """Run a stage's module as one of a pipeline; its parameters keep their names.

    Made by all ranks of a mesh of one dimension, rank i with stage i (:func:`xffl.parallel.axes.pipeline.split_model`),
    after tensor parallelism, FSDP2 or DDP were applied to the module over the cell's other dimensions. Every call is
    collective over the mesh's group, and **all its ranks are given the same batch**: the first stage uses the inputs,
    the last the target, and all know the sizes. It is cut into equal micro-batches along dimension 0, for each of which
    one activation goes forward between neighbours and one gradient back; ``loss(output, target)`` is a mean over a
    micro-batch's elements, on the last stage. The schedule is ``"1f1b"`` (at most as many micro-batches in flight as
    stages, needs as many) or ``"gpipe"`` (all forward, then all backward).

    Where the sizes of a batch are new, the stages compare it, and one forward pass without gradients tells the
    activations' sizes and finds what fails, on all stages alike. With FSDP2 that pass gathers parameters, so
    data-parallel ranks must meet new sizes at the same call. FSDP2 and DDP reduce once, after the last micro-batch;
    FSDP2 gathers the parameters anew for each unless it is given ``reshard_after_forward=False``.

    After an exception inside a call the ranks are out of step, and gradients are undefined: end the job.
    """

    def __init__(
        self, module: nn.Module, mesh: DeviceMesh, loss: Loss, *, micro_batches: int, schedule: str = "1f1b"
    ) -> None:
        super().__init__()
        if mesh.ndim != 1:
            raise ConfigError(f"the mesh of a pipeline has {mesh.ndim} dimensions; give a mesh of one, mesh['pp']")
        one_of("schedule", schedule, SCHEDULES)
        what = f"micro_batches with schedule={schedule!r} over {mesh.size()} stages"
        micro_batches = integer(what, micro_batches, mesh.size() if schedule == "1f1b" else 1)
        if isinstance(module, DistributedDataParallel) and module.static_graph:
            raise ConfigError("DDP(static_graph=True) does not follow micro-batches; leave it out in a pipeline")
        self.module = module
        self.stage = mesh.get_local_rank()
        self.stages = mesh.size()
        self.micro_batches = micro_batches
        self.schedule = schedule
        self.loss = loss
        self._group = mesh.get_group()
        self._device = torch.device(mesh.device_type)
        if self._device.type != "cpu":
            self._device = torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())
        self._known: dict[str, list[Tensors]] = {}
        self._made: tuple[str, Any, Any] | None = None
        self._losses: list[torch.Tensor] = []
        self._scale: Callable[[torch.Tensor], torch.Tensor] | None = None

    def step(
        self,
        *inputs: torch.Tensor,
        target: torch.Tensor,
        scale_loss: Callable[[torch.Tensor], torch.Tensor] | None = None,
        sync: bool = True,
        shared: Mapping[str, Any] | None = None,
        **named: Any,
    ) -> torch.Tensor:
        """Run a batch forward and backward on all stages; add the gradients of its mean loss to ``.grad``, return it.

        Collective over the mesh's group, and with ``sync`` over the groups of FSDP2 or DDP, which then reduce the
        gradients at the end; ``False`` is for all but the last call of a window (FSDP2 keeps whole parameters and
        gradients meanwhile). Inputs and target, (batch, ...), are the same on all stages; keyword arguments go to every
        stage's module, tensors among them cut like the inputs, those of ``shared`` whole. ``scale_loss`` changes a loss
        before its backward pass (a gradient scaler's ``scale``, a division by the calls of a window); the mean loss
        that is returned on every rank, a scalar in fp32, is not scaled.
        """
        if not torch.is_grad_enabled():
            raise StateError("step() makes gradients, but they are disabled; call evaluate(), or leave torch.no_grad()")
        self._scale = scale_loss
        self._run(self.schedule, inputs=inputs, target=target, named=named, shared=dict(shared or {}), sync=sync)
        return self._mean_loss()

    @torch.no_grad()
    def evaluate(
        self, *inputs: torch.Tensor, target: torch.Tensor, shared: Mapping[str, Any] | None = None, **named: Any
    ) -> torch.Tensor:
        """Run a batch forward and return its mean loss on every rank, with the arguments of :meth:`step`.

        Collective over the mesh's group. ``train()`` and ``eval()`` are the caller's.
        """
        self._scale = None
        self._run("evaluate", inputs=inputs, target=target, named=named, shared=dict(shared or {}))
        return self._mean_loss()

    @torch.no_grad()
    def forward(self, *inputs: torch.Tensor, shared: Mapping[str, Any] | None = None, **named: Any) -> Any:
        """Run a batch forward without gradients; return the last stage's output, ``None`` on the other stages.

        Collective over the mesh's group.
        """
        return self._run("forward", inputs=inputs, target=None, named=named, shared=dict(shared or {}))

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Name the stage's modules, and with them parameters and buffers, as the whole model does."""
        yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the stage's state, with the whole model's names."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the stage's state, with the whole model's names."""
        return self.module.load_state_dict(state_dict, strict, assign)

    def _run(
        self, mode: str, inputs: Tensors, target: torch.Tensor | None, named: Named, shared: Named, sync: bool = True
    ) -> Any:
        """Run the schedule of a mode, made anew where the mode or the sizes are others than at the call before."""
        self._check_batch(mode, inputs, target, named)
        inputs = tuple(tensor.contiguous() for tensor in inputs)  # text[:, :-1] has gaps; torch 2.11 refuses them
        first, aim = [self._first_part(tensor) for tensor in inputs], self._first_part(target)
        slices = {key: self._first_part(value) for key, value in named.items()}
        kind = self._device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        # What the sizes of the activations depend on.
        key = f"{_shape_text((first, aim, slices, shared))} autocast={autocast}"
        if key not in self._known:
            values = (*first, aim, *slices.values(), *shared.values())
            sums = [float(value.double().sum()) for value in values if isinstance(value, torch.Tensor)]
            batch = f"{self.schedule} in {self.micro_batches} micro-batches, {mode} {key} sums={sums}"
            check_consistent("batches", batch, describe=_different_batches, group=self._group)
            self._known[key] = self._probe(first, aim, slices | shared, key)
        if self._made is None or self._made[0] != f"{mode} {key}":
            from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

            received, sent = self._known[key][self.stage : self.stage + 2]
            stage = _stage_class()(
                self.module,
                stage_index=self.stage,
                num_stages=self.stages,
                device=self._device,
                input_args=received,
                output_args=sent,
                group=self._group,
            )
            stage.sizes = _sizes_of(sent)
            order = Schedule1F1B if mode == "1f1b" else ScheduleGPipe
            loss = None if mode == "forward" else self._micro_loss
            # Torch's scale_grads would divide the gradients of earlier calls once more; the loss is divided instead.
            schedule = order(stage, self.micro_batches, loss_fn=loss, scale_grads=False)
            self._made = (f"{mode} {key}", stage, schedule)
        _, stage, schedule = self._made
        stage.shared = shared
        stage.sync = sync
        self._losses.clear()
        call = schedule.step if mode in SCHEDULES else schedule.eval
        try:
            result = call(*(inputs if stage.is_first else ()), target=target, return_outputs=mode == "forward", **named)
        except BaseException as wrong:
            self._made = None  # torch's stage still holds activations of this batch
            if isinstance(wrong.__cause__, ConfigError):  # torch hides what a forward pass raises
                raise wrong.__cause__ from None
            raise
        stage.clear_runtime_states()
        return result

    def _check_batch(self, mode: str, inputs: Tensors, target: torch.Tensor | None, named: Mapping[str, Any]) -> None:
        """Refuse, before anything moves, a batch that cannot be cut into equal parts."""
        sized: dict[str, Any] = {f"input {index}": tensor for index, tensor in enumerate(inputs)}
        if mode != "forward":
            sized["the target"] = target
        for what, value in sized.items():
            if not isinstance(value, torch.Tensor):
                raise ConfigError(f"{what} is {type(value).__name__}; give a tensor, other arguments by name")
        sized |= {f"argument {key!r}": value for key, value in named.items() if isinstance(value, torch.Tensor)}
        if not inputs:
            raise ConfigError("a pipeline was given no inputs; give every stage the whole batch")
        for what, tensor in sized.items():
            if not tensor.dim() or len(tensor) != len(inputs[0]):
                raise ConfigError(
                    f"{what} has the shape {tuple(tensor.shape)}, the first input {tuple(inputs[0].shape)}; their "
                    "dimension 0 must be the batch (what is not cut goes into shared=)"
                )
        if not len(inputs[0]) or len(inputs[0]) % self.micro_batches:
            raise ConfigError(
                f"a batch of {len(inputs[0])} rows cannot be cut into {self.micro_batches} equal micro-batches; give "
                "a multiple, or drop the last batch"
            )

    def _first_part(self, value: Any) -> Any:
        """Return the first micro-batch of a tensor, any other value as it is."""
        return value[: len(value) // self.micro_batches] if isinstance(value, torch.Tensor) else value

    def _probe(
        self, inputs: list[torch.Tensor], target: torch.Tensor | None, arguments: dict[str, Any], key: str
    ) -> list[Tensors]:
        """Return what each stage gets, found by a forward pass of one micro-batch; raise alike what a stage raises."""
        flows = [tuple(inputs)]
        for stage in range(self.stages):
            answer = [self._try(flows[-1], target, arguments) if stage == self.stage else None]
            dist.broadcast_object_list(answer, group=self._group, group_src=stage)
            assert answer[0] is not None, "the stage has broadcast its sizes"
            sizes, fault = answer[0]
            if fault:
                raise ConfigError(f"stage {stage} of {self.stages} fails on a batch of {key}: {fault}")
            activations = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in sizes]
            flows.append(tuple(one.requires_grad_(one.is_floating_point() or one.is_complex()) for one in activations))
        flows[0] = tuple(item.detach().to("meta") for item in inputs)  # sizes are kept, not the batch
        return flows

    def _try(self, inputs: Tensors, target: torch.Tensor | None, arguments: Named) -> tuple[Sizes, str]:
        """Run this stage once, without gradients, dropout or other traces; return its sizes and what failed."""
        module = self.module.module if isinstance(self.module, DistributedDataParallel) else self.module
        modes = {part: part.training for part in module.modules()}
        devices = [] if self._device.type == "cpu" else [self._device]
        device_type = self._device.type if devices else "cuda"
        try:
            with torch.no_grad(), torch.random.fork_rng(devices, device_type=device_type):
                module.eval()
                received = [torch.zeros_like(item, device=self._device) if item.is_meta else item for item in inputs]
                output = module(*received, **arguments)
                tensors = output if isinstance(output, tuple) else (output,)
                is_last = self.stage == self.stages - 1
                are_plain = all(isinstance(item, torch.Tensor) and not isinstance(item, DTensor) for item in tensors)
                if not are_plain and not (is_last and isinstance(output, DTensor)):
                    return [], f"its output is {_shape_text(output)}; let the model return plain tensors"
                if is_last and target is not None:
                    loss = self.loss(output, target)
                    if not isinstance(loss, torch.Tensor) or loss.dim():
                        return [], f"the loss is {_shape_text(loss)}; let it return a scalar tensor"
                return _sizes_of(tensors), ""
        except Exception as wrong:  # noqa: BLE001 - told to all stages
            return [], f"{type(wrong).__name__}: {wrong}"
        finally:
            for part, mode in modes.items():
                part.training = mode
            reshard(module)  # without a backward pass nothing else frees what was gathered

    def _micro_loss(self, output: Any, target: torch.Tensor) -> torch.Tensor:
        """Return what the backward pass of one micro-batch starts from."""
        loss = self.loss(output, target)
        self._losses.append(loss.detach())
        loss = loss / self.micro_batches
        return loss if self._scale is None else self._scale(loss)

    def _mean_loss(self) -> torch.Tensor:
        """Broadcast the last stage's mean loss."""
        mean = torch.zeros((), dtype=torch.float32, device=self._device)
        if self.stage == self.stages - 1:
            whole = [loss.full_tensor() if isinstance(loss, DTensor) else loss for loss in self._losses]
            mean = torch.stack(whole).float().mean()
        dist.broadcast(mean, group=self._group, group_src=self.stages - 1)
        return mean


@cache
def _stage_class() -> Any:
    """Make torch's stage with known sizes, arguments that are not cut, and a say in when gradients are reduced."""
    # Here, since torch's compiler comes with it: half a second for whoever has no pipeline.
    from torch.distributed.pipelining import PipelineStage

    class Stage(PipelineStage):
        shared: dict[str, Any]  # arguments of a call that are not cut
        sync: bool  # whether a call reduces the gradients
        sizes: Sizes  # of what the next stage expects

        def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
            """Run the module; what is sent on is contiguous and of the size that the next stage expects."""
            output: Any = super().forward_maybe_with_nosync(*args, **kwargs, **self.shared)  # type: ignore[no-untyped-call]
            if self.is_last:
                return output
            sent = tuple(tensor.contiguous() for tensor in (output if isinstance(output, tuple) else (output,)))
            if _sizes_of(sent) != self.sizes:  # gloo would take fewer bytes than it expects, and leave the rest
                raise ConfigError(
                    f"stage {self.stage_index} sends {_sizes_of(sent)}, but the next one expects {self.sizes}; the "
                    "module's output must have the same size and dtype in training as in evaluation"
                )
            return sent

        def _validate_fwd_outputs(self, outputs: Tensors) -> None:
            """Keep torch 2.11 from comparing the last stage's output, too, which may be a DTensor."""

        def backward_maybe_with_nosync(
            self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
        ) -> Any:
            """Run a micro-batch backward; the last one makes DDP reduce."""
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward and self.sync)

        def perform_reduce_grad(self, grad_scale_factor: int) -> None:
            """Make FSDP2 reduce, after the last micro-batch."""
            if self.sync:
                super().perform_reduce_grad(grad_scale_factor)

    return Stage


def _different_batches(batches: Mapping[int, str]) -> ConfigError:
    text = "; ".join(f"stage {stage}: {batch}" for stage, batch in batches.items())
    return ConfigError(f"the stages of a pipeline were given different batches: {text}; give all the same")


def _shape_text(value: Any) -> str:
    """Write sizes and types instead of values."""
    if isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_shape_text(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_shape_text, value))})"
    return type(value).__name__


def _sizes_of(tensors: Sequence[torch.Tensor]) -> Sizes:
    return [(list(tensor.shape), tensor.dtype) for tensor in tensors]


Container = nn.ModuleList | nn.ModuleDict | nn.Sequential


class Skip(nn.Module):
    """Stand where a part of the model is on another stage: the hidden state goes on unchanged."""

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the first argument."""
        # Without a hidden state the part was not one of a chain, and to leave it out would change the model.
        if not isinstance(hidden, torch.Tensor) or not hidden.is_floating_point():
            what = f"{hidden.dtype} values" if isinstance(hidden, torch.Tensor) else f"a {type(hidden).__name__}"
            raise ConfigError(
                f"a part of the model that lies on another stage was called with {what} instead of the hidden state "
                "(learned positions beside the tokens?); such a model needs a forward of its own for stages"
            )
        return hidden


def split_model(model: nn.Module, stage: int, stages: int) -> nn.Module:
    """Keep one stage's part of a model of stacked layers, with the names of the whole model, and return the model.

    Local; nothing moves. The model is changed in place, on any device (meta too): absent parts become a :class:`Skip`,
    entries of a ``ModuleDict`` are taken out. So the model's own forward runs on every stage, if it calls its layers
    one after the other as ``hidden = layer(hidden, ...)``, with nothing else in the loop that changes the hidden state,
    and its other parts as ``part(hidden)``. What the first stage takes as tokens, others take as the hidden state, in
    the same positional arguments; all but the last return it.

    The layers are the list of modules of one class that holds the most elements. They are spread evenly, the embedding
    and the head counted as one layer each. On the way from the root to the list, modules registered before it belong to
    the first stage and those after it to the last; a module that has buffers but no parameters (rotary angles) stays
    everywhere. A parameter that would lie on several stages (tied embeddings) or on none is refused.
    """
    name, container = _find_layers(model)
    if stages < 1 or not 0 <= stage < stages:
        raise ConfigError(f"stage {stage} of {stages} does not exist; give 0 <= stage < stages")
    keys = [key for key, _ in container.named_children()]  # a layer that is there twice counts once
    if stages > len(keys):
        raise ConfigError(f"{stages} stages cannot share {len(keys)} layers; give at most {len(keys)} stages")
    stage_of = [index for index, count in enumerate(layers_of_stages(len(keys), stages)) for _ in range(count)]
    homes = {f"{name}.{key}": home for key, home in zip(keys, stage_of, strict=True)}
    homes |= _surroundings(model, name, stages)
    # Nothing would keep a parameter equal that lies on several stages.
    seen: dict[int, tuple[str, int]] = {}
    for where, parameter in model.named_parameters(remove_duplicate=False) if stages > 1 else ():
        home = next((stage for part, stage in homes.items() if where.startswith(f"{part}.")), None)
        if home is None:
            raise ConfigError(
                f"parameter {where!r} belongs to no stage; put it into a module beside the list of layers"
            )
        other, first = seen.setdefault(id(parameter), (where, home))
        if first != home:
            raise ConfigError(
                f"{other!r} and {where!r} are one tied parameter, but lie on stages {first} and {home}; untie them "
                "(tie_word_embeddings=False), or use no pipeline"
            )
    for part, home in homes.items():
        if home != stage:
            parent, _, leaf = part.rpartition(".")
            holder = model.get_submodule(parent)
            if holder is container and isinstance(container, nn.ModuleDict):
                del container[leaf]
            else:
                holder.set_submodule(leaf, Skip())
    return model


def _find_layers(model: nn.Module) -> tuple[str, Container]:
    sizes: dict[str, int] = {}
    for place, module in model.named_modules():
        if place and isinstance(module, Container) and len({type(child) for child in module.children()}) == 1:
            sizes[place] = sum(parameter.numel() for parameter in module.parameters())
    best = [place for place, size in sizes.items() if size == max(sizes.values()) > 0]
    if len(best) != 1:
        raise ConfigError(
            f"{type(model).__name__} has {len(best)} largest lists of modules of one class"
            f"{': ' if best else ''}{', '.join(best)}; a pipeline needs one list of layers"
        )
    container = model.get_submodule(best[0])
    assert isinstance(container, Container)
    return best[0], container


def _surroundings(model: nn.Module, name: str, stages: int) -> dict[str, int]:
    """Return the stage of each module beside the layers, by name: the first before the list, the last after it."""
    homes: dict[str, int] = {}
    path = name.split(".")
    for depth, stop in enumerate(path):
        holder = model.get_submodule(".".join(path[:depth]))
        home = 0
        for leaf, module in holder.named_children():
            if leaf == stop:
                home = stages - 1
            elif any(True for _ in module.parameters()) or not any(True for _ in module.buffers()):
                homes[".".join([*path[:depth], leaf])] = home
    return homes
