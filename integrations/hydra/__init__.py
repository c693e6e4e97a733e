"""Hydra's jobs on Fluid: what ``hydra/launcher=fluid`` does. The plugin itself is ``hydra_plugins.fluid_launcher``.

Start reading at ``launching``, then ``job``.
"""
