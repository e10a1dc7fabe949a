"""A small decoder-only transformer on real text, in two cells with DiLoCo: ``xffl exec config.yaml``."""

from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics

import torch
import torch.nn.functional as F
from torch import nn

from xffl import training as xt


@dataclass(kw_only=True)
class LMConfig(xt.BaseTrainerConfig, xt.SetupConfigMixin, xt.EvalMetricConfigMixin, xt.FederatedConfigMixin):
    """:param text: A text file; the Python manual, which comes with Python, where there is none."""

    text: str | None = None
    sequence_length: int = 64
    width: int = 64
    layers: int = 2
    learning_rate: float = 3e-3


class LanguageModel(nn.Module):
    def __init__(self, width: int, layers: int, length: int):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 256)

    def forward(self, tokens):  # (batch, length) -> (batch, length, 256)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        mask = nn.Transformer.generate_square_subsequent_mask(len(places), device=tokens.device)
        hidden = self.tokens(tokens) + self.positions(places)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden)


class LMTrainer(xt.BaseTrainer, xt.SetupMixin, xt.EvalMetricMixin, xt.FederatedMixin):
    config: LMConfig

    def configure_models(self):
        self.model = LanguageModel(self.config.width, self.config.layers, self.config.sequence_length)

    def configure_optimizers(self):
        self.optimizer = torch.optim.AdamW(self.model.parameters(), self.config.learning_rate)

    def configure_dataloaders(self):
        text = Path(self.config.text).read_text() if self.config.text else "\n".join(topics.topics.values())
        windows = xt.TokenDataset(list(text.encode()), sequence_length=self.config.sequence_length)
        training, held_out = windows.split(0.95)
        return self.train_loader(training), self.validation_loader(held_out)

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[1].flatten())
        self.log_scalar("train/loss", loss, weight=len(batch[0]))
        return {"loss": loss}

    def validation_step(self, batch, batch_idx):
        return {"loss": F.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[1].flatten())}
