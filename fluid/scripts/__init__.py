"""A script as a trainable: its command, its space as text, its sweep file, how its metrics are read, its process.

``fluid run`` (:mod:`fluid.commands.run`) reads :mod:`fluid.scripts.options` and :mod:`fluid.scripts.sweep_file` into
arguments of ``fluid.run``; :mod:`fluid.scripts.trainable` is the trainable. :mod:`fluid.scripts.hook` is on the path of
the script's own interpreter, which may lack Fluid.
"""
