"""Quantized layers compute what rounding by hand gives, and models with them learn as others do."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Subset, TensorDataset

from xffl.errors import ConfigError, StateError
from xffl.extras import install_command
from xffl.parallel import DistributedConfig, DistributedStrategy
from xffl.training.config.dataclasses import BaseTrainerConfig, ExperimentConfig, TrainingParameters
from xffl.training.mixins import quantize
from xffl.training.mixins.models import ModelSetupMixin, SetupConfigMixin, SetupMixin
from xffl.training.mixins.quantize import QuantizeConfig, QuantizeConfigMixin, QuantizeMixin
from xffl.training.trainer import BaseTrainer

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("int8", "fp8")
ERRORS = {"int8": 0.01, "fp8": 0.05}
"""Relative errors of an output: half a step of 255, and of the 3 bits of a float8's fraction, in both factors."""


@dataclass(kw_only=True)
class Config(BaseTrainerConfig, SetupConfigMixin, QuantizeConfigMixin):
    """What the trainers here are asked for."""


@dataclass(kw_only=True)
class SetupOnly(BaseTrainerConfig, SetupConfigMixin):
    """A configuration whose author has forgotten one mixin."""


class Trainer(ModelSetupMixin):
    """As much of a trainer as makes one model and spreads it."""

    model: Any

    def __init__(self, config: Config | SetupOnly, make: Callable[[], nn.Module]) -> None:
        self.config, self.make = config, make
        self.strategy = DistributedStrategy.from_config(config)

    @property
    def device(self) -> torch.device:
        return torch.device(self.config.distributed.device or "cpu")

    def configure_models(self) -> None:
        self.model = self.make()

    def compute_loss(self, output: Any, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.flatten(0, -2), target.flatten())


class MixinLast(Trainer, QuantizeMixin):
    """As in ``class MyTrainer(BaseTrainer, SetupMixin, QuantizeMixin)``."""


class MixinFirst(QuantizeMixin, Trainer):
    """As in ``class MyTrainer(QuantizeMixin, BaseTrainer, SetupMixin)``."""


class Mixed(nn.Module):
    """Linear layers of all sorts: in a list, under two names, with another's weight, of a class of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(32, 16)
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16, bias=False))
        self.again = self.inner[0]
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.kept = nn.Linear(16, 16)
        self.lm_head = nn.Linear(16, 32, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.kept(self.again(self.inner(self.embed_tokens(tokens))))
        return self.lm_head(self.attention(hidden, hidden, hidden, need_weights=False)[0])


def trainer_of(
    model: nn.Module | Callable[[], nn.Module],
    kind: str | None,
    *,
    is_last: bool = True,
    configures: bool = True,
    distributed: DistributedConfig | None = None,
    **quantize: Any,
) -> Any:
    """Make a trainer of a model, or of what makes one, and its quantized layers; nothing is spread yet."""
    config = Config(
        experiment=ExperimentConfig(seed=3),
        distributed=distributed or DistributedConfig(device="cpu"),
        quantize=QuantizeConfig(kind=kind, **quantize),
    )
    trainer = (MixinLast if is_last else MixinFirst)(config, (lambda: model) if isinstance(model, nn.Module) else model)
    if configures:
        trainer.configure()
    return trainer


def by_hand(kind: str, values: torch.Tensor) -> torch.Tensor:
    """Write values in 8 bits and read them again."""
    if kind == "int8":
        scale = values.abs().max(dim=-1, keepdim=True).values / 127.5
        return torch.clamp(torch.round(values * (1.0 / scale)), -128, 127).to(torch.int8).float() * scale
    scale = torch.finfo(torch.float8_e4m3fn).max / values.abs().max()
    return (values * scale).to(torch.float8_e4m3fn).float() / scale


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_multiplies_rounded_values(kind: str) -> None:
    torch.manual_seed(0)
    whole, layer = nn.Linear(30, 17), nn.Linear(30, 17)
    layer.load_state_dict(whole.state_dict())
    trainer = trainer_of(layer, kind)
    assert trainer.model is layer and list(layer.state_dict()) == ["weight", "bias"]
    inputs = torch.randn(4, 5, 30, requires_grad=True)
    expected, found = whole(inputs), layer(inputs)
    rounded = F.linear(by_hand(kind, inputs.detach()), by_hand(kind, layer.weight.detach()), layer.bias)
    assert (found - rounded).abs().max() < 1e-5
    error = (found - expected).norm() / expected.norm()
    assert 0.001 < error < ERRORS[kind]
    wanted = torch.autograd.grad(expected.square().mean(), [inputs, *whole.parameters()])
    given = torch.autograd.grad(found.square().mean(), [inputs, *layer.parameters()])
    for a, b in zip(wanted, given, strict=True):
        assert (a - b).norm() < 2 * ERRORS[kind] * a.norm()


def test_gradients_take_rounding_to_integers_for_the_identity() -> None:
    """The largest weight of a row, which is cut at the end of the range, has its gradient, too."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 3, bias=False)
    trainer_of(layer, "int8")
    inputs, upstream = torch.randn(6, 8, requires_grad=True), torch.randn(6, 3)
    to_inputs, to_weight = torch.autograd.grad(layer(inputs), [inputs, layer.weight], upstream)
    assert (to_inputs - upstream @ by_hand("int8", layer.weight.detach())).abs().max() < 1e-6
    assert (to_weight - upstream.T @ by_hand("int8", inputs.detach())).abs().max() < 1e-6


def test_no_rounded_copy_waits_for_the_backward_pass() -> None:
    layer = nn.Linear(16, 16)
    trainer_of(layer, "int8")
    inputs, kept = torch.randn(2, 3, 16, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.data_ptr()) or tensor, lambda t: t):
        layer(inputs)
    assert kept == [inputs.data_ptr(), layer.weight.data_ptr()]


def test_a_frozen_layer_and_an_input_of_one_dimension() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(16, 8)
    trainer_of(layer, "int8")
    layer.weight.requires_grad_(False)
    inputs = torch.randn(16, requires_grad=True)
    layer(inputs).sum().backward()
    assert inputs.grad is not None and inputs.grad.shape == (16,) and layer.weight.grad is None
    assert layer.bias.grad is not None and layer.bias.grad.equal(torch.ones(8))


def test_int8_computes_what_torchao_deploys() -> None:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    torch.manual_seed(0)
    deployed, layer = nn.Linear(64, 32), nn.Linear(64, 32)
    layer.load_state_dict(deployed.state_dict())
    trainer_of(layer, "int8")
    quantize_(deployed, Int8DynamicActivationInt8WeightConfig(set_inductor_config=False))
    inputs = torch.randn(40, 64)
    assert (layer(inputs) - deployed(inputs)).abs().max() < 1e-5


def test_zeros_stay_zeros_and_what_is_not_finite_shows() -> None:
    layer = nn.Linear(16, 16, bias=False)
    trainer_of(layer, "int8")
    assert layer(torch.zeros(3, 16)).eq(0).all() and layer(torch.zeros(0, 16)).shape == (0, 16)
    assert layer(torch.full((1, 16), torch.inf)).isnan().all()
    layer.weight.data[2, 3] = torch.nan
    assert layer(torch.ones(1, 16)).isnan().flatten().tolist() == [row == 2 for row in range(16)]


@pytest.mark.parametrize("kind", KINDS)
def test_other_data_types(kind: str) -> None:
    torch.manual_seed(0)
    whole, layer = nn.Linear(32, 16), nn.Linear(32, 16)
    layer.load_state_dict(whole.state_dict())
    trainer_of(layer, kind)
    inputs = torch.randn(8, 32)
    expected = whole(inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = layer(inputs)
    found.float().sum().backward()
    assert found.dtype == torch.bfloat16 and layer.weight.grad is not None
    assert (found - expected).norm() < 1.5 * ERRORS[kind] * expected.norm()
    layer.bfloat16()
    found = layer(inputs.bfloat16())
    assert found.dtype == torch.bfloat16 and (found - expected).norm() < 1.5 * ERRORS[kind] * expected.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_what_holds_a_layer_holds_it_still(kind: str) -> None:
    model = Mixed()
    before = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    order = list(model.state_dict())
    calls: list[str] = []
    model.inner[0].register_forward_hook(lambda *_: calls.append("hook"))
    model.inner[2].requires_grad_(False)
    held = model.inner[0]
    trainer_of(model, kind, exclude=("lm_head", "kept"))
    model(torch.arange(6).reshape(2, 3))
    assert calls == ["hook"] * 2 and model.inner[0] is held is model.again
    assert {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)} == before
    assert list(model.state_dict()) == order and not model.inner[2].weight.requires_grad
    plain = {name for name, module in model.named_modules(remove_duplicate=False) if type(module) is nn.Linear}
    assert plain == {"lm_head", "kept"}
    assert isinstance(model.inner[0], nn.Linear) and type(model.attention.out_proj).__module__.startswith("torch.nn")


@pytest.mark.parametrize(
    ("exclude", "kept"),
    [
        ((), set()),
        (("lm_head",), {"lm_head"}),
        (("inner.*",), {"inner.0", "inner.2", "again"}),
        (["again"], {"inner.0", "again"}),
        (("model.kept",), {"kept"}),
        (("2", "lm_*"), {"inner.2", "lm_head"}),
    ],
)
def test_excluded_layers_are_untouched(exclude: Any, kept: set[str]) -> None:
    model = Mixed()
    trainer_of(model, "int8", exclude=exclude)
    assert {n for n, module in model.named_modules(remove_duplicate=False) if type(module) is nn.Linear} == kept


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_last", [False, True])
def test_a_trainer_quantizes_before_it_spreads(kind: str, is_last: bool) -> None:
    """In any order of the mixins, on the meta device, and once: the weights are those of the unquantized model."""
    found = {}
    for asked in (None, kind):
        trainer = trainer_of(Mixed, asked, is_last=is_last, exclude=("kept",))
        assert all(parameter.is_meta for parameter in trainer.model.parameters())
        classes = {name: type(module) for name, module in trainer.model.named_modules()}
        with trainer.strategy:
            trainer.setup()
            trainer.apply_quantization()
        assert {name: type(module) for name, module in trainer.model.named_modules()} == classes
        assert (classes["inner.0"] is nn.Linear) is (asked is None) and classes["kept"] is nn.Linear
        found[asked] = (trainer.model.state_dict(), trainer.model(torch.arange(6).reshape(2, 3)))
    (plain, expected), (weights, output) = found.values()
    assert list(plain) == list(weights) and all(plain[name].equal(weights[name]) for name in plain)
    assert 0 < (output - expected).norm() < 0.2 * expected.norm()


def test_called_by_hand() -> None:
    trainer = trainer_of(Mixed, "int8", configures=False)
    with pytest.raises(StateError, match=r"no models.*super\(\)\.configure\(\)"):
        trainer.apply_quantization()
    trainer.configure()
    trainer.model.late = nn.Linear(4, 4)
    with pytest.raises(StateError, match=r"model\.late: added after the models were quantized; .*quantize\.exclude"):
        trainer.apply_quantization()
    without = trainer_of(Mixed, None)
    without.apply_quantization()
    assert type(without.model.kept) is nn.Linear


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "int4"}, r"quantize\.kind must be one of 'int8', 'fp8', got 'int4'"),
        ({"kind": "fp8", "exclude": "lm_head"}, r"quantize\.exclude must be a list of names, .* got 'lm_head'"),
        ({"kind": "fp8", "exclude": (1,)}, r"quantize\.exclude must be a list of names, .* got \(1,\)"),
        ({"kind": "int8", "emulate": False}, r"quantize\.emulate is False, but int8 is always emulated"),
    ],
)
def test_wrong_configurations(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        QuantizeConfig(**arguments)


def test_models_that_cannot_be_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"quantize\.exclude 'heads' matches no linear layer; .*model\.again"):
        trainer_of(Mixed(), "int8", exclude=("heads",))
    with pytest.raises(ConfigError, match=r"no torch\.nn\.Linear that quantize\.exclude \('\*',\) leaves over"):
        trainer_of(Mixed(), "int8", exclude=("*",))
    with pytest.raises(ConfigError, match=r"quantize\.emulate is False, but cpu has no float8"):
        trainer_of(Mixed(), "fp8", emulate=False)
    monkeypatch.setattr(quantize, "_has_float8", lambda device: True)
    odd = nn.Sequential(nn.Linear(16, 10), nn.Linear(10, 16), nn.Linear(16, 32))
    with pytest.raises(ConfigError, match=r"^model\.0, model\.1: .*multiples of 16; name them in quantize\.exclude"):
        trainer_of(odd, "fp8")
    trainer_of(odd, "fp8", exclude=("0", "1"))
    assert [type(layer) is nn.Linear for layer in odd] == [True, True, False]
    trainer_of(Mixed(), "fp8", emulate=True)
    with pytest.raises(ConfigError, match=r"SetupOnly has no section quantize; derive it from QuantizeConfigMixin"):
        MixinLast(SetupOnly(), Mixed).configure()


def test_without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.delitem(sys.modules, "torchao.float8", raising=False)
    with pytest.raises(ConfigError, match=f"'fp8' needs torchao, .*{re.escape(install_command('quantize'))}"):
        trainer_of(Mixed(), "fp8")
    trainer_of(Mixed(), "int8")


class DigitsTrainer(BaseTrainer, SetupMixin, QuantizeMixin):
    """Learn the handwritten digits; written as the page on mixins says."""

    config: Config

    def setup(self) -> None:
        super().setup()
        self.apply_quantization()

    def configure_models(self) -> None:
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def configure_optimizers(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def configure_dataloaders(self) -> tuple[Any, Any]:
        self.images, self.labels, training, self.held_out = digits()
        return self.train_loader(Subset(TensorDataset(self.images, self.labels), training)), None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    @torch.no_grad()
    def accuracy(self) -> float:
        found = self.model(self.images[self.held_out]).argmax(1)
        return (found == self.labels[self.held_out]).float().mean().item()


def digits() -> tuple[torch.Tensor, torch.Tensor, list[int], list[int]]:
    """Return the digits, their labels, and which are for training and which are held out."""
    spec = importlib.util.spec_from_file_location("digits", ROOT / "examples" / "01_digits" / "digits.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    images, labels = module.load()
    training, held_out = module.split(labels, seed=0)
    return torch.from_numpy(images), torch.from_numpy(labels), training.tolist(), held_out.tolist()


def test_digits_are_learned_as_well(tmp_path: Path) -> None:
    accuracies = {}
    for kind in (None, *KINDS):
        config = Config(
            experiment=ExperimentConfig(name=str(kind), output_dir=str(tmp_path / str(kind))),
            training=TrainingParameters(epochs=2, batch_size=32),
            distributed=DistributedConfig(device="cpu"),
            quantize=QuantizeConfig(kind=kind),
        )
        trainer = DigitsTrainer(config)
        trainer.fit()
        assert (type(trainer.model[1]) is nn.Linear) is (kind is None)
        accuracies[kind] = trainer.accuracy()
    assert accuracies[None] > 0.9
    assert all(accuracies[kind] > accuracies[None] - 0.03 for kind in KINDS), accuracies


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_with_float8_computes_what_is_emulated() -> None:
    pytest.importorskip("torchao")
    device = torch.device("cuda")
    if not quantize._has_float8(device):
        pytest.skip("the GPU has no float8")
    layers = []
    for emulate in (True, None):
        torch.manual_seed(0)
        layers.append(nn.Linear(64, 32).to(device))
        trainer_of(layers[-1], "fp8", emulate=emulate, distributed=DistributedConfig(device="cuda"))
    inputs = torch.randn(10, 64, device=device)
    (expected, wanted), (found, given) = ((layer(inputs), layer) for layer in layers)
    assert (found - expected).norm() < 0.01 * expected.norm()
    expected.square().mean().backward()
    found.square().mean().backward()
    assert wanted.weight.grad is not None and given.weight.grad is not None
    assert (given.weight.grad - wanted.weight.grad).norm() < 0.05 * wanted.weight.grad.norm()


def test_the_section_of_the_configuration() -> None:
    assert Config().quantize == QuantizeConfig(kind=None, exclude=("lm_head",), emulate=None)
