"""Backends: where trials run. Each one is a module of its own and knows no other backend."""
