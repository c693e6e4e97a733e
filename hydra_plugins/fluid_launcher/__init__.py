"""Hydra's launcher ``fluid``. Hydra loads all of ``hydra_plugins`` at each start of an application."""
