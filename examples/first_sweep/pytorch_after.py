import torch
from sklearn.datasets import load_digits
from torch import nn

import fluid

digits = load_digits()
data = torch.tensor(digits.data / 16).float(), torch.tensor(digits.target)


def train(config, state):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, y = (part.to(device) for part in data)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    model, optimizer = (model, optimizer) if state is None else state
    for _ in range(27):
        for batch in torch.randperm(1_500).split(32):
            loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        accuracy = (model(x[1_500:]).argmax(1) == y[1_500:]).float().mean().item()
        yield {"accuracy": accuracy}, (model, optimizer)


result = fluid.run(train, {"lr": fluid.search.loguniform(1e-3, 1.0)}, metric="accuracy", mode="max", samples=27)
