"""The errors of the three sweeps' command line."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("ray")
from sweep_configs import WORKLOADS
from tuning.command_line import main

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--algo", "best"], "argument --algo: invalid choice: 'best'"),
        (["--executor", "spark"], "argument --executor: invalid choice: 'spark'"),
        (["--scale", "huge"], "argument --scale: invalid choice: 'huge'"),
        (["--samples", "0"], "argument --samples: must be at least 1"),
        (["--samples", "few"], "argument --samples: 'few' is not a whole number"),
        (["--seed", "-1"], "argument --seed: must be at least 0"),
        (["--devices", "0"], "argument --devices: must be at least 1"),
        (["--max-width", "1.5"], "argument --max-width: '1.5' is not a whole number"),
        (["--reuse-actors"], "--reuse-actors: needs --executor tune"),
        (["--data", "/nowhere"], "data='/nowhere': holds no"),
        (["--speed", "2"], "unrecognized arguments: --speed 2"),
    ],
)
@pytest.mark.parametrize("name", WORKLOADS)
def test_it_is_refused(name: str, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(WORKLOADS[name], arguments)
    assert raised.value.code == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.out == ""
