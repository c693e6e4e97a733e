"""PyTorch Lightning on Fluid: epochs as iterations, exact resuming by the Trainer, sweeps of a module."""

from __future__ import annotations

import functools
import importlib
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import PATIENCE, eventually

import fluid
from fluid import FluidExecutor, InvalidFieldError, SweepFailedError, Trial, TrialGroup
from fluid.lane.protocol import LaneOptions
from fluid.search import loguniform
from fluid.trainables.reporting_resident import ReportingResident

pytestmark = [
    pytest.mark.frameworks("lightning", "pytorch_lightning"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]

BOTH = ("lightning.pytorch", "pytorch_lightning")
#: For in-process Trainers; lanes have it from the defaults of sweep.
QUIET = {
    "accelerator": "cpu",
    "enable_progress_bar": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
    "logger": False,
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny networks are slower on several threads, above all beside other tests."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def module_of(package: str) -> Any:
    """A module whose training depends on all that a checkpoint must hold: dropout, buffers, momentum, a scheduler."""
    torch = importlib.import_module("torch")
    lightning = importlib.import_module(package)

    class Net(lightning.LightningModule):
        def __init__(self, lr: float = 0.05, scheduler: str = "plateau", folder: str = "") -> None:
            super().__init__()
            self.save_hyperparameters()
            layers = torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1)
            self.net = torch.nn.Sequential(*layers)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = ((self.net(batch[0]) - batch[1]) ** 2).mean()
            self.log("train_loss", loss, on_step=False, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", ((self.net(batch[0]) - batch[1]) ** 2).mean())

        def on_train_epoch_end(self) -> None:
            self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"])

        def teardown(self, stage: str) -> None:
            if self.hparams.folder:
                Path(self.hparams.folder, f"{self.trainer.state.status.value}-{os.urandom(4).hex()}").touch()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), self.hparams.lr)
            schedulers = torch.optim.lr_scheduler
            if self.hparams.scheduler == "plateau":
                scheduler = schedulers.ReduceLROnPlateau(optimizer, patience=0, threshold=0.2)
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}
            scheduler = schedulers.OneCycleLR(optimizer, 0.1, total_steps=60)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return Net


def data_of(package: str, *, own_generator: bool = False) -> Any:
    """A datamodule that splits its data at random while fit runs, and shuffles."""
    torch = importlib.import_module("torch")
    lightning = importlib.import_module(package)
    utils = torch.utils.data

    class Numbers(lightning.LightningDataModule):
        def __init__(self, batch_size: int = 16) -> None:
            super().__init__()
            self.batch_size = batch_size

        def setup(self, stage: str) -> None:
            x = torch.randn(90, 8, generator=torch.Generator().manual_seed(5))
            self.train, self.val = utils.random_split(utils.TensorDataset(x, x.sum(1, keepdim=True)), [64, 26])

        def train_dataloader(self) -> Any:
            generator = torch.Generator().manual_seed(3) if own_generator else None
            return utils.DataLoader(self.train, self.batch_size, shuffle=True, generator=generator)

        def val_dataloader(self) -> Any:
            return utils.DataLoader(self.val, 26)

    return Numbers


def train_function(package: str, *, own_generator: bool = False, **arguments: Any) -> Any:
    net, numbers = module_of(package), data_of(package, own_generator=own_generator)

    def train(config: dict[str, Any]) -> None:
        from fluid.integrations.lightning import fit

        trainer = importlib.import_module(package).Trainer(**{**QUIET, "max_epochs": 4, **arguments})
        fit(trainer, net(**config), datamodule=numbers())

    return train


def run_out(resident: ReportingResident) -> list[Any]:
    found = []
    while not (step := resident.step()).finished:
        found.append(step.metrics)
    assert step.metrics is None
    resident.cleanup()
    return found


def seeded(train: Any, seed: int, **config: Any) -> ReportingResident:
    torch = importlib.import_module("torch")
    torch.manual_seed(seed)
    random.seed(seed)
    resident = ReportingResident(train)
    resident.setup(config)
    return resident


CASES = {
    "plateau": ({}, {"scheduler": "plateau"}),
    "steps": ({"max_steps": 15, "max_epochs": -1}, {"scheduler": "cycle"}),
    "generator": ({"own_generator": True, "accumulate_grad_batches": 3}, {"scheduler": "cycle"}),
    "validation": ({"val_check_interval": 0.5, "reload_dataloaders_every_n_epochs": 1}, {"scheduler": "plateau"}),
}


@pytest.mark.parametrize(("package", "case"), [*((BOTH[0], case) for case in CASES), (BOTH[1], "plateau")])
def test_a_trial_that_is_moved_has_the_same_losses(package: str, case: str, tmp_path: Path) -> None:
    arguments, config = CASES[case]
    train = train_function(package, **arguments)
    undisturbed = run_out(seeded(train, 1, **config))
    assert len(undisturbed) == 4
    assert {"train_loss", "val_loss", "lr"} <= undisturbed[0].keys()
    if case == "plateau":
        assert undisturbed[-1]["lr"] < undisturbed[0]["lr"]
    for after in (1, 3):
        first = seeded(train, 1, **config)
        before = [first.step().metrics for _ in range(after)]
        (tmp_path / f"{after}").mkdir()
        first.save(str(tmp_path / f"{after}"))
        assert before + run_out(first) == undisturbed, "saving disturbs nothing"
        moved = seeded(train, 99, **config)
        moved.restore(str(tmp_path / f"{after}"))
        assert before + run_out(moved) == undisturbed


def test_a_trial_that_has_returned_can_be_saved(tmp_path: Path) -> None:
    train = train_function(BOTH[0], max_epochs=2)
    trial = seeded(train, 1)
    while not trial.step().finished:
        pass
    trial.save(str(tmp_path))
    restored = seeded(train, 99)
    restored.restore(str(tmp_path))
    assert run_out(restored) == [], "all epochs are done"
    net = module_of(BOTH[0]).load_from_checkpoint(tmp_path / "state" / "lightning.ckpt")
    assert net.hparams.lr == 0.05


def test_outside_a_trial_fit_is_the_trainer_s(tmp_path: Path) -> None:
    torch, lightning = importlib.import_module("torch"), importlib.import_module(BOTH[0])
    from fluid.integrations.lightning import fit

    found = []
    for ours in (True, False):
        torch.manual_seed(2)
        trainer, net = lightning.Trainer(max_epochs=2, **QUIET), module_of(BOTH[0])()
        data = data_of(BOTH[0])()
        fit(trainer, net, datamodule=data) if ours else trainer.fit(net, datamodule=data)
        found.append({name: value.item() for name, value in trainer.callback_metrics.items()})
    assert found[0] == found[1]


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FluidExecutor]:
    """One device, whose lane has loaded Lightning."""
    for package in BOTH:
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("fluid")
    with FluidExecutor(backend="local", devices=1, packing="off", run_dir=folder, verbose=0, keep="best:1") as made:
        yield made


@pytest.mark.parametrize("package", BOTH)
def test_a_sweep_returns_the_best_model_and_leaves_no_litter(
    package: str, executor: FluidExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fluid.integrations.lightning import sweep

    monkeypatch.chdir(tmp_path)
    ends = tmp_path / "ends"
    ends.mkdir()
    net = module_of(package)
    result = sweep(
        net,
        {"lr": loguniform(1e-4, 1e-1), "batch_size": [16, 32], "folder": str(ends)},
        datamodule=data_of(package),
        trainer={"accelerator": "cpu"},
        metric="val_loss",
        samples=5,
        budget=3,
    )
    assert len(result.trials) == 5 and not result.failures
    assert result.name.startswith("Net-asha")
    lengths = [trial.iteration for trial in result.trials]
    assert max(lengths) == 3 and min(lengths) == 1
    assert result.best.checkpoint_iteration == result.best.iteration
    folder = result.best.load_checkpoint()
    best = net.load_from_checkpoint(folder / "lightning.ckpt")
    assert best.hparams.lr == result.best.config["lr"]
    # ASHA stopped trials in the midst of fit, which ended as if it was done.
    eventually(lambda: [path.name.partition("-")[0] for path in ends.iterdir()] == ["running"] * 5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ends"]
    for trial in result.trials:
        log = result.run_dir / "trials" / trial.trial_id / "output.log"
        assert not log.exists() or "GPU available" not in log.read_text()


def test_each_trial_has_data_and_a_trainer_of_its_own(executor: FluidExecutor) -> None:
    torch, lightning = importlib.import_module("torch"), importlib.import_module(BOTH[0])
    from fluid.integrations.lightning import sweep

    def loader(config: dict[str, Any]) -> Any:
        x = torch.randn(64, 8)
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), config["batch"])

    early = lightning.callbacks.EarlyStopping("train_loss", patience=1, min_delta=1e9, check_on_train_epoch_end=True)
    result = sweep(
        module_of(BOTH[0]),
        {"lr": 0.01, "batch": [8, 16, 32]},
        loader,
        loader,
        trainer={"accelerator": "cpu", "callbacks": [early], "max_epochs": 5},
        metric="val_loss",
        algorithm="grid",
    )
    # A callback that trials shared would have stopped the second one after its first epoch.
    assert [trial.iteration for trial in result.trials] == [2, 2, 2]

    def trainer(config: dict[str, Any]) -> Any:
        return lightning.Trainer(max_steps=config["steps"], **QUIET)

    result = sweep(
        module_of(BOTH[0]),
        {"lr": 0.01, "batch": 16, "steps": [4, 6]},
        loader,
        loader,
        trainer=trainer,
        metric="val_loss",
        algorithm="grid",
        budget=9,
    )
    assert [trial.iteration for trial in result.trials] == [1, 2]


def files_of(trial: Any) -> list[str]:
    return sorted(path.relative_to(trial.folder).as_posix() for path in trial.folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("package", BOTH)
def test_callbacks_and_loggers_work_as_in_a_trainer(
    package: str, executor: FluidExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fluid.integrations.lightning import sweep

    monkeypatch.chdir(tmp_path)
    lightning = importlib.import_module(package)
    callbacks, loggers = lightning.callbacks, importlib.import_module(f"{package}.loggers")

    class Logging(module_of(package)):  # type: ignore[misc]
        def on_train_epoch_start(self) -> None:
            self.logger.log_metrics({"begun": self.current_epoch, "name": "net"})
            self.logger.experiment.add_scalar("unknown", 1.0)

    def run(trainer: Any, module: Any = Logging) -> Any:
        if isinstance(trainer, dict):
            trainer = {"accelerator": "cpu", "max_epochs": 2, **trainer}
        space = {"lr": [0.01, 0.1]}
        data = data_of(package)
        found = sweep(module, space, datamodule=data, trainer=trainer, metric="val_loss", algorithm="grid", budget=2)
        assert [trial.state for trial in found.trials] == ["DONE", "DONE"], found.failures
        return found.trials

    used = [callbacks.LearningRateMonitor(), callbacks.TQDMProgressBar()]
    for trial in run({"callbacks": [*used, callbacks.ModelCheckpoint("weights", monitor="val_loss")]}):
        assert re.fullmatch(r"\['weights/epoch=\d-step=\d\.ckpt'\]", str(files_of(trial)))
        assert trial.metrics["begun"] == 1.0 and trial.metrics["lr-Adam"] == pytest.approx(trial.config["lr"])
    csv = loggers.CSVLogger("logs")
    csv_files = [f"logs/lightning_logs/version_0/{name}" for name in ("hparams.yaml", "metrics.csv")]
    made_once: dict[str, Any] = {"enable_checkpointing": True, "logger": csv, "default_root_dir": "unused"}
    for trial in run(made_once, module_of(package)):
        assert files_of(trial) == ["logs/lightning_logs/version_0/checkpoints/epoch=1-step=8.ckpt", *csv_files]
    for trial in run({"logger": True}, module_of(package)):
        assert {Path(name).parent.as_posix() for name in files_of(trial)} == {"lightning_logs/version_0"}

    def trainer(config: dict[str, Any]) -> Any:
        return lightning.Trainer(max_epochs=2, accelerator="cpu", logger=loggers.CSVLogger("."))

    for trial in run(trainer, module_of(package)):
        version = "lightning_logs/version_0"
        names = "checkpoints/epoch=1-step=8.ckpt", "hparams.yaml", "metrics.csv"
        assert files_of(trial) == [f"{version}/{name}" for name in names]
    assert list(tmp_path.iterdir()) == []


def test_what_a_trainer_is_given_comes_before_the_defaults(executor: FluidExecutor, tmp_path: Path) -> None:
    from fluid.integrations.lightning import sweep

    def has_logger(config: dict[str, Any]) -> Any:
        class Asking(module_of(BOTH[0])):  # type: ignore[misc]
            def on_train_epoch_end(self) -> None:
                self.log("loggers", float(len(self.trainer.loggers)))

        return Asking()

    elsewhere = tmp_path / "elsewhere"
    trainer = {
        "accelerator": "cpu",
        "max_epochs": 2,
        "logger": False,
        "callbacks": importlib.import_module(BOTH[0]).callbacks.ModelCheckpoint(elsewhere),
    }
    options: dict[str, Any] = {"metric": "loggers", "mode": "max", "samples": 1}
    result = sweep(has_logger, {}, datamodule=data_of(BOTH[0])(), trainer=trainer, **options)
    assert result.best.metrics["loggers"] == 0.0
    assert [path.name for path in elsewhere.iterdir()] == ["epoch=1-step=8.ckpt"]


def test_rungs_wait_for_the_first_validation(executor: FluidExecutor) -> None:
    from fluid.integrations.lightning import sweep

    result = sweep(
        module_of(BOTH[0]),
        {"lr": [0.01, 0.05, 0.1], "scheduler": "cycle"},
        datamodule=data_of(BOTH[0]),
        trainer={"accelerator": "cpu", "max_epochs": 5, "check_val_every_n_epoch": 2},
        metric="val_loss",
        samples=3,
    )
    assert not result.failures
    assert min(trial.iteration for trial in result.trials) >= 2


def test_what_a_sweep_refuses(executor: FluidExecutor) -> None:
    from fluid.integrations.lightning import sweep

    net, numbers = module_of(BOTH[0]), data_of(BOTH[0])
    with pytest.raises(InvalidFieldError, match="module='a Net': must be a class, or a function of a config"):
        sweep(net(), {}, metric="val_loss", budget=3)
    with pytest.raises(InvalidFieldError, match="trainer=3: must be a dict of a Trainer's arguments"):
        sweep(net, {}, trainer=3, metric="val_loss")  # type: ignore[arg-type]
    with pytest.raises(InvalidFieldError, match=r"space\['depth'\]=3: is taken neither by the module nor by the data"):
        sweep(net, {"depth": 3}, datamodule=numbers, metric="val_loss", samples=1)
    with pytest.raises(InvalidFieldError, match=r"trainer\['max_epoch'\]=3: is no argument of a Trainer"):
        sweep(net, {}, datamodule=numbers, trainer={"max_epoch": 3}, metric="val_loss")
    with pytest.raises(InvalidFieldError, match=r"trainer\['devices'\]=2: must be 1"):
        sweep(net, {}, datamodule=numbers, trainer={"devices": 2}, metric="val_loss")
    with pytest.raises(InvalidFieldError, match=r"trainer\['max_epochs'\]=0: must be at least 1"):
        sweep(net, {}, datamodule=numbers, trainer={"max_epochs": 0}, metric="val_loss")
    # A Trainer trains 1,000 epochs, or without an end: too many to compare trials by.
    for trainer in ({"max_steps": 400}, {"max_epochs": -1, "max_steps": 400}):
        with pytest.raises(InvalidFieldError, match=r"budget=None: must be given.*trainer\['max_steps'\]"):
            sweep(net, {}, datamodule=numbers, trainer=trainer, metric="val_loss")
    for trainer in ({}, None, lambda config: {"max_epochs": 3}):
        with pytest.raises(InvalidFieldError, match="budget=None: must be given, or max_epochs in trainer="):
            sweep(net, {}, datamodule=numbers, trainer=trainer, metric="val_loss")
    with pytest.raises(InvalidFieldError, match=r"datamodule=.*: cannot be given besides loaders"):
        sweep(net, {}, [1], datamodule=numbers, metric="val_loss")
    # What a function suggests is known only in the trial.
    with pytest.raises(SweepFailedError, match="neither the module nor the data take depth"):
        sweep(net, lambda trial: {"depth": 3}, datamodule=numbers, metric="val_loss", samples=1, budget=3)


def test_a_trial_whose_process_and_session_end_has_the_same_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lane is killed in the fourth epoch, the session ends after the fifth, and another one goes on."""
    always = functools.partial(LaneOptions, save_after=0.0, save_ratio=0.0)
    monkeypatch.setattr("fluid.backends.hosts.host.LaneOptions", always)  # Every state is saved.
    net, numbers, folder = module_of(BOTH[0]), data_of(BOTH[0]), str(tmp_path)

    class Dying(net):  # type: ignore[misc, valid-type]
        def on_train_epoch_start(self) -> None:
            with Path(folder, "epochs").open("a") as file:
                file.write(f"{self.current_epoch}\n")
            if self.current_epoch == 3 and not Path(folder, "died").exists():
                Path(folder, "died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if self.current_epoch == 5:
                eventually(Path(folder, "go-on").exists)

    def train(config: dict[str, Any]) -> None:
        import random

        import lightning
        import numpy
        import torch

        from fluid.integrations.lightning import fit

        for seed in (random.seed, numpy.random.seed, torch.manual_seed):
            seed(1)
        fit(lightning.Trainer(max_epochs=8, **QUIET), config["module"](), datamodule=numbers())

    def run(module: Any) -> list[Any]:
        resident = ReportingResident(train)
        resident.setup({"module": module})
        return run_out(resident)

    undisturbed = run(net)
    group = TrialGroup([Trial(train, {"module": Dying}, budget=8, trial_id="a")])
    found = []
    with FluidExecutor(backend="local", devices=1, run_dir=tmp_path / "run", verbose=0) as executor:
        for result in executor.submit_trialgroup(group).results():
            found.append(result.metrics)
            if len(found) == 5:
                break
    Path(folder, "go-on").touch()
    with FluidExecutor.resume(tmp_path / "run", verbose=0) as executor:
        (handle,) = executor.handles
        assert handle.wait(PATIENCE)
    results = fluid.load(tmp_path / "run").trials[0].results
    assert [one.iteration for one in results] == list(range(1, 9))
    assert [one.metrics for one in results] == undisturbed
    begun = Path(folder, "epochs").read_text().split()
    assert begun.count("0") == 1, "it went on from checkpoints"


def test_the_example_in_a_slurm_job(tmp_path: Path) -> None:
    """Lightning would take the trials for tasks of the job, and refuse to run."""
    root = Path(__file__).resolve().parents[2]
    options = ["--samples", "3", "--epochs", "3", "--devices", "1"]
    command = [sys.executable, str(root / "examples" / "frameworks" / "lightning_sweep.py"), *options]
    job = {"SLURM_NTASKS": "2", "SLURM_JOB_NAME": "sweep"}
    environment = {**os.environ, **job, "HOME": str(tmp_path), "PYTHONPATH": str(root)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = re.search(r"right on ([\d.]+)% of the digits", done.stdout)
    assert found is not None and float(found[1]) > 60.0, done.stdout


@pytest.mark.parametrize(
    ("metric", "callbacks", "said"),
    [
        ("margin", [SimpleNamespace(monitor="margin", mode="max")], ["max"]),
        ("margin", SimpleNamespace(monitor="margin", mode="min"), ["min"]),
        (["loss", "margin"], [object(), SimpleNamespace(monitor="margin", mode="max")], [None, "max"]),
        ("val_loss", [SimpleNamespace(monitor=None, mode="max")], [None]),
    ],
)
def test_callbacks_that_monitor_the_metric_say_its_mode(metric: Any, callbacks: Any, said: Any) -> None:
    from fluid.integrations.lightning import _modes_said

    assert _modes_said(metric, {"callbacks": callbacks}) == said
    assert _modes_said("margin", lambda config: {}) == [None]


def test_a_callback_that_contradicts_the_name_is_refused() -> None:
    from fluid.integrations.lightning import _modes_said

    with pytest.raises(fluid.InvalidFieldError, match="monitors 'val_acc' with mode 'min', but more of it is better"):
        _modes_said("val_acc", {"callbacks": [SimpleNamespace(monitor="val_acc", mode="min")]})
