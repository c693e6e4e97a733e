"""TensorBoard: a run per trial, written by TensorBoard's own record writer. TensorFlow and PyTorch are not needed."""

from __future__ import annotations

import io
import itertools
import os
import socket
from pathlib import Path
from typing import Any

from fluid._clock import wall_seconds
from fluid._imports import try_import
from fluid.engine.events import Failure
from fluid.lane.checkpoints.paths import folder_name
from fluid.loggers.logger import LoggedSession, LoggedTrial, TrialLogger
from fluid.loggers.logger_files import Files, claim
from fluid.loggers.values import hyperparameters, scalars, texts
from fluid.results.records import Result

with try_import("tensorboard", extra="tensorboard") as _imports:
    from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
    from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2
    from tensorboard.plugins.hparams import metadata as hparams
    from tensorboard.plugins.text import metadata as text_plugin
    from tensorboard.summary.writer.record_writer import RecordWriter


class TensorBoard(TrialLogger):
    """Writes a TensorBoard run per trial: ``FOLDER/GROUP/TRIAL``.

    Numeric metrics are scalars, at the iteration as the step; other metrics are texts. The config and the final state
    are on the HParams page. ``tensorboard --logdir FOLDER`` shows them while trials run.

    Example:
        >>> from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        >>> from fluid import FluidExecutor, Trial, TrialGroup
        >>> from fluid.loggers import TensorBoard
        >>> def train(config):
        ...     yield {"loss": config["lr"] ** 2}
        >>> with FluidExecutor(backend="local", devices=1, verbose=0, loggers=[TensorBoard("tb")]) as executor:
        ...     group = TrialGroup([Trial(train, {"lr": 0.5}, trial_id="a")], name="sweep")
        ...     ended = executor.submit_trialgroup(group).wait()
        >>> [(scalar.step, scalar.value) for scalar in EventAccumulator("tb/sweep/a").Reload().Scalars("loss")]
        [(1, 0.25)]

    Args:
        folder: the log folder, which may have runs of other sessions; a group whose name they have taken gets another
            one. ``None``, the default, for ``tensorboard`` in the run folder.

    Raises:
        MissingDependencyError: tensorboard is not installed.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        _imports.check()
        self.destination = "" if folder is None else str(Path(folder).expanduser().absolute())
        self._folder = Path(self.destination)
        self._session_id = ""
        self._files: Files
        #: The folder of each group.
        self._groups: dict[str, Path] = {}
        self._runs: dict[str, _EventFile] = {}

    def on_session(self, session: LoggedSession) -> None:
        self._session_id = session.session_id
        if not self.destination:
            self._folder = session.run_dir / "tensorboard"
        self._files = Files(self._folder, session.run_dir)
        self._files.make_folder(self._folder)

    def on_trial(self, trial: LoggedTrial) -> None:
        if trial.group not in self._groups:
            self._groups[trial.group] = claim(self._folder, folder_name(trial.group), self._session_id, self._files)
        run = self._runs.get(trial.trial_id)
        if run is None:
            folder = self._groups[trial.group] / folder_name(trial.trial_id)
            run = self._runs[trial.trial_id] = _EventFile(self._new_file(folder), self._files, goes_on=folder.exists())
            run.add_values([_text(f"fluid/{name}", str(fact)) for name, fact in trial.start_facts.items()], 0)
        run.set_config(trial)

    def on_result(self, result: Result) -> None:
        run = self._runs[result.trial_id]
        values = [summary_pb2.Summary.Value(tag=tag, simple_value=x) for tag, x in scalars(result.metrics).items()]
        values += [_text(tag, text) for tag, text in texts(result.metrics).items()]
        run.add_values(values, result.iteration, is_result=True)

    def on_start(self, trial_id: str) -> None:
        self._runs[trial_id].has_ended = False

    def on_end(self, trial_id: str, state: str, failure: Failure | None) -> None:
        run = self._runs[trial_id]
        run.add_values([_text("fluid/state", state)], run.last_step)
        if failure is not None:
            text = f"{failure.message}\n\n{failure.traceback}"
            run.add_values([_text("fluid/failure", text)], run.last_step)
        if state != "PAUSED":
            run.end(has_failed=state == "FAILED")

    def _new_file(self, folder: Path) -> Path:
        """A file that does not exist; its name has the time, as TensorBoard reads files in the order of names."""
        name = f"events.out.tfevents.{int(wall_seconds()):010d}.{socket.gethostname()}.{os.getpid()}"
        candidates = (folder / f"{name}.{number}" for number in itertools.count())
        return next(candidate for candidate in candidates if not candidate.exists())

    def on_broken(self, error: BaseException) -> None:
        self.flush()

    def flush(self) -> bool:
        for trial_id, run in list(self._runs.items()):
            run.write()
            if run.has_ended and run.has_config:
                del self._runs[trial_id]
        return True


class _EventFile:
    """One event file, which is open only while something is written.

    Args:
        path: the file.
        files: makes it.
        goes_on: whether an earlier session has written events of the trial.
    """

    def __init__(self, path: Path, files: Files, *, goes_on: bool) -> None:
        self._path = path
        self._files = files
        self._buffer = io.BytesIO()
        self._writer = RecordWriter(self._buffer)
        self._purges = goes_on
        self.has_config = self.has_ended = False
        self.last_step = 0
        self._add(event_pb2.Event(wall_time=wall_seconds(), file_version="brain.Event:2"))

    def set_config(self, trial: LoggedTrial) -> None:
        """Tells the HParams page the config, once it is known: the page takes the first one."""
        if self.has_config or not trial.config:
            return
        self.has_config = True
        started = plugin_data_pb2.SessionStartInfo(start_time_secs=wall_seconds(), group_name=trial.trial_id)
        for name, value in hyperparameters(trial.config).items():
            kind = "bool_value" if isinstance(value, bool) else "string_value" if isinstance(value, str) else ""
            setattr(started.hparams[name], kind or "number_value", value)
        data = plugin_data_pb2.HParamsPluginData(session_start_info=started)
        self._add_hparams(hparams.SESSION_START_INFO_TAG, data)

    def add_values(self, values: list[Any], step: int, *, is_result: bool = False) -> None:
        """Adds summaries of a step."""
        if self._purges and is_result:
            # What an earlier session has written of this step and later ones, without having noted it, is void.
            self._purges = False
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._add(event_pb2.Event(wall_time=wall_seconds(), step=step, session_log=start))
        self.last_step = step
        if values:
            summary = summary_pb2.Summary(value=values)
            self._add(event_pb2.Event(wall_time=wall_seconds(), step=step, summary=summary))

    def end(self, *, has_failed: bool) -> None:
        """Tells the HParams page that the trial has ended."""
        self.has_ended = True
        status = api_pb2.STATUS_FAILURE if has_failed else api_pb2.STATUS_SUCCESS
        ended = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=wall_seconds())
        data = plugin_data_pb2.HParamsPluginData(session_end_info=ended)
        self._add_hparams(hparams.SESSION_END_INFO_TAG, data)

    def write(self) -> None:
        """Appends to the file."""
        if self._buffer.tell():
            self._files.make_folder(self._path.parent)
            with self._files.open(self._path, "ab") as file:
                file.write(self._buffer.getvalue())
            self._buffer.seek(0)
            self._buffer.truncate()

    def _add_hparams(self, tag: str, data: Any) -> None:
        made = hparams.create_summary_metadata(data)
        value = summary_pb2.Summary.Value(tag=tag, metadata=made, tensor=hparams.NULL_TENSOR)
        self._add(event_pb2.Event(wall_time=wall_seconds(), summary=summary_pb2.Summary(value=[value])))

    def _add(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())


def _text(tag: str, text: str) -> Any:
    """A text, as TensorBoard's text page takes it."""
    plugin = summary_pb2.SummaryMetadata.PluginData(plugin_name=text_plugin.PLUGIN_NAME)
    tensor = tensor_pb2.TensorProto(
        dtype=types_pb2.DT_STRING,
        tensor_shape=tensor_shape_pb2.TensorShapeProto(),
        string_val=[text.encode()],
    )
    return summary_pb2.Summary.Value(tag=tag, metadata=summary_pb2.SummaryMetadata(plugin_data=plugin), tensor=tensor)
