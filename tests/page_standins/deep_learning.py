"""Stand-ins for what the fragments of docs/deep_learning.md leave to the reader."""

loader = None  # The stand-in for a module brings its own.


def Model(config):
    from lightning.pytorch.demos.boring_classes import BoringModel

    class Small(BoringModel):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.step(batch))

    return Small()


def make_trainer(config):
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    text = [{"input_ids": row, "labels": row} for row in torch.arange(64).reshape(8, 8) % 16]
    tokens = {"vocab_size": 16, "bos_token_id": None, "eos_token_id": None}
    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, n_positions=8, **tokens))
    told = {"eval_strategy": "epoch", "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    args = TrainingArguments("trainer", learning_rate=config["lr"], num_train_epochs=3, use_cpu=True, **told)
    return Trainer(model, args, train_dataset=text, eval_dataset=text)
