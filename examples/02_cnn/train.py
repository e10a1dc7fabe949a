"""A CNN with BatchNorm on handwritten digits, in two cells: ``xffl exec config.yaml``."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split

from xffl import training as xt


@dataclass(kw_only=True)
class CNNConfig(xt.BaseTrainerConfig, xt.SetupConfigMixin, xt.EvalMetricConfigMixin, xt.FederatedConfigMixin):
    """:param learning_rate: Of the first epoch; it falls along a cosine."""

    learning_rate: float = 0.05


class CNNTrainer(xt.BaseTrainer, xt.SetupMixin, xt.EvalMetricMixin, xt.FederatedMixin):
    config: CNNConfig

    def configure_models(self):
        self.model = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10)),
        )

    def configure_optimizers(self):
        self.optimizer = torch.optim.SGD(self.model.parameters(), self.config.learning_rate, momentum=0.9)

    def configure_schedulers(self):
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, self.config.training.epochs)

    def configure_metrics(self):
        import torchmetrics  # it takes seconds, which only the ranks need to spend

        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=10)

    def configure_dataloaders(self):
        images, labels = load_digits(return_X_y=True)
        digits = TensorDataset(torch.tensor(images / 16).float().view(-1, 1, 8, 8), torch.tensor(labels))
        held_out, training = random_split(digits, [359, 1438], torch.Generator().manual_seed(0))
        return self.train_loader(training, labels=labels[training.indices]), self.validation_loader(held_out)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = F.cross_entropy(self.model(images), labels)
        self.log_scalar("train/loss", loss, weight=len(labels))
        self.log_scalar("train/learning_rate", self.optimizer.param_groups[0]["lr"])
        return {"loss": loss}

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        logits = self.model(images)
        self.accuracy(logits, labels)
        return {"loss": F.cross_entropy(logits, labels)}
