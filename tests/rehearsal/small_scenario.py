"""A small scenario of YAHPO Gym, made by the tests: its files, and what its network predicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

#: A space with conditions: rate_drop counts with the booster dart, depth with dart and gbtree, eta with a depth.
SPACE = {
    "hyperparameters": [
        {"name": "task_id", "type": "categorical", "choices": ["7", "12"]},
        {"name": "booster", "type": "categorical", "choices": ["gblinear", "gbtree", "dart"]},
        {"name": "trainsize", "type": "uniform_float", "log": False, "lower": 0.03, "upper": 1.0},
        {"name": "rate_drop", "type": "uniform_float", "log": False, "lower": 0.0, "upper": 1.0},
        {"name": "depth", "type": "uniform_int", "log": True, "lower": 1, "upper": 16},
        {"name": "repl", "type": "uniform_int", "log": False, "lower": 1, "upper": 10},
        {"name": "fixed", "type": "constant", "value": 5},
    ],
    "conditions": [
        {"child": "rate_drop", "parent": "booster", "type": "EQ", "value": "dart"},
        {"child": "depth", "parent": "booster", "type": "IN", "values": ["dart", "gbtree"]},
    ],
    "forbiddens": [],
    "json_format_version": 0.2,
}
ENCODING = {"task_id": {"#na#": 0, "12": 1, "7": 2}, "booster": {"#na#": 0, "dart": 1, "gblinear": 2, "gbtree": 3}}
SCENARIO = {
    "numbers": ["rate_drop", "depth", "trainsize", "repl", "fixed"],
    "categories": ["task_id", "booster"],
    "targets": ["auc", "timetrain", "ramtrain"],
    "metric": "auc",
    "mode": "max",
    "fidelity": "trainsize",
    "time": "timetrain",
    "instance": "task_id",
    "memory": "ramtrain",
    "at_most": ["repl"],
}
#: What the network adds up of its numbers and its categories, for each target.
BY_NUMBER = np.array([[1, 0, 2], [0.5, 0, 1], [1, 100, 0], [0.125, 0, 0], [0, 0, 1]], np.float32)
BY_CATEGORY = np.array([[16, 0, 0], [64, 0, 0]], np.float32)


class SummingNetwork:
    """Adds up its inputs, and tells what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, Any]] = []

    def run(self, categories: Any, numbers: Any) -> Any:
        self.asked.append((categories.tolist(), numbers.tolist()))
        return numbers @ BY_NUMBER + categories.astype(np.float32) @ BY_CATEGORY


def write_scenario(folder: Path, **changes: Any) -> Path:
    """Writes the files, without the network."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("config_space", SPACE), ("encoding", ENCODING), ("scenario", {**SCENARIO, **changes})):
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def write_network(folder: Path) -> None:
    """Writes the network itself, with the package onnx."""
    from onnx import TensorProto, helper, numpy_helper, save

    nodes = [
        helper.make_node("Cast", ["x_cat"], ["categories"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["categories", "by_category"], ["first"]),
        helper.make_node("MatMul", ["x_cont", "by_number"], ["second"]),
        helper.make_node("Add", ["first", "second"], ["output"]),
    ]
    graph = helper.make_graph(
        nodes,
        "sums",
        [
            helper.make_tensor_value_info("x_cat", TensorProto.INT32, ["rows", len(BY_CATEGORY)]),
            helper.make_tensor_value_info("x_cont", TensorProto.FLOAT, ["rows", len(BY_NUMBER)]),
        ],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, ["rows", 3])],
        [numpy_helper.from_array(BY_NUMBER, "by_number"), numpy_helper.from_array(BY_CATEGORY, "by_category")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    save(model, str(folder / "model.onnx"))
