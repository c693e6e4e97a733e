"""Functions that make a trainer themselves report its evaluations, and go on from its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fluid.trainables.resident import Resident
from fluid.trainables.trainable import make_resident

pytestmark = pytest.mark.frameworks("transformers", "sklearn")

#: Evaluations within epochs, and one at the end of the second.
BY_STEP = {"eval_strategy": "steps", "eval_steps": 2}
#: The trainer changes the learning rate after an evaluation.
PLATEAU = {
    "lr_scheduler_type": "reduce_lr_on_plateau",
    "lr_scheduler_kwargs": {"patience": 0},
    "metric_for_best_model": "loss",
    "learning_rate": 0.3,
}


def started(tasks: Any, make_trainer: Callable[[], Any], folder: Path) -> Resident:
    """A trial as a lane runs it."""
    resident = make_resident(tasks.train_by_hand, trial_id="a", folder=str(folder))
    resident.setup({"make_trainer": make_trainer})
    return resident


def metrics_of(resident: Resident) -> Iterator[dict[str, Any]]:
    """The metrics of its iterations, but for those that tell how long they took."""
    while (step := resident.step()).metrics is not None:
        yield {
            name: value for name, value in step.metrics.items() if "runtime" not in name and "per_second" not in name
        }


def in_two_parts(tasks: Any, make_trainer: Callable[[], Any], iterations: int, folder: Path) -> tuple[Any, Any, Any]:
    """The first iterations of a trial, what follows, and what follows from its checkpoint in another process."""
    trial = started(tasks, make_trainer, folder)
    metrics = metrics_of(trial)
    before = [next(metrics) for _ in range(iterations)]
    (saved := folder / "saved").mkdir()
    trial.save(str(saved))
    after = list(metrics)
    again = started(tasks, make_trainer, folder)
    again.restore(str(saved))
    continued = list(metrics_of(again))
    trial.cleanup()
    again.cleanup()
    return before, after, continued


@pytest.mark.parametrize("options", [{}, BY_STEP, PLATEAU], ids=["epochs", "steps", "plateau"])
def test_a_trial_that_goes_on_has_the_losses_of_an_undisturbed_one(
    tasks: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    make_trainer = partial(tasks.make_trainer, tmp_path, **options)
    before, after, continued = in_two_parts(tasks, make_trainer, 2, tmp_path)
    assert continued == after
    assert [each["eval_loss"] for each in before + after] == tasks.losses_alone(make_trainer())
    assert [each["step"] for each in before + after] == ([2, 4, 6, 8, 10, 12] if options is BY_STEP else [3, 6, 9, 12])


def test_early_stopping_goes_on_counting(tasks: Any, tmp_path: Path) -> None:
    def make_trainer() -> Any:
        from transformers import EarlyStoppingCallback

        return tasks.make_trainer(
            tmp_path,
            callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
            metric_for_best_model="loss",
            learning_rate=0.0,  # Nothing improves after the first evaluation.
            restore_callback_states_from_checkpoint=True,
            num_train_epochs=9,
        )

    _, after, continued = in_two_parts(tasks, make_trainer, 2, tmp_path)
    assert [each["epoch"] for each in after] == [3.0]
    assert continued == after


def test_an_evaluation_on_two_data_sets_is_one_iteration(tasks: Any, tmp_path: Path) -> None:
    sets = {"a": tasks.Digits(1000, 1008), "b": tasks.Digits(1008, 1016)}
    make_trainer = partial(tasks.make_trainer, tmp_path, eval_dataset=sets, eval_on_start=True, num_train_epochs=2)
    trial = started(tasks, make_trainer, tmp_path)
    iterations = list(metrics_of(trial))
    trial.cleanup()
    assert [each["step"] for each in iterations] == [3, 6]
    assert all({"eval_a_loss", "eval_b_loss"} <= each.keys() for each in iterations)


def test_a_checkpoint_is_whole_whatever_the_trainer_saves(tasks: Any, tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    saving = {"save_only_model": True, "save_strategy": "epoch", "save_total_limit": 1, "load_best_model_at_end": True}
    trial = started(tasks, partial(tasks.make_trainer, tmp_path, kind=tasks.TrainerWithCard, **saving), tmp_path)
    iterations = metrics_of(trial)
    next(iterations)
    (saved := tmp_path / "saved").mkdir()
    trial.save(str(saved))
    files = {file.name for file in (saved / "state").iterdir()}
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"} <= files
    assert GPT2LMHeadModel.from_pretrained(saved / "state").config.n_embd == 16
    assert len(list(iterations)) == 3
    assert str(saved) not in (tmp_path / "out" / "checkpoint-12" / "trainer_state.json").read_text()
    trial.cleanup()


def test_outside_a_trial_the_callback_does_nothing(tasks: Any, tmp_path: Path) -> None:
    tasks.train_by_hand({"make_trainer": partial(tasks.make_trainer, tmp_path, num_train_epochs=1)})
    assert not list((tmp_path / "out").iterdir())
