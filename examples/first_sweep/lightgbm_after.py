import lightgbm
from sklearn.datasets import load_breast_cancer

import fluid.integrations.lightgbm

x, y = load_breast_cancer(return_X_y=True)
data = lightgbm.Dataset(x[:400], y[:400])
valid = [lightgbm.Dataset(x[400:], y[400:], reference=data)]
params = {"objective": "binary", "metric": "auc", "num_leaves": [7, 31], "eta": fluid.search.loguniform(0.01, 0.5)}
model = fluid.integrations.lightgbm.train(params, data, 81, valid, metric="valid_0-auc").best.load_checkpoint()
print((model.predict(x[400:]).round() == y[400:]).mean())
model.save_model("model.txt")
