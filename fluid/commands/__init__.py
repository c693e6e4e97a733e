"""The commands of the command line, a module each: its arguments, and what it runs.

Start reading with :mod:`fluid.cli`, which calls them. A command imports what it needs when it runs, so that
``fluid --help`` is fast.
"""
