import torch
from sklearn.datasets import load_digits
from torch import nn

digits = load_digits()
data = torch.tensor(digits.data / 16).float(), torch.tensor(digits.target)

device = "cuda" if torch.cuda.is_available() else "cpu"
x, y = (part.to(device) for part in data)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(27):
    for batch in torch.randperm(1_500).split(32):
        loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    accuracy = (model(x[1_500:]).argmax(1) == y[1_500:]).float().mean().item()
    print(accuracy)
torch.save(model, "model.pt")
