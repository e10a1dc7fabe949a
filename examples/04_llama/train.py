"""A small Llama from a configuration, with LoRA adapters that alone are in the rounds: ``xffl exec config.yaml``."""

from dataclasses import dataclass, field
from pydoc_data import topics
from typing import Any

import torch

from xffl import training as xt
from xffl.training.models import ModuleInitializer, add_lora, causal_lm, causal_lm_loss, load_weights


@dataclass(kw_only=True)
class LlamaConfig(xt.BaseTrainerConfig, xt.SetupConfigMixin, xt.EvalMetricConfigMixin, xt.FederatedConfigMixin):
    """What the example is asked for.

    :param base: The model: a configuration of transformers, or a folder with ``config.json`` and safetensors files.
    :param lora: Options of the adapters; without any, all weights are trained.
    """

    base: str | dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] | None = None
    learning_rate: float = 3e-3
    sequence_length: int = 64


class LlamaTrainer(xt.BaseTrainer, xt.SetupMixin, xt.EvalMetricMixin, xt.FederatedMixin):
    config: LlamaConfig

    @property
    def has_weights(self):
        return isinstance(self.config.base, str)

    def configure_models(self):
        self.model = causal_lm(self.config.base, weights=False)
        if self.config.lora is not None:
            self.model = add_lora(self.model, **self.config.lora)

    def module_initializer(self, name):
        return ModuleInitializer(self.model, only_buffers=self.has_weights)

    def post_setup_models(self):
        if self.has_weights:
            load_weights(self.model, self.config.base, self.state)

    def configure_optimizers(self):
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, self.config.learning_rate)

    def configure_dataloaders(self):
        text = "\n".join(topics.topics.values()).encode()
        windows = xt.TokenDataset(list(text), sequence_length=self.config.sequence_length, form="causal_lm")
        training, held_out = windows.split(0.97)
        return self.train_loader(training), self.validation_loader(held_out)

    def training_step(self, batch, batch_idx):
        loss = causal_lm_loss(self.model(batch["input_ids"]), batch["labels"])
        self.log_scalar("train/loss", loss, weight=len(batch["labels"]))
        return {"loss": loss}

    def validation_step(self, batch, batch_idx):
        return {"loss": causal_lm_loss(self.model(batch["input_ids"]), batch["labels"])}
