# train.py
import argparse
import json

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--layers", type=int, default=1)
args = parser.parse_args()
loss = 1.0
for epoch in range(1, 28):
    loss = 0.9 * loss + 0.1 * abs(args.lr - 0.01) / args.layers  # an epoch of training
    print(json.dumps({"val_loss": loss, "epoch": epoch}))
