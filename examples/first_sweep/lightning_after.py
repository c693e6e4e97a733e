import lightning
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import fluid.integrations.lightning


class Digits(lightning.LightningModule):
    def __init__(self, width, lr):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10))

    def training_step(self, batch, batch_idx):
        return cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), self.hparams.lr)


x, y = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(x / 16).float(), torch.tensor(y))
train_set, val_set = torch.utils.data.random_split(data, [1400, 397])
train, val = DataLoader(train_set, 64, shuffle=True), DataLoader(val_set, 397)

space = {"width": [32, 64], "lr": fluid.search.loguniform(1e-4, 1e-1)}
trainer = {"max_epochs": 9}
result = fluid.integrations.lightning.sweep(Digits, space, train, val, trainer=trainer, metric="val_loss", samples=9)
