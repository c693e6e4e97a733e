"""An application with a class that only a group of its configs names."""

import json
import os

import hydra
from hydra.utils import instantiate


class Model:
    def __init__(self, width: int) -> None:
        self.width = width


@hydra.main(config_path="names", config_name="config", version_base=None)
def main(config):  # type: ignore[no-untyped-def]
    model = instantiate(config.model)
    with open(os.path.join(os.environ["FOUND"], f"{model.width}.json"), "w") as file:
        json.dump([type(model).__name__, model.width], file)


if __name__ == "__main__":
    main()
