"""As ``train.py``, but a script that saves itself after each epoch, and goes on from what it has saved.

fluid run --space lr=log:1e-5:1e-1 --metric val_loss --checkpoint-flag '--resume {checkpoint}' --iteration-key epoch \
    -- python examples/script/train_and_save.py --lr {lr} --save {checkpoint}
"""

import argparse
import json

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--save", help="the file to write after each epoch")
parser.add_argument("--resume", help="a file of --save, to go on from")
args = parser.parse_args()
begin, loss = 0, 1.0
if args.resume:
    with open(args.resume) as file:
        begin, loss = json.load(file)
for epoch in range(begin + 1, 28):
    loss = 0.9 * loss + 0.1 * abs(args.lr - 0.01)  # an epoch of training
    if args.save:
        with open(args.save, "w") as file:
            json.dump([epoch, loss], file)
    print(json.dumps({"val_loss": loss, "epoch": epoch}))
