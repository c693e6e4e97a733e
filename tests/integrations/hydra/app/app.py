"""An application of Hydra for the tests."""

import logging
import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig

log = logging.getLogger(__name__)


@dataclass
class Config:
    rate: float = 1.0
    fails_at: float = -1.0
    dies_at: float = -1.0
    locks_at: float = -1.0
    colour: str = "red"


class NoRateError(LookupError):
    """Pickle cannot make it again."""

    def __init__(self, rate: float, lock: Any) -> None:
        super().__init__(f"no rate {rate}")
        self.lock = lock


ConfigStore.instance().store(name="config", node=Config)


@hydra.main(version_base=None, config_path=None, config_name="config")
def main(config: Any) -> Any:
    log.info("rate %s in job %s", config.rate, HydraConfig.get().job.num)
    Path("here.txt").write_text(f"{os.environ.get('SHADE')}\n")
    if config.rate == config.dies_at:
        os.kill(os.getpid(), signal.SIGKILL)
    if config.rate == config.fails_at:
        raise NoRateError(config.rate, threading.Lock())
    return threading.Lock() if config.rate == config.locks_at else (config.rate - 0.3) ** 2


if __name__ == "__main__":
    main()
